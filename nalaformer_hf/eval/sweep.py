"""`nalaformer analyze sweep`: what λ, τ and α do to small language models on bytes of source code.

λ and τ vary together at the paper's α, then α alone at the paper's λ and τ. Letters in shapes: T tokens.
"""

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM

from nalaformer_hf import NaLaConfig
from nalaformer_hf.eval.small_runs import Run, add_run, distinct_seeds, read_runs, spread, train
from nalaformer_hf.training.config import DataSection
from nalaformer_hf.training.corpus import load_corpus
from nalaformer_hf.training.errors import ConfigError

NUM_BYTES = 256
NUM_WINDOWS = 192  # of the held-out text
SHAPE: dict[str, Any] = {
    "vocab_size": NUM_BYTES,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
    "mixer": "linear",
    "feature_form": "cosine",
    "norm_scale": 1.0,
}


class Point(NamedTuple):
    """The constants of the feature maps."""

    power: float
    tau: float
    gain: float

    @property
    def is_excluded(self) -> bool:
        """Whether λτ < 1: the exponent of |d| could fall below 1, and its slope at 0 is infinite then."""
        return self.power * self.tau < 1


PAPER = Point(3.0, 0.5, 20.0)


@dataclass(frozen=True)
class SweepSettings:
    """How each model is trained.

    Args:
        num_steps: Optimizer steps.
        batch_size: Windows a step.
        length: Bytes in a window.
        learning_rate: Peak.

    Raises:
        ConfigError: A number is not positive.
    """

    num_steps: int = 250
    batch_size: int = 8
    length: int = 128
    learning_rate: float = 3e-3

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if value <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")


class _Windows(IterableDataset):
    """Random windows of a text without end."""

    def __init__(self, text: Tensor, length: int, seed: int) -> None:
        self.text, self.length, self.seed = text, length, seed

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            start = int(torch.randint(len(self.text) - self.length, (), generator=generator))
            ids = self.text[start : start + self.length].long()
            yield {"input_ids": ids, "labels": ids}


def grid(powers: Sequence[float], taus: Sequence[float], gains: Sequence[float]) -> list[Point]:
    """The paper's point, all λ with all τ at its α, and all α at its λ and τ, each once.

    Raises:
        ConfigError: A constant is not positive and finite.
    """
    for name, values in (("powers", powers), ("taus", taus), ("gains", gains)):
        if any(not 0 < value < math.inf for value in values):
            raise ConfigError(f"{name} must be positive and finite, got {values}")
    plane = [Point(power, tau, PAPER.gain) for power in powers for tau in taus]
    return list(dict.fromkeys([PAPER, *plane, *(PAPER._replace(gain=gain) for gain in gains)]))


def run_sweep(
    output_dir: Path, points: Sequence[Point], *, seeds: Sequence[int], settings: SweepSettings | None = None
) -> list[Run]:
    """Train and score a model at each point that is not excluded, unless that stands in the folder.

    Args:
        output_dir: Folder of the finished runs.
        points: The grid.
        seeds: Of the weights and the windows, which are the same at all points.
        settings: How to train; None takes the defaults.

    Returns:
        The runs of these points and seeds: the constants, the seed and the held-out `bits_per_byte`.

    Raises:
        ConfigError: A seed is out of range, or the folder has runs with other settings or of another kind.
    """
    settings, seeds = settings or SweepSettings(), distinct_seeds(seeds)
    configs = {point: _config(point, settings) for point in points if not point.is_excluded}
    runs = {(_point(run), run["seed"]): run for run in read_runs(output_dir, lambda _: asdict(settings))}
    wanted = [(point, seed) for seed in seeds for point in configs]
    if missing := [pair for pair in wanted if pair not in runs]:
        output_dir.mkdir(parents=True, exist_ok=True)
        training, heldout = _read_bytes()
        for point, seed in missing:
            torch.manual_seed(seed)
            model = AutoModelForCausalLM.from_config(configs[point])
            sizes = {name: value for name, value in asdict(settings).items() if name != "length"}
            data = _Windows(training, settings.length, seed)
            train(model, data, **sizes, seed=seed, output_dir=output_dir)
            score = {"bits_per_byte": _bits_per_byte(model, heldout, settings)}
            runs[point, seed] = point._asdict() | {"seed": seed} | score | {"settings": asdict(settings)}
            add_run(output_dir, runs[point, seed])
    return [runs[pair] for pair in wanted]


