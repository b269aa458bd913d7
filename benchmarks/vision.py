"""Speed and memory of the NaLa vision models against a plain rendering of the published code, in one run.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision
    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision --compile

Models xt, t and s, forward at 224² (batch 8), 512² and 1024² (batch 1) and a training step at 224² (batch 8,
drop path as published), against `tests/vision/slow_reference.py` with the same weights. First it is checked
that both give the same logits; then they take turns, and medians count. Peak memory is that of a new process
each, less what its imports took. All is printed and written as JSON. `nalaformer analyze memory` measures one
layer over up to 70,225 tokens.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vision"))
from slow_reference import SlowNaLaFormer

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.convert import from_published
from nalaformer_hf.eval.layer_memory import memory_of_this_process

SIDES = ("slow", "ours")
MODELS = ("xt", "t", "s")
CASES = {
    "forward 224": (224, 8),
    "forward 512": (512, 1),
    "forward 1024": (1024, 1),
    "training 224": (224, 8),
}
GATE = 5e-6


def build(name: str, side: str, training: bool) -> nn.Module:
    """One side's model; both have the same weights."""
    torch.manual_seed(0)
    config = NaLaVisionConfig.from_preset(name)
    slow = SlowNaLaFormer(
        config.hidden_sizes,
        config.depths,
        config.num_attention_heads,
        config.mlp_ratios,
        layer_scales=config.layer_scale_init_values,
        drop_path_rate=config.drop_path_rate,
    )
    model = slow if side == "slow" else from_published(slow.state_dict(), config)
    return model.train(training)


def build_alone(name: str, side: str, training: bool) -> nn.Module:
    """One side's model, with weights of its own, so that a process holds nothing of the other side."""
    if side == "slow":
        return build(name, side, training)
    return NaLaForImageClassification(NaLaVisionConfig.from_preset(name)).train(training)


def images(size: int, batch: int) -> Tensor:
    """(B, 3, size, size)."""
    return torch.randn(batch, 3, size, size, generator=torch.Generator().manual_seed(size))


def logits_of(model: nn.Module, pixel_values: Tensor) -> Tensor:
    """Logits, whichever side the model is of."""
    outputs = model(pixel_values)
    return outputs if isinstance(outputs, Tensor) else outputs.logits


def run_case(model: nn.Module, case: str) -> None:
    """One forward, or one training step."""
    pixel_values = images(*CASES[case])
    if case.startswith("training"):
        logits_of(model, pixel_values).square().mean().backward()
        model.zero_grad(set_to_none=True)
    else:
        with torch.inference_mode():
            logits_of(model, pixel_values)


def seconds(call: Callable[[], object]) -> float:
    """Wall time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def take_turns(calls: dict[str, Callable[[], None]], repeats: int, label: str) -> dict[str, float]:
    """Median seconds of each call, after one that does not count."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in tqdm(range(repeats + 1), desc=label, leave=False):
        for name, call in calls.items():
            spent = seconds(call)
            if repeat:
                times[name].append(spent)
    return {name: statistics.median(values) for name, values in times.items()}


def check(name: str) -> float:
    """Largest difference of both sides' logits, to the largest logit."""
    slow, ours = (build(name, side, training=False) for side in SIDES)
    with torch.inference_mode():
        expected, actual = (logits_of(model, images(224, 1)) for model in (slow, ours))
    error = float((actual - expected).abs().max() / expected.abs().max())
    if error > GATE:
        raise RuntimeError(f"{name}: logits differ by {error:.1e} of the largest one; nothing is timed")
    return error


def measure_model(name: str, case: str, repeats: int, compiled: bool) -> dict:
    """A row: both sides' seconds and MiB in one case, and the ratios."""
    models = {side: build(name, side, case.startswith("training")) for side in SIDES}
    if compiled:
        models["compiled"] = torch.compile(models["ours"], dynamic=False)
    times = take_turns(
        {side: (lambda model=model: run_case(model, case)) for side, model in models.items()},
        repeats,
        f"{name} {case}",
    )
    del models
    memory = {side: probe_alone(side, name, case) for side in SIDES}
    row = {"model": name, "case": case, "seconds": times, "MiB": memory}
    row["times faster"] = {side: times["slow"] / times[side] for side in times if side != "slow"}
    row["memory ratio"] = memory["ours"] / memory["slow"]
    return row


def probe_alone(*arguments: str) -> float:
    """The MiB that one run in a new process needs beyond its imports."""
    command = [sys.executable, __file__, "--probe", *arguments]
    return float(subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()[-1])


def probe(side: str, name: str, case: str) -> None:
    """Runs one case, and prints what this process's peak is above its imports, in MiB."""
    before = memory_of_this_process("VmRSS")
    run_case(build_alone(name, side, case.startswith("training")), case)
    print(memory_of_this_process("VmHWM") - before)


def describe_machine() -> dict:
    """What the figures were measured on."""
    return {
        "cpu": platform.processor() or platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "OMP_WAIT_POLICY": os.environ.get("OMP_WAIT_POLICY", ""),
    }


def main() -> None:
    """Parses the arguments, measures, prints and writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, default=Path("runs/vision"), metavar="DIR")
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=MODELS)
    parser.add_argument("--cases", nargs="*", default=list(CASES), choices=list(CASES))
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--compile", action="store_true", help="also time ours compiled")
    parser.add_argument("--probe", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.probe:
        probe(*arguments.probe)
        return
    result: dict = {"machine": describe_machine(), "errors": {}, "models": []}
    arguments.output.mkdir(parents=True, exist_ok=True)
    for name in arguments.models:
        result["errors"][name] = check(name)
        for case in arguments.cases:
            row = measure_model(name, case, arguments.repeats, arguments.compile)
            result["models"].append(row)
            faster = ", ".join(f"{side} {ratio:.2f}x" for side, ratio in row["times faster"].items())
            print(f"{name} {case}: {faster} as fast, {row['memory ratio']:.2f} of the memory", flush=True)
    (arguments.output / "vision.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
