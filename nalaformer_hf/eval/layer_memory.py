"""`nalaformer analyze memory`: memory and time of one attention layer over up to 70,225 tokens.

A layer of the vision family (projections, attention, norm, gate) of 1 head of 64, in four forms of the same
weights, each measured in a new process on the CPU. Softmax written out takes all memory soon: it is measured
to 16,384 tokens and extrapolated beyond by the a + b N² that fits.

    python -m nalaformer_hf.eval.layer_memory FORM GRID REPEATS inference|training    # one probe
"""

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm.auto import tqdm

from nalaformer_hf import NaLaVisionConfig
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.modeling.vision_linear_nala import plain_attention
from nalaformer_hf.modeling.vision_rotary_nala import AxialTables, NaLaVisionRotary, rotate
from nalaformer_hf.training.errors import ConfigError

LINEAR, LINEAR_PLAIN, SDPA, SOFTMAX = "linear", "linear, written out", "SDPA", "softmax, written out"
FORMS = (LINEAR, LINEAR_PLAIN, SDPA, SOFTMAX)
TRAINED_FORMS = (LINEAR, SDPA)
GRIDS = (32, 64, 90, 128, 181, 265)  # 265² = 70,225 tokens
LAST_WRITTEN_OUT = 16_384
HEAD_DIM = 64
PROCESS_STATUS = Path("/proc/self/status")

Row = dict[str, Any]


