"""Registers, spills and shared memory of every kernel, compiled ahead of time: a table for docs/kernels.md.

    python benchmarks/kernel_resources.py --targets sm_86 sm_90 --dims 64 128

needs Triton, but no GPU.
"""

import argparse
from itertools import product

import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.ops.triton.plan import make_plan
from nalaformer_hf.ops.triton.resources import TARGETS, compile_launch, launches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="What every kernel takes of a device, as a table.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--rotary", nargs="+", default=["none", "phase"], choices=["none", "phase", "axial"])
    arguments = parser.parse_args()
    print("| target | dtype | D = V | rotary | kernel | tile | warps | registers | spilled | shared memory |")
    print("|---|---|---|---|---|---|---|---|---|---|")
    grid = product(arguments.targets, arguments.dtypes, arguments.dims, arguments.rotary)
    for target, dtype, dim, rotary in grid:
        plan = make_plan(
            FeatureSpec(), dim, dim, DTYPES[dtype], rotary=rotary, is_hip=TARGETS[target].backend == "hip"
        )
        for launch in launches(plan):
            used = compile_launch(launch, DTYPES[dtype], target)
            sizes = [str(launch.constants[size]) for size in ("BT", "BD", "BV") if size in launch.constants]
            print(
                f"| {target} | {dtype} | {dim} | {rotary} | {launch.name} | {' × '.join(sizes)} "
                f"| {launch.num_warps} | {used.registers} | {used.spilled} | {used.shared / 1024:.0f} KB |",
                flush=True,
            )


if __name__ == "__main__":
    main()
