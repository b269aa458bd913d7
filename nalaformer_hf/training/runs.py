"""What every training run does: open its folder, train to the end or to a signal, note the result."""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from transformers import TrainerState
from transformers.trainer import TRAINER_STATE_NAME

from nalaformer_hf.training.checkpoints import last_complete_checkpoint
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.interrupt import InterruptCallback
from nalaformer_hf.training.run_trainer import RunTrainer
from nalaformer_hf.training.sections import RunConfig

CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
MODEL_DIR = "model"


@dataclass(frozen=True)
class RunResult:
    """What a run came to.

    Args:
        finished: False if a signal ended it; it goes on with `resume=True`.
        steps: Optimizer steps done.
        num_parameters: Parameters of the model.
        checkpoint: The newest complete checkpoint.
        model_dir: The trained model and what prepares its inputs, for `from_pretrained`, when finished.
    """

    finished: bool
    steps: int
    num_parameters: int
    checkpoint: str | None
    model_dir: str | None = None


def open_run(config: RunConfig, *, resume: bool, kept: Sequence[str], made: Sequence[str] = ()) -> None:
    """Check that the folder is free or holds the run that is to be resumed, and note the configuration.

    Args:
        config: The checked configuration.
        resume: Go on with the run that is there.
        kept: Sections that a resumed run must have as they were.
        made: Folders that a new run makes, and an earlier attempt may have left.

    Raises:
        ConfigError: There is a run already and `resume` is not set, or it has other sections.
    """
    folder = config.output_dir
    noted = folder / CONFIG_FILE
    if not resume:
        if (folder / MODEL_DIR).exists() or any(folder.glob("checkpoint-*")):
            raise ConfigError(f"train.output_dir {folder} holds a run: resume it, or name another folder")
        for name in made:
            shutil.rmtree(folder / name, ignore_errors=True)
    elif noted.is_file():
        _check_same_run(OmegaConf.to_container(OmegaConf.load(noted)), config.to_dict(), kept)
    folder.mkdir(parents=True, exist_ok=True)
    OmegaConf.save(OmegaConf.create(config.to_dict()), noted)


def _check_same_run(before: Any, now: dict[str, Any], kept: Sequence[str]) -> None:
    for section in kept:
        changed = [
            f"{section}.{name}" for name, value in now[section].items() if before[section][name] != value
        ]
        if changed:
            words = f"{', '.join(kept[:-1])} and {kept[-1]}"
            raise ConfigError(f"a resumed run keeps its {words}, but {', '.join(changed)} changed")


def train_or_stop(trainer: RunTrainer, output_dir: Path) -> bool:
    """Train to the end, or until a signal comes; tell which. Begin at the newest complete checkpoint."""
    named = trainer.args.resume_from_checkpoint or last_complete_checkpoint(output_dir)
    checkpoint = None if named is None else Path(named)
    *_, max_steps = trainer.set_initial_training_values(trainer.args, trainer.get_train_dataloader())
    if checkpoint is not None:
        trainer.args.eval_on_start = False  # it was done when the run began
        state = TrainerState.load_from_json(str(checkpoint / TRAINER_STATE_NAME))
        if state.global_step >= max_steps:
            trainer.load_weights(checkpoint)
            trainer.state = state
            return True
    interrupt = InterruptCallback()
    trainer.add_callback(interrupt)
    with interrupt.catch_signals():
        trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    return trainer.state.global_step >= max_steps


def finish_run(trainer: RunTrainer, output_dir: Path, facts: dict[str, Any]) -> None:
    """Save the model with what its card says of its training.

    Args:
        trainer: The trainer, at its last step.
        output_dir: The folder of the run.
        facts: How the model was trained, name to value.
    """
    if hasattr(trainer.unwrapped_model.config, "training_facts"):
        trainer.unwrapped_model.config.training_facts = facts
    if trainer.args.push_to_hub:
        trainer.push_to_hub(commit_message="End of training")
    trainer.save_final(output_dir / MODEL_DIR)


def final_metrics(trainer: RunTrainer) -> dict[str, float]:
    """What the last step's evaluation logged, if its weights are still the model's; otherwise evaluate."""
    last = [row for row in trainer.state.log_history if row["step"] == trainer.state.global_step]
    evaluated = [row for row in last if "eval_loss" in row]
    if evaluated and not trainer.args.load_best_model_at_end:
        return evaluated[-1]
    return trainer.evaluate()


def run_facts(trainer: RunTrainer, output_dir: Path, *, finished: bool) -> dict[str, Any]:
    """The fields of a `RunResult`."""
    checkpoint = last_complete_checkpoint(output_dir)
    return {
        "finished": finished,
        "steps": trainer.state.global_step,
        "num_parameters": trainer.unwrapped_model.num_parameters(),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "model_dir": str(output_dir / MODEL_DIR) if finished else None,
    }


def write_result(result: RunResult, output_dir: Path) -> None:
    """Write `result.json`."""
    (output_dir / RESULT_FILE).write_text(json.dumps(asdict(result), indent=2), encoding="utf-8")
