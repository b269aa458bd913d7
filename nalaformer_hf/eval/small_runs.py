"""Small trainings to compare: how they are trained, the file of the finished ones, mean and spread."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, ProgressCallback, Trainer, TrainingArguments

from nalaformer_hf.files import write_whole
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.progress import FiguresInBar

RESULTS_FILE = "results.jsonl"

Run = dict[str, Any]


def train(
    model: PreTrainedModel,
    data: IterableDataset,
    *,
    num_steps: int,
    batch_size: int,
    learning_rate: float,
    seed: int,
    output_dir: Path,
) -> None:
    """Train with AdamW: a warm-up of a tenth of the steps, then a cosine to a tenth of the peak.

    Args:
        model: The model, trained in place.
        data: Examples without end.
        num_steps: Optimizer steps.
        batch_size: Examples a step.
        learning_rate: The peak.
        seed: Of the Trainer.
        output_dir: Folder that the Trainer wants; it saves nothing there.
    """
    arguments = TrainingArguments(
        output_dir=str(output_dir),
        max_steps=num_steps,
        per_device_train_batch_size=batch_size,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine_with_min_lr",
        lr_scheduler_kwargs={"min_lr_rate": 0.1},
        warmup_steps=0.1,
        weight_decay=0.1,
        adam_beta2=0.95,
        seed=seed,
        report_to=[],
        save_strategy="no",
        logging_strategy="no",
        dataloader_pin_memory=False,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=data)
    if trainer.pop_callback(ProgressCallback) is not None:  # it writes to where the table goes
        trainer.add_callback(FiguresInBar())
    trainer.train()


def distinct_seeds(seeds: Sequence[int]) -> list[int]:
    """Return the seeds, each once.

    Raises:
        ConfigError: One is out of the range that all generators take.
    """
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(f"seeds must be between 0 and 2**32 - 1, got {list(seeds)}")
    return list(dict.fromkeys(seeds))


def read_runs(folder: Path, settings_of: Callable[[Run], dict[str, Any] | None]) -> list[Run]:
    """Read the finished runs of a folder; none if it has none.

    A last line that is not whole, as a full disk leaves it, is no finished run.

    Args:
        folder: The folder.
        settings_of: Gives the settings that a run must have; None for a run of another kind.

    Raises:
        ConfigError: One has other settings, or a line before the last is not whole.
    """
    path = folder / RESULTS_FILE
    runs = _read_whole_lines(path)
    for run in runs:
        if (wanted := settings_of(run)) is None:
            raise ConfigError(f"{path} has runs of another kind: {run}")
        if run["settings"] != wanted:
            raise ConfigError(f"{path} has runs with other settings than {wanted}: {run['settings']}")
    return runs


def add_run(folder: Path, run: Run) -> None:
    """Add a finished run, with its `settings`, to those of a folder."""
    path = folder / RESULTS_FILE
    lines = [json.dumps(line) for line in (*_read_whole_lines(path), run)]
    write_whole(path, "\n".join(lines) + "\n")


def _read_whole_lines(path: Path) -> list[Run]:
    lines = path.read_bytes().splitlines() if path.exists() else []
    runs = []
    for number, line in enumerate(lines, start=1):
        try:
            run = json.loads(line)
        except ValueError as error:  # not JSON, or not UTF-8
            if number < len(lines):
                raise ConfigError(f"{path}: line {number} is not a run: {error}") from error
            continue
        if not isinstance(run, dict) or not isinstance(run.get("settings"), dict):
            raise ConfigError(f"{path}: line {number} is not a run: {run}")
        runs.append(run)
    return runs


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Mean ± standard deviation, which one value does not have."""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean
