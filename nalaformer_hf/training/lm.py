"""Train a causal language model from a configuration: `nalaformer train lm`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainingArguments,
)

from nalaformer_hf import NaLaConfig
from nalaformer_hf.training.blocks import PackedStream, pack_corpus, pack_in_memory, pad_blocks
from nalaformer_hf.training.config import DataSection, LMTrainConfig
from nalaformer_hf.training.corpus import count_bytes, load_corpus
from nalaformer_hf.training.models import check_model, make_model
from nalaformer_hf.training.packing import PackingCollator, needs_flattening
from nalaformer_hf.training.runs import Outcome, RunResult, final_metrics, preparing, train_to_the_end
from nalaformer_hf.training.tokenizer import boundary_tokens, make_tokenizer
from nalaformer_hf.training.trainer import LMTrainer

TOKENIZER_DIR = "tokenizer"
BLOCKS_DIR = "_blocks"  # the Trainer uploads no file whose name begins with an underscore


@dataclass(frozen=True)
class TrainResult(RunResult):
    """A `RunResult` with the figures of the held-out text, when finished.

    Args:
        heldout_loss: Mean nats a predicted token.
        heldout_bits_per_byte: Bits a UTF-8 byte.
    """

    heldout_loss: float | None = None
    heldout_bits_per_byte: float | None = None


def train_lm(config: LMTrainConfig, *, resume: bool = False) -> TrainResult:
    """Train a causal language model.

    Writes to `train.output_dir`: `config.yaml`, `tokenizer/` (a trained one), `checkpoint-N/`, `runs/`
    (TensorBoard) and, at the end, `model/`, which `from_pretrained` loads, and `result.json`. Ctrl-C and
    SIGTERM end the run after the current step with a checkpoint; `resume` goes on from the newest complete
    one with the losses that an uninterrupted run has.

    Args:
        config: The checked configuration.
        resume: Go on with the run in `train.output_dir`. Without a checkpoint there it begins, or with
            `train.resume_from_checkpoint`, which names another than the newest.

    Returns:
        Where the run stands.

    Raises:
        ConfigError: There is no such model; there is a run already and `resume` is not set, or it has another
            model, tokenizer or corpus.
    """
    check_model(config.model, NaLaConfig, MODEL_FOR_CAUSAL_LM_MAPPING)
    arguments = config.training_arguments()
    output_dir = config.output_dir
    kept, made = ("model", "data", "tokenizer"), (TOKENIZER_DIR, BLOCKS_DIR)
    with preparing(config, arguments, resume=resume, kept=kept, made=made):
        corpus = load_corpus(config.data, arguments.seed)
        tokenizer = make_tokenizer(
            config.tokenizer, corpus.train, output_dir / TOKENIZER_DIR, pretrained=config.model.pretrained
        )
        blocks = pack_corpus(corpus.train, tokenizer, config.data.block_size, output_dir / BLOCKS_DIR)
    trainer = _make_trainer(
        arguments,
        make_model(config.model, tokenizer),
        tokenizer,
        blocks,
        corpus.heldout,
        config.data.block_size,
    )
    return train_to_the_end(trainer, output_dir, TrainResult, lambda: _evaluate(trainer, config.data))


def _make_trainer(
    arguments: TrainingArguments,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    blocks: Dataset | PackedStream,
    heldout: Dataset,
    block_size: int,
) -> LMTrainer:
    _, end = boundary_tokens(tokenizer)
    if isinstance(blocks, Dataset):
        num_batches = arguments.world_size * arguments.gradient_accumulation_steps
        blocks = pad_blocks(blocks, arguments.train_batch_size * num_batches)
    eval_blocks = pack_in_memory(heldout, tokenizer, block_size)
    return LMTrainer(
        model=model,
        args=arguments,
        data_collator=PackingCollator(block_size, end, flatten=needs_flattening(model.config)),
        train_dataset=blocks,
        eval_dataset=pad_blocks(eval_blocks, arguments.eval_batch_size * arguments.world_size),
        eval_bytes=count_bytes(heldout),
        processing_class=tokenizer,
    )


def _evaluate(trainer: LMTrainer, data: DataSection) -> Outcome:
    metrics = final_metrics(trainer)
    figures = {
        "heldout_loss": metrics["eval_loss"],
        "heldout_bits_per_byte": metrics["eval_bits_per_byte"],
    }
    return _facts(trainer, data, metrics), figures


def _facts(trainer: LMTrainer, data: DataSection, metrics: dict[str, float]) -> dict[str, Any]:
    """What the model card says of the training; files of the user's are not named."""
    facts = {
        "text": data.hub or data.corpus or "files",
        "optimizer steps": trainer.state.global_step,
        "sequences a step": trainer.get_total_train_batch_size(trainer.args),
        "tokens a sequence": data.block_size,
        "peak learning rate": trainer.args.learning_rate,
        "held-out bits per byte": round(metrics["eval_bits_per_byte"], 4),
    }
    return facts | ({"datasets": [data.hub]} if data.hub and not Path(data.hub).exists() else {})
