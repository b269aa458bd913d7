"""Time and peak memory of the fused kernels, forward and backward, beside what one would run without them.

    python benchmarks/fused_kernels.py --output runs/kernels

compares "kernels" with "unfused" (feature maps in torch, then flash-linear-attention's chunk op and
normaliser, where it is installed), "torch" (the chunked form) and "sdpa" (causal softmax attention). The
kernels are first compared with the reference; only then are they timed. Writes results.csv and a picture. On
a CPU, under TRITON_INTERPRET=1, the numbers only show that the script runs.
"""

import argparse
import csv
import importlib.util
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import triton
from torch import Tensor

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec, map_features
from nalaformer_hf.ops import nala_attention
from nalaformer_hf.ops.dispatch import fla_version
from nalaformer_hf.ops.triton.selftest import FULL, TOY, run_selftest

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
PASSES = ("forward", "backward", "both")


def implementations() -> dict[str, Attend]:
    """What is compared, by name."""

    def kernels(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nala_attention(q, k, v, backend="triton")[0]

    def chunked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nala_attention(q, k, v, backend="torch")[0]

    def sdpa(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        o = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return o.transpose(1, 2)

    found = {"kernels": kernels, "torch": chunked, "sdpa": sdpa}
    if torch.cuda.is_available() and importlib.util.find_spec("fla") is not None:
        found["unfused"] = _unfused()
    return found


def _unfused() -> Attend:
    from fla.ops.linear_attn import chunk_linear_attn

    spec = FeatureSpec()

    def unfused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        fq, fk = map_features(q, spec, True).to(q.dtype), map_features(k, spec, False).to(k.dtype)
        return chunk_linear_attn(fq, fk, v, scale=1.0, normalize=True)[0]

    return unfused


def measure(attend: Attend, shape: tuple[int, ...], dtype: torch.dtype, device: str, repeats: int) -> dict:
    """Median milliseconds of each pass, and the peak memory of both beyond the inputs, in MiB."""
    gen = torch.Generator(device).manual_seed(0)
    q, k, v, grad = (torch.randn(shape, generator=gen, device=device, dtype=dtype) for _ in range(4))
    leaves = [x.requires_grad_() for x in (q, k, v)]
    times: dict[str, list[float]] = {name: [] for name in PASSES}
    before, peak = 0, 0
    for repeat in range(repeats + 1):  # the first call compiles
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        start = _now(device)
        o = attend(*leaves)
        middle = _now(device)
        torch.autograd.grad(o, leaves, grad)
        end = _now(device)
        if device == "cuda":
            peak = torch.cuda.max_memory_allocated() - before
        del o  # else the next round would begin with it
        if repeat > 0:
            for name, seconds in zip(PASSES, (middle - start, end - middle, end - start), strict=True):
                times[name].append(1e3 * seconds)
    result = {name: statistics.median(values) for name, values in times.items()}
    return {**result, "peak_mib": peak / 2**20}


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def facts(device: str) -> dict[str, str]:
    """What every row of the results says of its making."""
    here = Path(__file__).parent  # not the folder that the script is started in
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=here, capture_output=True, text=True
    ).stdout
    name = torch.cuda.get_device_name() if device == "cuda" else f"{platform.machine()} CPU, interpreted"
    return {
        "device": name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "fla-core": fla_version() or "none",
        "commit": commit.strip(),
    }


def run(arguments: argparse.Namespace, device: str) -> Iterator[dict[str, Any]]:
    """One row for each implementation and shape."""
    dtype = getattr(torch, arguments.dtype)
    for dim in arguments.dims:
        for tokens in arguments.tokens:
            shape = (max(1, arguments.batch_tokens // tokens), tokens, arguments.heads, dim)
            for name, attend in implementations().items():
                try:
                    result = measure(attend, shape, dtype, device, arguments.repeats)
                except torch.OutOfMemoryError:
                    result = dict.fromkeys((*PASSES, "peak_mib"), float("nan"))
                row = {"implementation": name, "D": dim, "T": tokens, "B": shape[0], "H": arguments.heads}
                yield {**row, "dtype": arguments.dtype, **result, **facts(device)}


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Forward and backward together, and peak memory, over the number of tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    dims = sorted({row["D"] for row in rows})
    figure, axes = plt.subplots(2, len(dims), figsize=(6 * len(dims), 8), squeeze=False)
    for column, dim in enumerate(dims):
        for axis, field, label in zip(axes[:, column], ("both", "peak_mib"), ("ms", "MiB"), strict=True):
            for name in dict.fromkeys(row["implementation"] for row in rows):
                points = [row for row in rows if row["implementation"] == name and row["D"] == dim]
                axis.plot([row["T"] for row in points], [row[field] for row in points], "o-", label=name)
            axis.set(xscale="log", xlabel="tokens", ylabel=label, title=f"D = {dim}, {field}")
            axis.legend()
    figure.tight_layout()
    figure.savefig(path)


def main() -> int:
    """Check, measure, write."""
    parser = argparse.ArgumentParser(description="Time and peak memory of the fused kernels.")
    parser.add_argument("--tokens", nargs="+", type=int, default=[2**i for i in range(10, 18)])
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--batch-tokens", type=int, default=2**17, help="tokens of a batch, in rows of T")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument("--output", type=Path, required=True, metavar="DIR")
    arguments = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for check in run_selftest(torch.device(device), FULL if device == "cuda" else TOY[:1]):
        if not check.passed:
            print(f"{check.case}: {check.name} is off by {check.error:.1e} {check.message}", file=sys.stderr)
            return 1
    arguments.output.mkdir(parents=True, exist_ok=True)
    rows = []
    with (arguments.output / "results.csv").open("w", newline="") as file:
        writer = None
        for row in run(arguments, device):
            writer = writer or csv.DictWriter(file, row)
            if not rows:
                writer.writeheader()
            writer.writerow(row)
            file.flush()
            rows.append(row)
            times = ", ".join(f"{name} {row[name]:.2f} ms" for name in PASSES)
            print(f"{row['implementation']:<8} D={row['D']} T={row['T']}: {times}, {row['peak_mib']:.0f} MiB")
    draw(rows, arguments.output / "results.png")
    return 0


if __name__ == "__main__":
    sys.exit(main())