def _point(run: Run) -> Point:
    return Point(*(run[name] for name in Point._fields))


def _config(point: Point, settings: SweepSettings) -> NaLaConfig:
    fields = {f"feature_{name}": value for name, value in point._asdict().items()}
    return NaLaConfig(**SHAPE, max_position_embeddings=settings.length, **fields)


def _read_bytes() -> tuple[Tensor, Tensor]:
    """The standard library's source to train on, and the files of it that are held out."""
    corpus = load_corpus(DataSection(corpus="stdlib", heldout_fraction=0.05), seed=0)
    parts = ("".join(documents["text"]).encode() for documents in (corpus.train, corpus.heldout))
    training, heldout = (torch.frombuffer(bytearray(part), dtype=torch.uint8) for part in parts)
    return training, heldout


@torch.no_grad()
def _bits_per_byte(model: Any, heldout: Tensor, settings: SweepSettings) -> float:
    """Mean over windows spread evenly over the held-out text."""
    model.eval()
    starts = torch.linspace(0, len(heldout) - settings.length, NUM_WINDOWS).long()
    windows = torch.stack([heldout[start : start + settings.length] for start in starts.tolist()]).long()
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in windows.split(16)]
    return statistics.mean(losses) / math.log(2)


def to_rows(runs: Sequence[Run], points: Sequence[Point]) -> list[dict[str, Any]]:
    """Make the rows of the CSV: each run, then the excluded points.

    Args:
        runs: What `run_sweep` returned.
        points: The grid.
    """
    names = (*Point._fields, "seed", "bits_per_byte")
    rows = [{name: run[name] for name in names} | {"excluded": ""} for run in runs]
    empty = {"seed": "", "bits_per_byte": ""}
    return rows + [
        point._asdict() | empty | {"excluded": _reason(point)} for point in points if point.is_excluded
    ]


def to_markdown(runs: Sequence[Run], points: Sequence[Point]) -> str:
    """Write the table in markdown: held-out bits per byte, and how far from the paper's point.

    Args:
        runs: What `run_sweep` returned; the difference is taken seed by seed.
        points: The grid.
    """
    base = _by_seed(runs, PAPER)
    lines = ["| λ | τ | α | bits per byte | against the paper's | seeds |", "|---|---|---|---|---|---|"]
    for point in points:
        constants = " | ".join(f"{value:g}" for value in point)
        if point.is_excluded:
            lines.append(f"| {constants} | excluded: {_reason(point)} | | |")
            continue
        scores = _by_seed(runs, point)
        gaps = [score - base[seed] for seed, score in scores.items()]
        cells = [constants, spread(list(scores.values()), ".3f"), spread(gaps, "+.3f"), str(len(scores))]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(runs: Sequence[Run], points: Sequence[Point], path: Path) -> None:
    """Draw bits per byte over λ, a line for each τ, and over α; bars are standard deviations.

    Args:
        runs: What `run_sweep` returned.
        points: The grid.
        path: Picture to write.
    """
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.6), layout="constrained")
    plane, line = figure.subplots(1, 2, sharey=True)
    kept = sorted(point for point in points if not point.is_excluded)
    for tau in sorted({point.tau for point in kept}):
        _draw_line(
            plane, runs, [p for p in kept if (p.tau, p.gain) == (tau, PAPER.gain)], "power", f"τ = {tau:g}"
        )
    _draw_line(line, runs, [p for p in kept if p[:2] == PAPER[:2]], "gain", "")
    plane.set(xlabel="λ", ylabel="held-out bits per byte", title=f"α = {PAPER.gain:g}")
    plane.legend()
    line.set(xlabel="α", xscale="log", title=f"λ = {PAPER.power:g}, τ = {PAPER.tau:g}")
    figure.savefig(path, dpi=150)


def _draw_line(axes: Any, runs: Sequence[Run], points: Sequence[Point], name: str, label: str) -> None:
    scores = [list(_by_seed(runs, point).values()) for point in points]
    means = [statistics.mean(values) for values in scores]
    bars = [statistics.stdev(values) if len(values) > 1 else 0.0 for values in scores]
    axes.errorbar([getattr(point, name) for point in points], means, bars, fmt="o-", capsize=3, label=label)


def _by_seed(runs: Sequence[Run], point: Point) -> dict[int, float]:
    return {run["seed"]: run["bits_per_byte"] for run in runs if _point(run) == point}


def _reason(point: Point) -> str:
    return f"λτ = {point.power * point.tau:g} < 1"
