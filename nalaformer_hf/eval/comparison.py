"""Result files of lm-eval beside the published scores at 340M parameters, as a table and as a picture."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from lm_eval.utils import simple_parse_args_string

from nalaformer_hf.training.errors import ConfigError

PUBLISHED_PARAMETERS = 340e6
PUBLISHED_LENGTH = 2048
SIZE_MARGIN = 0.2  # models of one size differ by as much, with their embeddings tied or not

PARTS = ("results", "config", "n-samples", "n-shot")  # of a result file

# Why a score is not comparable with the published ones, by its mark in the table.
NOTES = {
    "a": "on a part of the items",
    "b": "with examples in the prompt; the published scores are zero-shot",
    "c": "of a model of another size than 340M parameters",
    "d": "of whole documents or other windows; the published perplexity is over windows of 2,048 tokens",
}
CAVEAT = (
    "Unmarked scores are measured as the published ones. No result file says how a model was trained: they"
    " compare only if that was on 15B tokens of SlimPajama with context 2,048, as for the published rows."
)


class Column(NamedTuple):
    """A published score: where lm-eval keeps it, and on how many items it is."""

    name: str
    task: str
    metric: str
    num_items: int
    is_accuracy: bool


COLUMNS = (
    Column("Wiki", "wikitext", "word_perplexity,none", 62, False),
    Column("LMB", "lambada_openai", "perplexity,none", 5153, False),
    Column("PIQA", "piqa", "acc,none", 1838, True),
    Column("Hella", "hellaswag", "acc_norm,none", 10042, True),
    Column("Wino", "winogrande", "acc,none", 1267, True),
    Column("ARC-e", "arc_easy", "acc,none", 2376, True),
    Column("ARC-c", "arc_challenge", "acc_norm,none", 1172, True),
)


@dataclass
class Row:
    """Scores of one model by column, in percent where they are accuracies, and the marks of each."""

    name: str
    scores: dict[str, float]
    marks: dict[str, str] = field(default_factory=dict)

    @property
    def mean(self) -> float | None:
        """Mean of the accuracies, None unless all are there."""
        names = [column.name for column in COLUMNS if column.is_accuracy]
        return statistics.mean(self.scores[n] for n in names) if self.scores.keys() >= set(names) else None


def published_rows() -> list[Row]:
    """Return the published scores."""
    text = (resources.files("nalaformer_hf.eval") / "published_340m.yaml").read_text(encoding="utf-8")
    return [Row(name, scores) for name, scores in yaml.safe_load(text).items()]


def read_results(path: Path) -> Row:
    """Read a result file of lm-eval.

    Args:
        path: `results_*.json`, as `--output_path` makes them.

    Returns:
        The scores that the published rows have too, and marks for those that are not comparable.

    Raises:
        ConfigError: The file is none of lm-eval's, or has no score of these tasks.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        results, *others = (content[part] for part in PARTS)
        if not all(isinstance(part, dict) for part in (results, *others)):
            raise TypeError(f"{', '.join(PARTS)} must be objects")
    except (ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"{path} must be a result file of lm-eval: {error!r}") from error
    row = Row(str(content.get("model_name") or path.stem), {})
    for column in COLUMNS:
        if column.metric in results.get(column.task, {}):
            score = results[column.task][column.metric]
            row.scores[column.name] = 100 * score if column.is_accuracy else score
            row.marks[column.name] = "".join(_marks(column, content))
    if not row.scores:
        wanted = ", ".join(column.task for column in COLUMNS)
        raise ConfigError(f"{path} has no score of the tasks {wanted}")
    return row


def _marks(column: Column, content: dict[str, Any]) -> Iterable[str]:
    config = content["config"]
    if content["n-samples"][column.task]["effective"] != column.num_items:
        yield "a"
    if content["n-shot"].get(column.task):
        yield "b"
    size = config.get("model_num_parameters", 0)
    if abs(size / PUBLISHED_PARAMETERS - 1) > SIZE_MARGIN:
        yield "c"
    arguments = config.get("model_args") or {}
    if isinstance(arguments, str):  # as Python code may give them
        arguments = simple_parse_args_string(arguments)
    # Without it, "hf" cuts at the length that the model is made for.
    length = arguments.get("max_length", PUBLISHED_LENGTH if config.get("model") != "nala" else None)
    if column.task == "wikitext" and length != PUBLISHED_LENGTH:
        yield "d"


def to_markdown(rows: Sequence[Row]) -> str:
    """Write the published rows and the given ones as a table in markdown.

    Args:
        rows: What `read_results` read.

    Returns:
        The table, and a line for each mark that it has.
    """
    names = [column.name for column in COLUMNS]
    lines = [f"| model | {' | '.join(names)} | mean |", "|---" * (len(names) + 2) + "|"]
    lines += [_line(row) for row in published_rows()]
    lines += [_line(row, bold=True) for row in rows]
    used = sorted({mark for row in rows for marks in row.marks.values() for mark in marks})
    lines += ["", "Wiki and LMB are perplexities, the rest accuracies in %; mean: of the accuracies."]
    lines += [f"<sup>{mark}</sup> {NOTES[mark]}." for mark in used]
    return "\n".join([*lines, *([CAVEAT] if rows else [])]) + "\n"


def _line(row: Row, *, bold: bool = False) -> str:
    cells = [f"**{row.name}**" if bold else row.name]
    for column in COLUMNS:
        digits = 1 if column.is_accuracy else 2
        cells.append(_cell(row.scores.get(column.name), row.marks.get(column.name, ""), digits))
    marks = {m for c in COLUMNS if c.is_accuracy for m in row.marks.get(c.name, "")}
    cells.append(_cell(row.mean, "".join(sorted(marks)), 1))
    return f"| {' | '.join(cells)} |"


def _cell(score: float | None, marks: str, digits: int) -> str:
    if score is None:
        return ""
    return f"{score:.{digits}f}" + (f"<sup>{marks}</sup>" if marks else "")


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw the published scores and the given ones; those that are not comparable are hollow.

    Args:
        rows: What `read_results` read.
        path: Picture to write, in a format that matplotlib knows.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 5), layout="constrained")
    panels = figure.subplots(1, 2, width_ratios=[2, 5])
    for panel, is_accuracy in zip(panels, (False, True), strict=True):
        names = [column.name for column in COLUMNS if column.is_accuracy == is_accuracy]
        for number, row in enumerate([*published_rows(), *rows]):
            _draw_row(panel, names, row, number)
        panel.set_xticks(range(len(names)), names)
        panel.set_ylabel("accuracy, %" if is_accuracy else "perplexity")
        panel.grid(axis="y", alpha=0.3)
    panels[0].set_yscale("log")
    panels[1].legend(loc="center left", bbox_to_anchor=(1, 0.5), title="hollow: not comparable")
    figure.savefig(path, dpi=150)


def _draw_row(panel: Any, names: Sequence[str], row: Row, number: int) -> None:
    """Draws a row's scores in a colour and at an offset of their own, published ones small."""
    colour, size = f"C{number % 10}", 60 if row.marks else 25
    offset = 0.05 * (number - len(published_rows()) / 2)
    for filled in (True, False):
        places = [i for i, n in enumerate(names) if n in row.scores and bool(row.marks.get(n)) != filled]
        panel.scatter(
            [place + offset for place in places],
            [row.scores[names[i]] for i in places],
            s=size,
            marker="D" if row.marks else "o",
            facecolors=colour if filled else "none",
            edgecolors=colour,
        )
    panel.scatter([], [], s=size, marker="D" if row.marks else "o", color=colour, label=row.name)
