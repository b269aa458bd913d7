"""What every training run does: open its folder, train to the end or to a signal, note the result."""

import json
import logging
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from transformers import TrainerState, TrainingArguments, set_seed
from transformers.trainer import TRAINER_STATE_NAME
from yaml import YAMLError

from nalaformer_hf.files import write_whole
from nalaformer_hf.training.checkpoints import last_complete_checkpoint
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.interrupt import InterruptCallback
from nalaformer_hf.training.run_trainer import RunTrainer
from nalaformer_hf.training.sections import RunConfig

CONFIG_FILE = "config.yaml"
RESULT_FILE = "result.json"
MODEL_DIR = "model"

logger = logging.getLogger(__name__)


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


Result = TypeVar("Result", bound=RunResult)
# What an evaluation at the end brings: facts for the model card, and the fields of the result beyond a run's.
Outcome = tuple[dict[str, Any], dict[str, Any]]


@contextmanager
def preparing(
    config: RunConfig,
    arguments: TrainingArguments,
    *,
    resume: bool,
    kept: Sequence[str],
    made: Sequence[str] = (),
) -> Iterator[None]:
    """Open the folder of the run, let the body prepare the data, first in the main process, and set the seed.

    Args:
        config: The checked configuration.
        arguments: What it says to the Trainer.
        resume: Go on with the run that is there.
        kept: Sections that a resumed run must have as they were.
        made: Folders that a new run makes, and an earlier attempt may have left.

    Raises:
        ConfigError: There is a run already and `resume` is not set, or it has other sections.
    """
    with arguments.main_process_first(local=arguments.save_on_each_node, desc="preparing the data"):
        if arguments.should_save:
            _open_run(config, resume=resume, kept=kept, made=made)
        yield
    set_seed(arguments.seed)


def train_to_the_end(
    trainer: RunTrainer, output_dir: Path, result_class: type[Result], evaluate: Callable[[], Outcome]
) -> Result:
    """Train to the end or to a signal; at the end evaluate, save the model, and note the result.

    Args:
        trainer: The trainer of the run.
        output_dir: Its folder.
        result_class: Class of the result.
        evaluate: Evaluates the trained model.

    Returns:
        Where the run stands.
    """
    if not _train_or_stop(trainer, output_dir):
        return result_class(**_run_facts(trainer, output_dir, finished=False))
    facts, figures = evaluate()
    _save_model(trainer, output_dir, facts)
    result = result_class(**_run_facts(trainer, output_dir, finished=True), **figures)
    if trainer.args.should_save:
        write_whole(output_dir / RESULT_FILE, json.dumps(asdict(result), indent=2))
    return result


def _open_run(config: RunConfig, *, resume: bool, kept: Sequence[str], made: Sequence[str]) -> None:
    """Check that the folder is free or holds the run that is to be resumed, and note the configuration."""
    folder = config.output_dir
    noted = folder / CONFIG_FILE
    if not resume:
        if (folder / MODEL_DIR).exists() or any(folder.glob("checkpoint-*")):
            raise ConfigError(f"train.output_dir {folder} holds a run: resume it, or name another folder")
        for name in made:
            shutil.rmtree(folder / name, ignore_errors=True)
    elif noted.is_file():
        _check_same_run(read_noted_config(folder), config.to_dict(), kept)
    else:
        logger.warning("train.output_dir %s holds no run to resume: it begins here", folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_whole(noted, OmegaConf.to_yaml(OmegaConf.create(config.to_dict())))


def read_noted_config(folder: Path) -> dict[str, Any]:
    """Read the configuration that a run has noted, as sections of options.

    Args:
        folder: The folder of the run.

    Raises:
        ConfigError: There is none, or the file is damaged.
    """
    path = folder / CONFIG_FILE
    try:
        noted = OmegaConf.to_container(OmegaConf.load(path))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} must hold a run: it has no {CONFIG_FILE}") from error
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is no configuration of a run: {error}") from error
    wanted = ("model", "data", "train")
    if not isinstance(noted, dict) or not all(isinstance(noted.get(name), dict) for name in wanted):
        raise ConfigError(
            f"{path} is no configuration of a run: it must have the sections {', '.join(wanted)}"
        )
    return {str(name): options for name, options in noted.items()}


def _check_same_run(before: Any, now: dict[str, Any], kept: Sequence[str]) -> None:
    if changed := changed_options(before, {section: now[section] for section in kept}):
        words = f"{', '.join(kept[:-1])} and {kept[-1]}"
        raise ConfigError(f"a resumed run keeps its {words}, but {', '.join(changed)} changed")


def changed_options(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    """Return the names, such as "train.seed", of options that another configuration has other values for.

    Args:
        before: The other configuration, as sections of options.
        now: The configuration. What one of both lacks counts as None.
    """
    return [
        f"{section}.{name}"
        for section, options in now.items()
        for name in dict.fromkeys([*options, *before.get(section, {})])
        if before.get(section, {}).get(name) != options.get(name)
    ]


def _train_or_stop(trainer: RunTrainer, output_dir: Path) -> bool:
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


def _save_model(trainer: RunTrainer, output_dir: Path, facts: dict[str, Any]) -> None:
    """Save the model with what its card says of its training."""
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


def _run_facts(trainer: RunTrainer, output_dir: Path, *, finished: bool) -> dict[str, Any]:
    """The fields of a `RunResult`."""
    checkpoint = last_complete_checkpoint(output_dir)
    return {
        "finished": finished,
        "steps": trainer.state.global_step,
        "num_parameters": trainer.unwrapped_model.num_parameters(),
        "checkpoint": None if checkpoint is None else str(checkpoint),
        "model_dir": str(output_dir / MODEL_DIR) if finished else None,
    }
