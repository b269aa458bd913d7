"""Speed and memory of the NaLa vision models against a plain rendering of the published code, in one run.

    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision
    OMP_WAIT_POLICY=PASSIVE python benchmarks/vision.py --output runs/vision --compile

Two parts, both printed and written as JSON, the second as CSV and as a picture too:

1. Models xt, t and s, forward at 224² (batch 8), 512² and 1024² (batch 1) and a training step at 224² (batch
   8, drop path as published), against `tests/vision/slow_reference.py` with the same weights. First it is
   checked that both give the same logits; then they take turns, and medians count. Peak memory is that of a
   new process each, less what its imports took.
2. One linear layer (projections, attention, norm, gate) of 1 head of 64 over up to 70,225 tokens, against
   the same layer with SDPA, with softmax written out, and the published linear one: the same weights, each in
   a new process. Softmax written out is measured to 16,384 tokens; beyond that its figures are extrapolated
   by its fitted N² and marked so.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "vision"))
from slow_reference import LinearAttention, RotaryTable, SlowNaLaFormer, SoftmaxAttention

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.convert import from_published
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.modeling.vision_rotary_nala import NaLaVisionRotary

SIDES = ("slow", "ours")
MODELS = ("xt", "t", "s")
CASES = {
    "forward 224": (224, 8),
    "forward 512": (512, 1),
    "forward 1024": (1024, 1),
    "training 224": (224, 8),
}
LAYER_FORMS = ("linear", "linear, as published", "sdpa", "softmax")
TRAINED_FORMS = ("linear", "sdpa")
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
        models["compiled"] = torch.compile(models["ours"])
    times = take_turns(
        {side: (lambda model=model: run_case(model, case)) for side, model in models.items()},
        repeats,
        f"{name} {case}",
    )
    del models
    memory = {side: probe_alone("model", f"{side}/{name}", case, "0")[1] for side in SIDES}
    row = {"model": name, "case": case, "seconds": times, "MiB": memory}
    row["times faster"] = {side: times["slow"] / times[side] for side in times if side != "slow"}
    row["memory ratio"] = memory["ours"] / memory["slow"]
    return row


def probe_alone(*arguments: str) -> tuple[float, float]:
    """Seconds of one run in a new process, and the MiB it needs beyond its imports."""
    command = [sys.executable, __file__, "--probe", *arguments]
    words = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout.split()
    return float(words[-2]), float(words[-1])


def probe(kind: str, side: str, case: str, repeats: str) -> None:
    """Runs one case, and prints its seconds and what this process's peak is above its imports, in MiB.

    The peak is that of the first run. The seconds are the median of `repeats` more; the first one's where it
    takes longer than `repeats` seconds.
    """
    before = memory_of_this_process("VmRSS")
    if kind == "model":
        side, name = side.split("/")
        call = partial(run_case, build_alone(name, side, case.startswith("training")), case)
    else:
        call = layer_call(side, int(case), kind == "training layer")
    spent = seconds(call)
    memory = memory_of_this_process("VmHWM") - before
    if spent < int(repeats):
        spent = statistics.median(seconds(call) for _ in range(int(repeats)))
    print(spent, memory)


def memory_of_this_process(field: str) -> float:
    """MiB that it holds ("VmRSS") or held at most ("VmHWM"; the peak of `getrusage` is inherited)."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    (kibibytes,) = [line.split()[1] for line in lines if line.startswith(f"{field}:")]
    return int(kibibytes) / 1024


def build_layer(form: str) -> nn.Module:
    """One attention layer; all forms have the same weights."""
    config = NaLaVisionConfig(
        hidden_sizes=[HEAD_DIM],
        num_attention_heads=[1],
        depths=[1],
        mlp_ratios=[4.0],
        mixers=["linear" if "linear" in form else "softmax"],
        layer_scale_init_values=None,
    )
    torch.manual_seed(0)
    ours = NaLaVisionAttention(config, 0)
    if form in ("linear", "sdpa"):
        return ours
    published = LinearAttention if form == "linear, as published" else SoftmaxAttention
    layer = published(HEAD_DIM, 1)
    layer.load_state_dict(ours.state_dict())
    return layer


def layer_call(form: str, grid: int, training: bool) -> Callable[[], Tensor]:
    """One layer over grid² tokens, forward, and backward if `training`, tables included."""
    layer = build_layer(form)
    x = torch.randn(1, grid, grid, HEAD_DIM, generator=torch.Generator().manual_seed(grid))
    x.requires_grad_(training)

    def call() -> Tensor:
        with torch.set_grad_enabled(training):
            if isinstance(layer, NaLaVisionAttention):
                y = layer(x, NaLaVisionRotary(HEAD_DIM)(grid, grid, x))
            else:
                y = layer(x.permute(0, 3, 1, 2), RotaryTable(HEAD_DIM, 1)(grid, grid)).permute(0, 2, 3, 1)
            if training:
                y.sum().backward()
            return y

    return call


