"""Memory and time of one attention layer at up to 70,000 tokens: linear, SDPA, and softmax written out.

    python benchmarks/vision_memory.py --output runs/vision_memory

One layer of the vision family (64 channels, 2 heads, fp32) on a square image of tokens, each measurement in a
process of its own: the peak of the resident memory above what the process held before, and the best time.
Softmax written out is measured up to 16,384 tokens; above, what a N² + b N (time: a N²), fitted to that,
gives, marked as extrapolated. The layer has its projections and its convolution, which all three share, and
whose outputs are most of what the linear one holds. Linux only: the peak is reset through /proc. Writes
vision_memory.json and vision_memory.png.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from matplotlib.figure import Figure
from torch import Tensor

from nalaformer_hf import NaLaVisionConfig
from nalaformer_hf.modeling.feature_maps_nala import upcast
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.modeling.vision_rotary_nala import NaLaVisionRotary, rotate

KINDS = ("linear", "sdpa", "softmax")
MODES = ("inference", "training")
SIDES = (32, 64, 128, 181, 265)  # 265² = 70,225 tokens
WRITTEN_OUT_TOKENS = 16_384
WIDTH, HEADS = 64, 2


class WrittenOut(NaLaVisionAttention):
    """The softmax layer with all weights in memory."""

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, tables: Any) -> Tensor:
        q, k, v = (upcast(y).transpose(1, 2) for y in (q, k, v))
        q, k = rotate(q, tables), rotate(k, tables)
        weights = (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).transpose(1, 2)


def make_layer(kind: str) -> NaLaVisionAttention:
    """One layer with new weights."""
    config = NaLaVisionConfig(
        hidden_sizes=[WIDTH],
        depths=[1],
        num_attention_heads=[HEADS],
        mlp_ratios=[4.0],
        mixers=["linear" if kind == "linear" else "softmax"],
        layer_scale_init_values=[1.0],
    )
    torch.manual_seed(0)
    return (WrittenOut if kind == "softmax" else NaLaVisionAttention)(config, 0)


def memory(field: str) -> float:
    """A field of /proc/self/status in MiB, such as VmRSS."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field)) / 1024


