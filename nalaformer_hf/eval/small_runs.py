"""Small trainings to compare: how they are trained, the file of the finished ones, mean and spread."""

import json
import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch.utils.data import IterableDataset
from transformers import PreTrainedModel, Trainer, TrainingArguments

from nalaformer_hf.training.errors import ConfigError

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
    Trainer(model=model, args=arguments, train_dataset=data).train()


def read_runs(folder: Path, settings_of: Callable[[Run], dict[str, Any]]) -> list[Run]:
    """Read the finished runs of a folder; none if it has none.

    Args:
        folder: The folder.
        settings_of: Gives the settings that a run must have.

    Raises:
        ConfigError: One has other settings.
    """
    path = folder / RESULTS_FILE
    runs = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    for run in runs:
        if run["settings"] != (wanted := settings_of(run)):
            raise ConfigError(f"{path} has runs with other settings than {wanted}: {run['settings']}")
    return runs


def add_run(folder: Path, run: Run) -> None:
    """Add a finished run, with its `settings`, to those of a folder."""
    with (folder / RESULTS_FILE).open("a", encoding="utf-8") as file:
        file.write(json.dumps(run) + "\n")


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Mean ± standard deviation, which one value does not have."""
    mean = format(statistics.mean(values), form)
    return f"{mean} ± {format(statistics.stdev(values), form.lstrip('+'))}" if len(values) > 1 else mean