def check_layer() -> dict[str, float]:
    """Largest differences between our layers and the published ones, to the largest value."""
    pairs = {"linear": ("linear, as published", 185), "sdpa": ("softmax", 45)}  # 185² tokens go in blocks
    errors = {}
    for form, (published, grid) in pairs.items():
        actual, expected = (layer_call(name, grid, training=False)() for name in (form, published))
        errors[form] = float((actual - expected).abs().max() / expected.abs().max())
        if errors[form] > GATE:
            raise RuntimeError(
                f"{form}: differs by {errors[form]:.1e} of the largest value; nothing is timed"
            )
    return errors


def measure_layer(repeats: int) -> dict:
    """Errors, and rows of seconds and MiB by form and number of tokens, each from a process of its own."""
    errors, rows = check_layer(), []
    cases = [(form, grid) for grid in GRIDS for form in LAYER_FORMS]
    for form, grid in tqdm([case for case in cases if is_measured(*case)], desc="layer"):
        spent, memory = probe_alone("layer", form, str(grid), str(repeats))
        row = {"form": form, "tokens": grid * grid, "seconds": spent, "MiB": memory, "extrapolated": False}
        if form in TRAINED_FORMS:
            _, row["training MiB"] = probe_alone("training layer", form, str(grid), "0")
        rows.append(row)
    return {"errors": errors, "rows": rows + extrapolate(rows)}


def is_measured(form: str, grid: int) -> bool:
    """Softmax written out takes all memory beyond `LAST_WRITTEN_OUT` tokens."""
    return form != "softmax" or grid * grid <= LAST_WRITTEN_OUT


def extrapolate(rows: list[dict]) -> list[dict]:
    """The rows of softmax written out that were not measured, by the a + b N² that fits the others."""
    measured = [row for row in rows if row["form"] == "softmax"]
    squares = [row["tokens"] ** 2 for row in measured]
    fits = {name: np.polyfit(squares, [row[name] for row in measured], 1) for name in ("seconds", "MiB")}
    beyond = [grid * grid for grid in GRIDS if not is_measured("softmax", grid)]
    return [
        {"form": "softmax", "tokens": tokens, "extrapolated": True}
        | {name: float(np.polyval(fit, tokens**2)) for name, fit in fits.items()}
        for tokens in beyond
    ]


def print_layer(result: dict) -> None:
    """A line for each row, and how the linear layer does at the largest number of tokens."""
    for row in result["rows"]:
        mark = " (extrapolated)" if row["extrapolated"] else ""
        training = f", training {row['training MiB']:.0f} MiB" if "training MiB" in row else ""
        print(
            f"{row['tokens']:>6} tokens, {row['form']}: {row['seconds']:.3g} s, {row['MiB']:.0f} MiB"
            f"{training}{mark}"
        )
    last = {row["form"]: row for row in result["rows"] if row["tokens"] == GRIDS[-1] ** 2}
    linear, sdpa, softmax = (last[form] for form in ("linear", "sdpa", "softmax"))
    print(
        f"linear to SDPA: {sdpa['seconds'] / linear['seconds']:.0f} times as fast, "
        f"{linear['MiB'] / sdpa['MiB']:.2f} of the memory, "
        f"{linear['training MiB'] / sdpa['training MiB']:.2f} in training; "
        f"{1 - linear['MiB'] / softmax['MiB']:.1%} below softmax written out (extrapolated)"
    )


def draw_layer(rows: list[dict], file: Path) -> None:
    """Time and memory of one layer over the number of tokens."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, quantity in zip(figure.subplots(1, 2), ("seconds", "MiB"), strict=True):
        for color, form in enumerate(LAYER_FORMS):
            for style, extrapolated in (("o-", False), ("o:", True)):
                points = [
                    (row["tokens"], row[quantity])
                    for row in rows
                    if row["form"] == form and row["extrapolated"] == extrapolated
                ]
                label = f"{form}, extrapolated" if extrapolated else form
                if points:
                    axes.plot(*zip(*points, strict=True), style, color=f"C{color}", label=label)
        axes.set(xscale="log", yscale="log", xlabel="tokens", ylabel=quantity)
        axes.legend()
    figure.suptitle(f"One attention layer, 1 head of {HEAD_DIM}, inference")
    figure.savefig(file, dpi=120)


def write_table(rows: list[dict], file: Path) -> None:
    """The rows as CSV."""
    names = ["form", "tokens", "seconds", "MiB", "training MiB", "extrapolated"]
    with file.open("w", encoding="utf-8", newline="") as stream:
        writer = csv.DictWriter(stream, names)
        writer.writeheader()
        writer.writerows(rows)


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
        print_layer(result["layer"])
        write_table(result["layer"]["rows"], arguments.output / "layer.csv")
        draw_layer(result["layer"]["rows"], arguments.output / "layer.png")
    (arguments.output / "vision.json").write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