class WrittenOut(NaLaVisionAttention):
    """The layer with all features, or all N² weights, at once, as one would write it first."""

    def forward(self, hidden_states: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, Y, X, C) to the same."""
        q, k, v, gate = self.qkvg(hidden_states).chunk(4, dim=-1)
        assert self.lepe is not None
        lepe = self.lepe(v)
        q, k, v = (x.flatten(1, 2).unflatten(-1, (self.num_heads, -1)) for x in (q, k, v))
        o = self._attend(q, k, v, tables).reshape(lepe.shape)
        return self.out_proj(self.ln(o + lepe) * F.silu(gate))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, tables: AxialTables | None) -> Tensor:
        if self.mixer == "linear":
            return plain_attention(q, k, v, self.spec, tables)
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        return ((q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v).transpose(1, 2)


def layer_call(form: str, grid: int, *, training: bool) -> Callable[[], Tensor]:
    """One layer over grid² tokens of fixed random numbers, with its rotary tables.

    Args:
        form: Of `FORMS`.
        grid: Height and width.
        training: Also go backward.

    Returns:
        A function that computes the layer's output (1, grid, grid, 64).
    """
    config = NaLaVisionConfig(
        hidden_sizes=[HEAD_DIM],
        num_attention_heads=[1],
        depths=[1],
        mlp_ratios=[4.0],
        mixers=["linear" if form in (LINEAR, LINEAR_PLAIN) else "softmax"],
        layer_scale_init_values=None,
    )
    torch.manual_seed(0)
    layer = (NaLaVisionAttention if form in TRAINED_FORMS else WrittenOut)(config, 0)
    x = torch.randn(1, grid, grid, HEAD_DIM).requires_grad_(training)

    def call() -> Tensor:
        with torch.set_grad_enabled(training):
            y = layer(x, NaLaVisionRotary(HEAD_DIM)(grid, grid, x))
            if training:
                y.sum().backward()
            return y

    return call


def measure_memory(grids: Sequence[int] = GRIDS, *, repeats: int = 3) -> list[Row]:
    """Measure every form at every size, each in a new process, with a progress bar.

    Args:
        grids: Heights of the square images, two of them at least with at most 16,384 tokens.
        repeats: Timed runs after the first one, whose median counts.

    Returns:
        Rows of `form`, `tokens`, `seconds`, `MiB` at the peak beyond the layer and its input, `training MiB`
        (of two forms, else empty) and whether they are `extrapolated`.

    Raises:
        ConfigError: The sizes do not fit, or this is not Linux.
    """
    if repeats < 1:
        raise ConfigError(f"repeats must be at least 1, got {repeats}")
    if min(grids) < 1 or sum(_is_measured(SOFTMAX, grid) for grid in set(grids)) < 2:
        raise ConfigError(f"grids must have two sizes of at most {LAST_WRITTEN_OUT} tokens, got {grids}")
    if not PROCESS_STATUS.is_file():
        raise ConfigError(f"the memory of a process is read from {PROCESS_STATUS}, which is missing here")
    cases = [(form, grid) for grid in grids for form in FORMS if _is_measured(form, grid)]
    rows = []
    for form, grid in tqdm(cases, desc="layers"):
        seconds, memory = probe_alone(form, grid, repeats, "inference")
        row: Row = {"form": form, "tokens": grid * grid, "seconds": seconds, "MiB": memory}
        row["training MiB"] = probe_alone(form, grid, 1, "training")[1] if form in TRAINED_FORMS else ""
        rows.append(row | {"extrapolated": False})
    return rows + extrapolate(rows, [grid * grid for grid in grids if not _is_measured(SOFTMAX, grid)])


def _is_measured(form: str, grid: int) -> bool:
    return form != SOFTMAX or grid * grid <= LAST_WRITTEN_OUT


def probe_alone(form: str, grid: int, repeats: int, mode: str) -> tuple[float, float]:
    """Seconds and MiB of one form at one size, in a new process; see `probe`."""
    command = [sys.executable, "-m", "nalaformer_hf.eval.layer_memory", form, str(grid), str(repeats), mode]
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(words[-2]), float(words[-1])


def probe(form: str, grid: int, repeats: int, mode: str) -> tuple[float, float]:
    """Run a layer in this process, which has done nothing else.

    Returns:
        The median seconds of `repeats` runs after the first one (of that one alone, if it took longer than
        `repeats` seconds), and what the process's peak was above what layer and input take, in MiB.
    """
    call = layer_call(form, grid, training=mode == "training")
    before = memory_of_this_process("VmRSS")
    seconds = _seconds(call)
    memory = memory_of_this_process("VmHWM") - before
    if seconds < repeats:
        seconds = statistics.median(_seconds(call) for _ in range(repeats))
    return seconds, memory


def memory_of_this_process(field: str) -> float:
    """MiB that it holds ("VmRSS") or held at most ("VmHWM"; the peak of `getrusage` is inherited)."""
    lines = PROCESS_STATUS.read_text(encoding="utf-8").splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kibibytes) / 1024


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def extrapolate(rows: Sequence[Row], tokens: Sequence[int]) -> list[Row]:
    """Return rows of softmax written out at numbers of tokens N, by the a + b N² that fits its `rows`."""
    measured = [row for row in rows if row["form"] == SOFTMAX]
    squares = [row["tokens"] ** 2 for row in measured]
    fits = {name: np.polyfit(squares, [row[name] for row in measured], 1) for name in ("seconds", "MiB")}
    return [
        {"form": SOFTMAX, "tokens": number}
        | {name: float(np.polyval(fit, number**2)) for name, fit in fits.items()}
        | {"training MiB": "", "extrapolated": True}
        for number in tokens
    ]


def summarise(rows: Sequence[Row]) -> str:
    """Say in a line what the linear layer takes of the others' memory and time at the largest size."""
    tokens = max(row["tokens"] for row in rows)
    last = {row["form"]: row for row in rows if row["tokens"] == tokens}
    linear = last[LINEAR]
    parts = [
        f"{linear['MiB'] / row['MiB']:.2%} of the memory and {linear['seconds'] / row['seconds']:.2%} of the"
        f" time of {form}{' (extrapolated)' if row['extrapolated'] else ''}"
        for form, row in last.items()
        if form != LINEAR
    ]
    training = f"{linear['training MiB'] / last[SDPA]['training MiB']:.0%} of SDPA's in training"
    return f"{tokens:,} tokens: the linear layer takes {'; '.join(parts)}; {training}\n"


def draw(rows: Sequence[Row], path: Path) -> None:
    """Draw time and memory over the number of tokens, dotted where extrapolated."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, 2), ("seconds", "MiB"), strict=True):
        select = partial(_points, rows, quantity)
        for color, form in enumerate(FORMS):
            axes.plot(*select(form, False), "o-", color=f"C{color}", label=form)
        axes.plot(*select(SOFTMAX, True), "o:", color=f"C{FORMS.index(SOFTMAX)}", label="extrapolated")
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=quantity)
        axes.legend()
    figure.suptitle(f"One attention layer, 1 head of {HEAD_DIM}, inference")
    figure.savefig(path, dpi=150)


def _points(rows: Sequence[Row], quantity: str, form: str, extrapolated: bool) -> tuple[list, list]:
    chosen = [row for row in rows if (row["form"], row["extrapolated"]) == (form, extrapolated)]
    return [row["tokens"] for row in chosen], [row[quantity] for row in chosen]


if __name__ == "__main__":
    seconds, memory = probe(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4])
    sys.stdout.write(f"{seconds} {memory}\n")
