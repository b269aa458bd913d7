"""Speed and memory of the NaLa vision models against a plain rendering of the published code, in one run.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision
    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision --compile

Two parts, both printed and written as JSON, the second as a picture too:

1. Models xt, t and s, forward at 224² (batch 8), 512² and 1024² (batch 1) and a training step at 224² (batch
   8, drop path as published), against `tests/vision/slow_reference.py` with the same weights. First it is
   checked that both give the same logits; then they take turns, and medians count. Peak memory is that of a
   new process each, less what its imports took.
2. One linear layer of 1 head of 64 over up to 70,225 tokens, against SDPA and softmax written out. The latter
   is measured to 16,384 tokens; beyond that its figure is extrapolated by its fitted N² and marked so.
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
import torch.nn.functional as F
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vision"))
from slow_reference import SlowNaLaFormer

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.convert import from_published
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.vision_linear_nala import vision_linear_attention
from nalaformer_hf.modeling.vision_rotary_nala import NaLaVisionRotary

SIDES = ("slow", "ours")
MODELS = ("xt", "t", "s")
CASES = {
    "forward 224": (224, 8),
    "forward 512": (512, 1),
    "forward 1024": (1024, 1),
    "training 224": (224, 8),
}
LAYER_FORMS = ("linear", "sdpa", "softmax")
GRIDS = (32, 64, 90, 128, 181, 265)  # 265² = 70,225 tokens
LAST_WRITTEN_OUT = 16_384
HEAD_DIM = 64
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


def seconds(call: Callable[[], None]) -> float:
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
        models["compiled"] = torch.compile(models["ours"])
    times = take_turns(
        {side: (lambda model=model: run_case(model, case)) for side, model in models.items()},
        repeats,
        f"{name} {case}",
    )
    del models
    memory = {side: peak_memory("model", side, name, case) for side in SIDES}
    row = {"model": name, "case": case, "seconds": times, "MiB": memory}
    row["times faster"] = {side: times["slow"] / times[side] for side in times if side != "slow"}
    row["memory ratio"] = memory["ours"] / memory["slow"]
    return row


def peak_memory(*arguments: str) -> float:
    """MiB that a new process needs for one run, beyond its imports."""
    command = [sys.executable, __file__, "--probe", *arguments]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1])


def probe(kind: str, side: str, *arguments: str) -> None:
    """Runs one case once, and prints what this process's peak is above its imports, in MiB."""
    before = memory_of_this_process("VmRSS")
    if kind == "model":
        name, case = arguments
        run_case(build_alone(name, side, case.startswith("training")), case)
    else:
        layer_call(side, int(arguments[0]), arguments[1] == "training")()
    print(memory_of_this_process("VmHWM") - before)


def memory_of_this_process(field: str) -> float:
    """MiB that it holds ("VmRSS") or held at most ("VmHWM"; the peak of `getrusage` is inherited)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kibibytes) / 1024


def layer_call(form: str, grid: int, training: bool) -> Callable[[], None]:
    """One attention over grid² tokens, forward, and backward if `training`."""
    num_tokens = grid * grid
    generator = torch.Generator().manual_seed(grid)
    q, k, v = (torch.randn(1, num_tokens, 1, HEAD_DIM, generator=generator) for _ in range(3))
    tables = NaLaVisionRotary(HEAD_DIM)(grid, grid, q)
    for x in (q, k, v):
        x.requires_grad_(training)

    def call() -> None:
        with torch.set_grad_enabled(training):
            if form == "linear":
                o = vision_linear_attention(q, k, v, FeatureSpec("polarity"), tables)
            else:
                rows = (x.transpose(1, 2) for x in (q, k, v))
                o = F.scaled_dot_product_attention(*rows) if form == "sdpa" else written_out(*rows)
            if training:
                o.sum().backward()

    return call


def written_out(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / √D) v."""
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def measure_layer(repeats: int) -> list[dict]:
    """Seconds and MiB by number of tokens; softmax beyond `LAST_WRITTEN_OUT` tokens is extrapolated."""
    rows = []
    for grid in GRIDS:
        num_tokens = grid * grid
        forms = [form for form in LAYER_FORMS if form != "softmax" or num_tokens <= LAST_WRITTEN_OUT]
        calls = {form: layer_call(form, grid, training=False) for form in forms}
        times = take_turns(calls, repeats if num_tokens < 40_000 else 1, f"layer, {num_tokens} tokens")
        row: dict = {"tokens": num_tokens, "seconds": times, "extrapolated": []}
        row["MiB"] = {form: peak_memory("layer", form, str(grid), "inference") for form in forms}
        row["training MiB"] = {
            form: peak_memory("layer", form, str(grid), "training") for form in forms if form != "softmax"
        }
        rows.append(row)
    extrapolate(rows)
    return rows


def extrapolate(rows: list[dict]) -> None:
    """Fills in the written out softmax, by the N² that fits its two largest measurements."""
    for quantity in ("seconds", "MiB"):
        measured = [
            row for row in rows if "softmax" not in row["extrapolated"] and "softmax" in row[quantity]
        ]
        fit = statistics.mean(row[quantity]["softmax"] / row["tokens"] ** 2 for row in measured[-2:])
        for row in rows:
            if row["tokens"] > LAST_WRITTEN_OUT:
                row[quantity]["softmax"] = fit * row["tokens"] ** 2
    for row in rows:
        if row["tokens"] > LAST_WRITTEN_OUT:
            row["extrapolated"] = ["softmax"]


def draw_layer(rows: list[dict], file: Path) -> None:
    """Time and memory of one layer over the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, 2), ("seconds", "MiB"), strict=True):
        for form in LAYER_FORMS:
            for marker, extrapolated in (("o-", False), ("o:", True)):
                part = [row for row in rows if (form in row["extrapolated"]) == extrapolated]
                label = f"{form}, extrapolated" if extrapolated else form
                if part:
                    points = [(row["tokens"], row[quantity][form]) for row in part]
                    axes.plot(*zip(*points, strict=True), marker, label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=quantity)
        axes.legend()
    figure.suptitle(f"One attention layer, 1 head of {HEAD_DIM}, inference")
    figure.savefig(file, dpi=120)


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
    parser.add_argument("--no-layer", action="store_true", help="leave the second part out")
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
    if not arguments.no_layer:
        result["layer"] = measure_layer(arguments.repeats)
        for row in result["layer"]:
            print({key: row[key] for key in ("tokens", "seconds", "MiB", "training MiB", "extrapolated")})
        draw_layer(result["layer"], arguments.output / "layer.png")
    (arguments.output / "vision.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
