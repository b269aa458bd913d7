"""Train a causal language model from a configuration: `nalaformer train lm`."""

import json
import shutil
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from omegaconf import OmegaConf
from transformers import (
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TrainerState,
    TrainingArguments,
    set_seed,
)
from transformers.trainer import TRAINER_STATE_NAME

from nalaformer_hf.training.blocks import PackedStream, pack_corpus, pack_in_memory, pad_blocks
from nalaformer_hf.training.checkpoints import last_complete_checkpoint
from nalaformer_hf.training.config import DataSection, LMTrainConfig
from nalaformer_hf.training.corpus import count_bytes, load_corpus
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.interrupt import InterruptCallback
from nalaformer_hf.training.models import make_model
from nalaformer_hf.training.packing import PackingCollator, needs_flattening
from nalaformer_hf.training.tokenizer import boundary_tokens, make_tokenizer
from nalaformer_hf.training.trainer import LMTrainer

CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
MODEL_DIR = "model"
TOKENIZER_DIR = "tokenizer"
BLOCKS_DIR = "_blocks"  # the Trainer uploads no file whose name begins with an underscore


@dataclass(frozen=True)
class TrainResult:
    """What a run came to.

    Args:
        finished: False if a signal ended it; it goes on with `resume=True`.
        steps: Optimizer steps done.
        num_parameters: Parameters of the model.
        checkpoint: The newest complete checkpoint.
        model_dir: The trained model and its tokenizer, for `from_pretrained`, when finished.
        heldout_loss: Mean nats a predicted token of the held-out text, when finished.
        heldout_bits_per_byte: Bits a UTF-8 byte of the held-out text, when finished.
    """

    finished: bool
    steps: int
    num_parameters: int
    checkpoint: str | None
    model_dir: str | None = None
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
        ConfigError: There is a run already and `resume` is not set, or it has another model, tokenizer or
            corpus.
    """
    arguments = config.training_arguments()
    output_dir = config.output_dir
    with arguments.main_process_first(local=arguments.save_on_each_node, desc="preparing the text"):
        if arguments.should_save:
            _open_run(config, resume=resume)
        corpus = load_corpus(config.data, arguments.seed)
        tokenizer = make_tokenizer(
            config.tokenizer, corpus.train, output_dir / TOKENIZER_DIR, pretrained=config.model.pretrained
        )
        blocks = pack_corpus(corpus.train, tokenizer, config.data.block_size, output_dir / BLOCKS_DIR)
    set_seed(arguments.seed)
    trainer = _make_trainer(
        arguments,
        make_model(config.model, tokenizer),
        tokenizer,
        blocks,
        corpus.heldout,
        config.data.block_size,
    )
    checkpoint = arguments.resume_from_checkpoint or last_complete_checkpoint(output_dir)
    finished = _train(trainer, None if checkpoint is None else Path(checkpoint))
    return _finish(trainer, config) if finished else _result(trainer, output_dir)


def _open_run(config: LMTrainConfig, *, resume: bool) -> None:
    """Check that the folder is free or holds the run that is to be resumed, and note the configuration."""
    folder = config.output_dir
    noted = folder / CONFIG_FILE
    if not resume:
        if (folder / MODEL_DIR).exists() or any(folder.glob("checkpoint-*")):
            raise ConfigError(f"train.output_dir {folder} holds a run: resume it, or name another folder")
        for name in (TOKENIZER_DIR, BLOCKS_DIR):
            shutil.rmtree(folder / name, ignore_errors=True)
    elif noted.is_file():
        _check_same_run(OmegaConf.to_container(OmegaConf.load(noted)), config.to_dict())
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config.to_dict()), noted)


def _check_same_run(before: Any, now: dict[str, Any]) -> None:
    for section in ("model", "data", "tokenizer"):
        changed = [
            f"{section}.{name}" for name, value in now[section].items() if before[section][name] != value
        ]
        if changed:
            raise ConfigError(
                f"a resumed run keeps its model, data and tokenizer, but {', '.join(changed)} changed"
            )


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


def _train(trainer: LMTrainer, checkpoint: Path | None) -> bool:
    """Train to the end, or until a signal comes; tell which."""
    *_, max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    if checkpoint is not None:
        trainer.args.eval_on_start = False  # it was done when the run began
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step >= max_steps:
            trainer._load_from_checkpoint(str(checkpoint))
            trainer.state = state
            return True
    interrupt = InterruptCallback()
    trainer.add_callback(interrupt)
    with interrupt.catch_signals():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer.state.global_step >= max_steps


def _finish(trainer: LMTrainer, config: LMTrainConfig) -> TrainResult:
    """Evaluate, save the model with what its card says of its training, and note the result."""
    output_dir = config.output_dir
    metrics = _metrics_now(trainer) or trainer.evaluate()
    if hasattr(trainer.language_model.config, "training_facts"):
        trainer.language_model.config.training_facts = _facts(trainer, config.data, metrics)
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="End of training")
    target = output_dir / MODEL_DIR
    trainer.save_final(target)
    result = _result(trainer, output_dir, target, metrics)
    if trainer.args.should_save:
        (output_dir / RESULT_FILE).write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
    return result


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


def _metrics_now(trainer: LMTrainer) -> dict[str, float] | None:
    """What the last step's evaluation logged, if there was one and its weights are still the model's."""
    last = [row for row in trainer.state.log_history if row["step"] == trainer.state.global_step]
    evaluated = [row for row in last if "eval_loss" in row]
    return evaluated[-1] if evaluated and not trainer.args.load_best_model_at_end else None


def _result(
    trainer: LMTrainer,
    output_dir: Path,
    model_dir: Path | None = None,
    metrics: dict[str, float] | None = None,
) -> TrainResult:
    checkpoint = last_complete_checkpoint(output_dir)
    metrics = metrics or {}
    return TrainResult(
        finished=model_dir is not None,
        steps=trainer.state.global_step,
        num_parameters=trainer.language_model.num_parameters(),
        checkpoint=None if checkpoint is None else str(checkpoint),
        model_dir=None if model_dir is None else str(model_dir),
        heldout_loss=metrics.get("eval_loss"),
        heldout_bits_per_byte=metrics.get("eval_bits_per_byte"),
    )
