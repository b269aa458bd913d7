"""What every kernel takes of a device, compiled ahead of time, and its roofline: tables for docs/kernels.md.

    python benchmarks/kernel_resources.py --targets sm_86 sm_90 --dims 64 128

needs Triton, but no GPU.
"""

import argparse
from itertools import product

import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.ops.triton.plan import Plan, make_plan
from nalaformer_hf.ops.triton.resources import TARGETS, Launch, compile_launch, launches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


H200 = {"bytes": 4.8e12, "flops": 989e12}  # of memory and of dense bf16 products, a second


def counts(plan: Plan, itemsize: int) -> dict[str, tuple[float, float]]:
    """Bytes through memory and floating-point operations of products, a token and head, causal.

    "unfused" is the least that feature maps in torch, flash-linear-attention's chunk op and its normaliser
    move in a forward: features written once and read where each of the three needs them.
    """
    D, V, F = plan.D, plan.V, 2 * plan.D
    state = 4 * F * plan.stride / plan.chunk_size  # one pass over the states, spread over the tokens
    keys = (
        plan.chunk_size + plan.outputs.BT
    ) / 2  # that a query meets within its chunk, masked ones included
    forward = itemsize * (3 * D + 3 * V) + 4 + 4 * state, 4 * F * V + keys * 2 * (F + V)
    backward = itemsize * (10 * D + 10 * V) + 36 + 9 * state, 10 * F * V + 3 * keys * 2 * (F + V)
    unfused = itemsize * (2 * D + 9 * F + 5 * V) + 2 * state, forward[1]
    return {"forward": forward, "backward": backward, "unfused forward": unfused}


def print_counts(dims: list[int]) -> None:
    """The counts for bf16, and the time that they take at an H200's peaks."""
    print("| D = V | pass | bytes | FLOPs | ns at peak bandwidth | ns at peak FLOP/s |")
    print("|---|---|---|---|---|---|")
    for dim in dims:
        for name, (num_bytes, flops) in counts(make_plan(FeatureSpec(), dim, dim, torch.bfloat16), 2).items():
            times = 1e9 * num_bytes / H200["bytes"], 1e9 * flops / H200["flops"]
            print(f"| {dim} | {name} | {num_bytes:,.0f} | {flops:,.0f} | {times[0]:.2f} | {times[1]:.2f} |")


def describe(launch: Launch, dtype: torch.dtype, target: str) -> str:
    """Registers, what spills, and shared memory."""
    if TARGETS[target].backend == "hip" and launch.constants.get("PRECISION") == "tf32x3":
        launch = launch._replace(constants={**launch.constants, "PRECISION": "ieee"})
    used = compile_launch(launch, dtype, target)
    spilled = f" + {used.spilled} spilled" if used.spilled else ""
    return f"{used.registers}{spilled}, {used.shared / 1024:.0f} KB"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What every kernel takes of a device, as a table.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--rotary", nargs="+", default=["none", "phase"], choices=["none", "phase", "axial"])
    arguments = parser.parse_args()
    print_counts(arguments.dims)
    targets = " | ".join(arguments.targets)
    print(f"\n| dtype | D = V | rotary | kernel | tile | warps | {targets} |")
    print("|---" * (6 + len(arguments.targets)) + "|")
    for dtype, dim, rotary in product(arguments.dtypes, arguments.dims, arguments.rotary):
        for launch in launches(make_plan(FeatureSpec(), dim, dim, DTYPES[dtype], rotary=rotary)):
            sizes = [str(launch.constants[size]) for size in ("BT", "BD", "BV") if size in launch.constants]
            cells = [dtype, str(dim), rotary, launch.name, " × ".join(sizes), str(launch.num_warps)]
            cells += [describe(launch, DTYPES[dtype], target) for target in arguments.targets]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
