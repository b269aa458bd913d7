"""Runs of `nalaformer train lra` as tables: mean and spread over seeds, beside the published rows."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import groupby
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_tasks import LRA_TASKS, LRATask
from nalaformer_hf.training.runs import RESULT_FILE, changed_options, read_noted_config

NAMES = {"nala": "NaLa", "elu": "1 + ELU", "softmax": "softmax"}
TITLES = [task.title for task in LRA_TASKS.values()]

# What the tables read of a result.
_KINDS = {
    "attention": str,
    "seed": int,
    "max_length": int,
    "sizes": list,
    "accuracy": float,
    "num_parameters": int,
    "steps": int,
}

# Why a score is not comparable with the published ones, by its mark in the table.
NOTES = {
    "a": "on items of our own generator, drawn by the published task's rules",
    "b": "with another length, depth or number of items than published",
}
CAVEAT = (
    "Accuracies in %, mean ± standard deviation over seeds. Published rows: Long Range Arena (arXiv"
    " 2011.04006), Table 1, whose models have widths, depths and a training of their own: an unmarked score"
    " is on the same items, no more. The rows in bold compare with each other where the second table has the"
    " same numbers."
)


@dataclass(frozen=True)
class LRARun:
    """A finished run.

    Args:
        folder: Its folder.
        result: What its `result.json` says.
        settings: Its configuration, without the seed and the folder.
    """

    folder: Path
    result: dict[str, Any]
    settings: dict[str, Any]

    @property
    def task(self) -> LRATask:
        """The task as published."""
        return LRA_TASKS[self.result["task"]]

    @property
    def cell(self) -> tuple[int, int]:
        """Places of the task and of the model in the tables."""
        return list(LRA_TASKS).index(self.result["task"]), list(NAMES).index(self.result["attention"])

    @property
    def depth(self) -> int | None:
        """Bound of the depth, where it is not the published one."""
        return self.settings["data"].get("max_depth")

    @property
    def marks(self) -> str:
        """Marks of `NOTES`."""
        is_whole = (self.result["max_length"], tuple(self.result["sizes"])) == (
            self.task.max_length,
            self.task.sizes,
        ) and self.depth is None
        return ("a" if self.task.is_generated else "") + ("" if is_whole else "b")


def read_run(folder: Path) -> LRARun:
    """Read a run's result and configuration.

    Args:
        folder: The `train.output_dir` of a finished run.

    Raises:
        ConfigError: The folder holds no finished run of `nalaformer train lra`, or a damaged file.
    """
    try:
        result = json.loads((folder / RESULT_FILE).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ConfigError(f"{folder} must hold a finished run: it has no {RESULT_FILE}") from error
    except ValueError as error:
        raise ConfigError(f"{folder / RESULT_FILE} is no JSON: {error}") from error
    if not isinstance(result, dict) or result.get("task") not in list(LRA_TASKS):
        raise ConfigError(f"{folder} must hold a run of train lra, got one of another kind")
    for name, kind in _KINDS.items():
        if not isinstance(result.get(name), kind):
            raise ConfigError(
                f"{folder / RESULT_FILE} must have {name} as measured, got {result.get(name)!r}"
            )
    if result["attention"] not in NAMES:
        raise ConfigError(
            f"{folder / RESULT_FILE} must have one of {', '.join(NAMES)} as attention,"
            f" got {result['attention']}"
        )
    settings = read_noted_config(folder)
    for name in ("seed", "output_dir"):
        settings["train"].pop(name, None)
    return LRARun(folder, result, settings)


def published_rows() -> dict[str, dict[str, float]]:
    """Return the published accuracies by model and task."""
    text = (resources.files("nalaformer_hf.eval") / "published_lra.yaml").read_text(encoding="utf-8")
    rows: Any = OmegaConf.to_container(OmegaConf.create(text))
    return rows


def to_markdown(runs: Sequence[LRARun]) -> str:
    """Write the published rows and those of the runs as a table, and what the runs were as another.

    Args:
        runs: What `read_run` read.

    Returns:
        Both tables in markdown, with a line for each mark.

    Raises:
        ConfigError: Runs of one task and model differ in more than their seed, or have the same one.
    """
    ordered = sorted(runs, key=lambda run: run.cell)
    cells = [list(group) for _, group in groupby(ordered, key=lambda run: run.cell)]
    for cell in cells:
        _check_seeds(cell)
    lines = [_row("model", *TITLES, "mean"), "|---" * (len(TITLES) + 2) + "|"]
    for name, scores in published_rows().items():
        values = [scores[title] for title in TITLES]
        lines += [_row(name, *(f"{value:.2f}" for value in (*values, statistics.mean(values))))]
    lines += [_own_row(name, cells) for name in NAMES if any(_is_of(name, cell) for cell in cells)]
    lines += ["", CAVEAT, *_notes(runs), ""]
    return "\n".join([*lines, *(_details(cells) if cells else [])]) + "\n"


def _check_seeds(cell: list[LRARun]) -> None:
    first = cell[0]
    for i, run in enumerate(cell):
        if changed := changed_options(first.settings, run.settings):
            names = ", ".join(changed)
            raise ConfigError(
                f"{run.folder} and {first.folder} must differ in their seeds only, not in {names}"
            )
        for other in cell[:i]:
            if run.result["seed"] == other.result["seed"]:
                raise ConfigError(f"{run.folder} and {other.folder} must have different seeds")


def _is_of(name: str, cell: list[LRARun]) -> bool:
    return cell[0].result["attention"] == name


def _own_row(name: str, cells: list[list[LRARun]]) -> str:
    own = {cell[0].task.title: cell for cell in cells if _is_of(name, cell)}
    scores = [_score(own[title]) if title in own else "" for title in TITLES]
    mean = ""
    if len(own) == len(TITLES):
        marks = "".join(sorted({mark for cell in own.values() for mark in cell[0].marks}))
        mean = _marked(f"{statistics.mean(_mean(cell) for cell in own.values()):.2f}", marks)
    return _row(f"**{NAMES[name]}**", *scores, mean)


def _mean(cell: list[LRARun]) -> float:
    return statistics.mean(100 * run.result["accuracy"] for run in cell)


def _score(cell: list[LRARun]) -> str:
    spread = ""
    if len(cell) > 1:
        spread = f" ± {statistics.stdev(100 * run.result['accuracy'] for run in cell):.2f}"
    return _marked(f"{_mean(cell):.2f}{spread}", cell[0].marks)


def _marked(text: str, marks: str) -> str:
    return text + (f"<sup>{marks}</sup>" if marks else "")


def _notes(runs: Iterable[LRARun]) -> list[str]:
    used = sorted({mark for run in runs for mark in run.marks})
    return [f"<sup>{mark}</sup> {NOTES[mark]}." for mark in used]


def _details(cells: list[list[LRARun]]) -> list[str]:
    names = ("task", "model", "parameters", "longest", "train / validation / test items", "steps", "seeds")
    lines = [_row(*names, "accuracy"), "|---" * (len(names) + 1) + "|"]
    for cell in cells:
        result = cell[0].result
        facts = (
            cell[0].task.title,
            NAMES[result["attention"]],
            f"{result['num_parameters']:,}",
            f"{result['max_length']:,}" + (f", depth {cell[0].depth}" if cell[0].depth else ""),
            " / ".join(f"{size:,}" for size in result["sizes"]),
            f"{result['steps']:,}",
            ", ".join(str(run.result["seed"]) for run in cell),
        )
        lines += [_row(*facts, _score(cell))]
    return lines


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"
