"""What a comparison of runs shows: the loss curves as a picture, the figures as a table."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.table import Table
from transformers.trainer import TRAINER_STATE_NAME

History = list[dict[str, float]]


def read_history(checkpoint: Path) -> History:
    """Read what a run logged up to a checkpoint."""
    return json.loads((checkpoint / TRAINER_STATE_NAME).read_text(encoding="utf-8"))["log_history"]


def series(history: History, name: str) -> tuple[list[float], list[float]]:
    """Return the steps at which a figure was logged, and its values."""
    rows = [row for row in history if name in row]
    return [row["step"] for row in rows], [row[name] for row in rows]


def save_loss_curve(histories: Mapping[str, History], path: Path) -> None:
    """Draw training loss and held-out bits per byte of several runs.

    Args:
        histories: What each run logged, by its name.
        path: The picture's file; its ending decides the format.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    panels = figure.subplots(1, 2)
    figures = {"loss": "training loss (nats a token)", "eval_bits_per_byte": "held-out bits per byte"}
    for panel, (name, label) in zip(panels, figures.items(), strict=True):
        for run, history in histories.items():
            panel.plot(*series(history, name), marker=".", label=run)
        panel.set(xlabel="step", ylabel=label)
        panel.grid(alpha=0.3)
        panel.legend()
    figure.savefig(path, dpi=120)


def summary_table(results: Mapping[str, Any], histories: Mapping[str, History]) -> Table:
    """Compare the runs of the demo.

    Args:
        results: The results of the stages, by their names.
        histories: What each run logged, by its name.
    """
    table = Table("", *histories)
    for label, values in _rows(results, histories).items():
        table.add_row(label, *values)
    return table


def _rows(results: Mapping[str, Any], histories: Mapping[str, History]) -> dict[str, list[str]]:
    trained = [results[name] for name in histories]
    generated = [results[f"generate {name}"] for name in histories]
    before = [series(history, "eval_bits_per_byte")[1][0] for history in histories.values()]
    rows = {
        "parameters": [f"{run['num_parameters']:,}" for run in trained],
        "held-out bits per byte before": [f"{value:.3f}" for value in before],
        "held-out bits per byte after": [f"{run['heldout_bits_per_byte']:.3f}" for run in trained],
        "generated tokens/s": [f"{run['tokens_per_second']:.1f}" for run in generated],
        "state, bytes": [f"{run['state_bytes']:,}" for run in generated],
    }
    scores = [results[f"score {name}"] for name in histories]
    for task, metrics in scores[0].items():
        for metric in metrics:
            rows[f"{task} {metric}"] = [f"{score[task][metric]:.3f}" for score in scores]
    return rows
