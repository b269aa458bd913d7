"""What every kernel takes of a device, compiled ahead of time, and its roofline: tables for docs/kernels.md.

    python benchmarks/kernel_resources.py --targets sm_86 sm_90 --dims 64 128
    python benchmarks/kernel_resources.py --spills --dims 256

needs Triton, but no GPU; an hour for the second, which compiles every case of the tests' grid.
"""

import argparse
from itertools import product

import torch

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.ops.triton.plan import Plan, make_plan
from nalaformer_hf.ops.triton.resources import DEVICES, TARGETS, Launch, compile_launch, launches

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
FORMS = ("cosine", "polarity")
ROTARIES = ("none", "phase", "axial")


BANDWIDTHS = {"H100": 3.35e12, "H200": 4.8e12}  # bytes of memory a second
FLOPS = 989e12  # of dense bf16 products a second, of both


def counts(plan: Plan, itemsize: int) -> dict[str, tuple[float, float]]:
    """Bytes through memory and floating-point operations of products, a token and head, causal.

    "unfused" is the least that feature maps in torch, flash-linear-attention's chunk op and its normaliser
    move: features and their gradients written once and read where each of the three needs them.
    """
    D, V, F = plan.D, plan.V, 2 * plan.D
    state = 4 * F * plan.stride / plan.chunk_size  # one pass over the states, spread over the tokens
    # Keys that a query meets within its chunk, masked ones included.
    keys = (plan.chunk_size + plan.outputs[0].BT) / 2
    forward = itemsize * (3 * D + 3 * V) + 4 + 4 * state, 4 * F * V + keys * 2 * (F + V)
    backward = itemsize * (10 * D + 10 * V) + 36 + 9 * state, 10 * F * V + 3 * keys * 2 * (F + V)
    found = {"forward": forward, "backward": backward}
    if plan.sequential:  # each block of values reads q and k again, which are then at hand
        tiles = plan.sequential[0]
        scores = tiles.BT * 2 * (F * -(-V // tiles.BV) + V)
        found["sequential forward"] = itemsize * (2 * D + 2 * V) + 4, 4 * F * V + scores
    unfused = itemsize * (2 * D + 9 * F + 5 * V) + 2 * state, forward[1]
    unfused_backward = itemsize * (4 * D + 16 * F + 8 * V) + 4 * state, backward[1]
    return found | {"unfused forward": unfused, "unfused backward": unfused_backward}


def print_counts(dims: list[int]) -> None:
    """The counts for bf16, and the time that they take at the peaks of an H100 and an H200."""
    bandwidths = " | ".join(f"ns at {name}'s bandwidth" for name in BANDWIDTHS)
    print(f"| D = V | pass | bytes | FLOPs | {bandwidths} | ns at either's FLOP/s |")
    print("|---|---|---|---|---|---|---|")
    for dim in dims:
        plan = make_plan(FeatureSpec(), dim, dim, torch.bfloat16, DEVICES["sm_90"])
        for name, (num_bytes, flops) in counts(plan, 2).items():
            times = [num_bytes / bandwidth for bandwidth in BANDWIDTHS.values()] + [flops / FLOPS]
            cells = [str(dim), name, f"{num_bytes:,.0f}", f"{flops:,.0f}"]
            print(f"| {' | '.join(cells + [f'{1e9 * time:.2f}' for time in times])} |")


def first_launches(target: str, dim: int, dtype: torch.dtype, rotary: str) -> dict[str, Launch]:
    """Each kernel by name, with the likeliest of its tiles."""
    plan = make_plan(FeatureSpec(), dim, dim, dtype, DEVICES[target], rotary=rotary)
    return {launch.name: launch for launch in reversed(list(launches(plan)))}


def describe(launch: Launch, dtype: torch.dtype, target: str) -> str:
    """Warps, registers, what spills, and shared memory."""
    used = compile_launch(launch, dtype, target)
    spilled = f" + {used.spilled} spilled" if used.spilled else ""
    return f"{launch.options['num_warps']} × {used.registers}{spilled}, {used.shared / 1024:.0f} KB"


def print_spills(targets: list[str], dims: list[int], dtypes: list[str]) -> None:
    """Which kernels spill, and the least and the most over forms, rotaries, directions and tiles."""
    print(f"| dtype | D = V | kernel | {' | '.join(targets)} |")
    print("|---" * (3 + len(targets)) + "|")
    for dtype, dim in product(dtypes, dims):
        spilled: dict[str, dict[str, list[int]]] = {}
        for target, form, rotary, causal in product(targets, FORMS, ROTARIES, (True, False)):
            plan = make_plan(
                FeatureSpec(form), dim, dim, DTYPES[dtype], DEVICES[target], rotary=rotary, causal=causal
            )
            for launch in launches(plan):
                used = compile_launch(launch, DTYPES[dtype], target)
                spilled.setdefault(launch.name, {}).setdefault(target, []).append(used.spilled)
        for name, by_target in spilled.items():
            if any(map(max, by_target.values())):
                cells = [_range(by_target[target]) for target in targets]
                print(f"| {dtype} | {dim} | {name} | {' | '.join(cells)} |", flush=True)


def _range(numbers: list[int]) -> str:
    least, most = min(numbers), max(numbers)
    return str(most) if least == most else f"{least} to {most}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="What every kernel takes of a device, as a table.")
    parser.add_argument("--targets", nargs="+", default=list(TARGETS), choices=list(TARGETS))
    parser.add_argument("--dims", nargs="+", type=int, default=[64, 128])
    parser.add_argument("--dtypes", nargs="+", default=["bf16"], choices=list(DTYPES))
    parser.add_argument("--rotary", nargs="+", default=["none", "phase"], choices=ROTARIES)
    parser.add_argument("--spills", action="store_true", help="what spills in all cases, instead")
    arguments = parser.parse_args()
    if arguments.spills:
        return print_spills(arguments.targets, arguments.dims, arguments.dtypes)
    print_counts(arguments.dims)
    targets = " | ".join(arguments.targets)
    print(f"\n| dtype | D = V | rotary | kernel | tile | {targets} |")
    print("|---" * (5 + len(arguments.targets)) + "|")
    for dtype, dim, rotary in product(arguments.dtypes, arguments.dims, arguments.rotary):
        by_target = {
            target: first_launches(target, dim, DTYPES[dtype], rotary) for target in arguments.targets
        }
        for name, launch in reversed(by_target[arguments.targets[0]].items()):
            sizes = [str(launch.constants[size]) for size in ("BT", "BD", "BV") if size in launch.constants]
            cells = [dtype, str(dim), rotary, name, " × ".join(sizes)]
            cells += [describe(found[name], DTYPES[dtype], target) for target, found in by_target.items()]
            print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