def measure(kind: str, side: int, mode: str, repeats: int) -> dict[str, Any]:
    """Peak memory of one call and the best time of `repeats`, in this process."""
    layer, rotary = make_layer(kind), NaLaVisionRotary(WIDTH // HEADS)
    run = infer if mode == "inference" else train
    run(layer, rotary, torch.randn(1, 8, 8, WIDTH))
    layer.zero_grad(set_to_none=True)
    x = torch.randn(1, side, side, WIDTH)
    before = memory("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # sets the peak back to the present
    seconds = []
    for repeat in range(repeats):
        start = time.perf_counter()
        run(layer, rotary, x)
        seconds.append(time.perf_counter() - start)
        if repeat == 0:
            peak = memory("VmHWM") - before
    return {"kind": kind, "mode": mode, "tokens": side * side, "mib": peak, "seconds": min(seconds)}


def infer(layer: NaLaVisionAttention, rotary: NaLaVisionRotary, x: Tensor) -> None:
    """A forward without gradient."""
    with torch.inference_mode():
        layer(x, rotary(x.shape[1], x.shape[2], x))


def train(layer: NaLaVisionAttention, rotary: NaLaVisionRotary, x: Tensor) -> None:
    """A forward and a backward to the weights and the input."""
    y = layer(x.requires_grad_(), rotary(x.shape[1], x.shape[2], x))
    y.backward(torch.ones_like(y))


def in_fresh_process(kind: str, side: int, mode: str, repeats: int) -> dict[str, Any]:
    """`measure` in a process that holds nothing else."""
    command = [sys.executable, __file__, "--measure", kind, str(side), mode, str(repeats)]
    environment = {**os.environ, "MALLOC_TRIM_THRESHOLD_": "0"}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True)
    return {**json.loads(done.stdout), "extrapolated": False}


def extrapolate(rows: list[dict[str, Any]], mode: str) -> list[dict[str, Any]]:
    """Softmax written out at the sizes where it was not measured."""
    measured = [row for row in rows if row["kind"] == "softmax" and row["mode"] == mode]
    tokens = np.array([row["tokens"] for row in measured], dtype=float)
    powers = np.stack((tokens**2, tokens), axis=1)
    mib = np.linalg.lstsq(powers, np.array([row["mib"] for row in measured]), rcond=None)[0]
    seconds = measured[-1]["seconds"] / tokens[-1] ** 2
    known = set(tokens.tolist())
    return [
        {
            "kind": "softmax",
            "mode": mode,
            "tokens": n,
            "mib": float(mib[0] * n**2 + mib[1] * n),
            "seconds": float(seconds * n**2),
            "extrapolated": True,
        }
        for n in sorted({row["tokens"] for row in rows} - known)
    ]


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Memory and time over the number of tokens; what is extrapolated is dashed and hollow."""
    modes = sorted({row["mode"] for row in rows})
    figure = Figure(figsize=(10, 4 * len(modes)), layout="constrained")
    panels = figure.subplots(len(modes), 2, squeeze=False)
    labels = {"mib": "peak memory (MiB)", "seconds": "time (s)"}
    for line, mode in zip(panels, modes, strict=True):
        for panel, (name, label) in zip(line, labels.items(), strict=True):
            for number, kind in enumerate(KINDS):
                points = [row for row in rows if row["kind"] == kind and row["mode"] == mode]
                for extrapolated, style in ((False, "o-"), (True, "o--")):
                    chosen = [row for row in points if row["extrapolated"] is extrapolated]
                    if chosen:
                        note = " (extrapolated)" if extrapolated else ""
                        xs, ys = [row["tokens"] for row in chosen], [row[name] for row in chosen]
                        fill = "none" if extrapolated else None
                        panel.loglog(xs, ys, style, color=f"C{number}", mfc=fill, label=kind + note)
            panel.set(xlabel="tokens", ylabel=label, title=mode)
            panel.grid(alpha=0.3)
            panel.legend()
    figure.savefig(path, dpi=120)


def main() -> None:
    """Measure, extrapolate, write and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/vision_memory"), metavar="DIR")
    parser.add_argument(
        "--modes", nargs="+", default=["inference", "training"], choices=("inference", "training")
    )
    parser.add_argument("--sides", nargs="+", type=int, default=list(SIDES), metavar="N")
    parser.add_argument("--repeats", type=int, default=2, metavar="N")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        kind, side, mode, repeats = arguments.measure
        print(json.dumps(measure(kind, int(side), mode, int(repeats))))
        return
    rows = []
    for mode in arguments.modes:
        for kind in KINDS:
            for side in sorted(arguments.sides):
                if kind != "softmax" or side * side <= WRITTEN_OUT_TOKENS:
                    rows.append(in_fresh_process(kind, side, mode, arguments.repeats))
                    print(rows[-1], flush=True)
        rows.extend(extrapolate(rows, mode))
    arguments.output.mkdir(parents=True, exist_ok=True)
    (arguments.output / "vision_memory.json").write_text(json.dumps(rows, indent=2) + "\n")
    draw(rows, arguments.output / "vision_memory.png")
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    """Print the ratios at the largest size."""
    largest = max(row["tokens"] for row in rows)
    for mode in sorted({row["mode"] for row in rows}):
        at = {row["kind"]: row for row in rows if row["mode"] == mode and row["tokens"] == largest}
        linear, sdpa, softmax = (at[kind] for kind in KINDS)
        note = ", extrapolated" if softmax["extrapolated"] else ""
        print(
            f"{mode}, {largest:,} tokens, linear: {linear['mib']:,.0f} MiB,"
            f" {linear['mib'] / sdpa['mib']:.2f} of SDPA's {sdpa['mib']:,.0f},"
            f" {1 - linear['mib'] / softmax['mib']:.2%} below plain softmax ({softmax['mib']:,.0f}{note});"
            f" {sdpa['seconds'] / linear['seconds']:.1f} times as fast as SDPA"
        )


if __name__ == "__main__":
    main()
