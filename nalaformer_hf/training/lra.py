"""Train an encoder on a task of Long Range Arena: `nalaformer train lra`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from transformers import EvalPrediction

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_config import LRATrainConfig
from nalaformer_hf.training.lra_data import LRASplits, SequenceCollator, load_splits
from nalaformer_hf.training.lra_models import DocumentPairClassifier, make_lra_model
from nalaformer_hf.training.run_trainer import RunTrainer
from nalaformer_hf.training.runs import Outcome, RunResult, final_metrics, preparing, train_to_the_end


@dataclass(frozen=True, kw_only=True)
class LRATrainResult(RunResult):
    """A `RunResult` with what was measured on what, when finished.

    Args:
        task: Name of the task.
        attention: "nala", "elu" or "softmax".
        seed: Of the weights and of the order of the items.
        max_length: Longest sequence.
        sizes: Items of the splits train, validation and test.
        loss: Mean cross entropy on the test items, in nats.
        accuracy: Share of the test items whose class is the likeliest.
        validation_accuracy: The same of the validation items, where there are any.
    """

    task: str | None = None
    attention: str | None = None
    seed: int | None = None
    max_length: int | None = None
    sizes: tuple[int, int, int] | None = None
    loss: float | None = None
    accuracy: float | None = None
    validation_accuracy: float | None = None


def train_lra(config: LRATrainConfig, *, resume: bool = False) -> LRATrainResult:
    """Train an encoder, and score it on the test items.

    Writes to `train.output_dir`: `config.yaml`, `checkpoint-N/`, `runs/` (TensorBoard) and, at the end,
    `model/` and `result.json`. Ctrl-C and SIGTERM end the run after the current step with a checkpoint;
    `resume` goes on from the newest complete one with the losses that an uninterrupted run has.

    Args:
        config: The checked configuration.
        resume: Go on with the run in `train.output_dir`. Without a checkpoint there it begins, or with
            `train.resume_from_checkpoint`, which names another than the newest.

    Returns:
        Where the run stands.

    Raises:
        ConfigError: There is a run already and `resume` is not set, or it has another model or other items;
            the items or the model do not exist or do not fit together.
    """
    arguments = config.training_arguments()
    with preparing(config, arguments, resume=resume, kept=("model", "data")):
        splits = load_splits(config.data)
    if splits.validation is None and arguments.eval_strategy != "no":
        raise ConfigError("train.eval_strategy must be no: there are no validation items")
    trainer = RunTrainer(
        model=make_lra_model(config.model, config.data),
        args=arguments,
        data_collator=SequenceCollator(config.data),
        train_dataset=splits.train,
        eval_dataset=splits.validation,
        compute_metrics=_accuracy,
    )
    return train_to_the_end(
        trainer, config.output_dir, LRATrainResult, lambda: _evaluate(trainer, config, splits)
    )


def _accuracy(prediction: EvalPrediction) -> dict[str, float]:
    likeliest = np.asarray(prediction.predictions).argmax(-1)
    return {"accuracy": float((likeliest == prediction.label_ids).mean())}


def _evaluate(trainer: RunTrainer, config: LRATrainConfig, splits: LRASplits) -> Outcome:
    validation = None if splits.validation is None else final_metrics(trainer)["eval_accuracy"]
    test: Any = splits.test
    tested = trainer.evaluate(test, metric_key_prefix="test")
    figures = {
        "task": config.data.task,
        "attention": config.model.attention,
        "seed": trainer.args.seed,
        "max_length": config.data.length,
        "sizes": splits.sizes,
        "loss": tested["test_loss"],
        "accuracy": tested["test_accuracy"],
        "validation_accuracy": validation,
    }
    return _facts(trainer, config, figures), figures


def _facts(trainer: RunTrainer, config: LRATrainConfig, figures: dict[str, Any]) -> dict[str, Any]:
    """What the model card says of the training; folders of the user's are not named."""
    source = config.data.source or config.data.facts.source
    on_hub = source is not None and not Path(source).exists()
    facts = {
        "task": f"{config.data.facts.title} of Long Range Arena, sequences of up to {config.data.length}",
        "tokens": "token number n (a byte, a grey value) has the id n + 1, padding 0",
        "items": "generated" if config.data.facts.is_generated else source if on_hub else "a folder",
        "optimizer steps": trainer.state.global_step,
        "sequences a step": trainer.get_total_train_batch_size(trainer.args),
        "peak learning rate": trainer.args.learning_rate,
        "test accuracy": round(figures["accuracy"], 4),
    }
    if isinstance(trainer.unwrapped_model, DocumentPairClassifier):
        facts["class"] = "load it with nalaformer_hf.training.lra_models.DocumentPairClassifier"
    return facts | ({"datasets": [source]} if on_hub else {})
