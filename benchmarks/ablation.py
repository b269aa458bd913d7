"""One factor at a time: what each choice of `NaLaConfig` does to small language models.

    python benchmarks/ablation.py --output runs/ablation          # about an hour on 2 cores
    python benchmarks/ablation.py --output runs/ablation --table  # the table of what is there so far

Two tasks: bytes of the standard library's source (held-out bits per byte) and multi-query associative recall
(accuracy). Each finished run is one line of `results.jsonl`; a run that stands there is not made again.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sysconfig
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.eval.recall_tasks import associative_recall

# The base of the ablation is written out, so that the table does not move when the package's defaults do.
BASE = {
    "mixer": "linear",
    "feature_form": "cosine",
    "norm_scale": 1.0,
    "use_rotary": False,
    "use_short_conv": True,
    "use_output_gate": True,
    "output_norm": "layer_norm",
}
DELTA = {"output_norm": "head_rms_norm"}
VARIANTS: dict[str, dict | None] = {
    "softmax (Llama, rotary)": None,
    "base: linear, cosine, conv, gate, LayerNorm": {},
    "form: polarity": {"feature_form": "polarity"},
    "form: 1 + ELU": {"feature_form": "elu"},
    "power: fixed at 3": {"norm_scale": 0.0, "feature_tau": 1.0},
    "norm_scale: 1/√D": {"norm_scale": "rsqrt_dim"},
    "rotary: on": {"use_rotary": True},
    "short conv: off": {"use_short_conv": False},
    "short conv: off, rotary: on": {"use_short_conv": False, "use_rotary": True},
    "output norm: per head": {"output_norm": "head_rms_norm"},
    "output norm: none": {"output_norm": "none"},
    "mixer: delta": {"mixer": "delta", **DELTA},
    "mixer: gated_delta": {"mixer": "gated_delta", **DELTA},
    "mixer: gated_delta, norm_scale: 1/√D": {"mixer": "gated_delta", "norm_scale": "rsqrt_dim", **DELTA},
}


@dataclass(frozen=True)
class Task:
    """Size of the model and of its training."""

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_tokens: int
    batch_size: int
    num_steps: int
    learning_rate: float


TASKS = {
    "text": Task(256, 128, 4, 2, num_tokens=256, batch_size=8, num_steps=250, learning_rate=3e-3),
    "recall": Task(32, 64, 2, 2, num_tokens=40, batch_size=64, num_steps=500, learning_rate=5e-3),
}
NUM_PAIRS = 6


def build_model(task: Task, variant: dict | None) -> torch.nn.Module:
    """A model of the task's size: Llama for None, else NaLa with the base's fields and the variant's."""
    sizes = {
        "vocab_size": task.vocab_size,
        "hidden_size": task.hidden_size,
        "intermediate_size": 64 * round(task.hidden_size * 8 / 3 / 64),
        "num_hidden_layers": task.num_layers,
        "num_attention_heads": task.num_heads,
        "max_position_embeddings": task.num_tokens,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    if variant is None:
        return LlamaForCausalLM(LlamaConfig(**sizes))
    fields = {**BASE, **variant}
    return NaLaForCausalLM(NaLaConfig(**sizes, **fields))


def read_stdlib() -> tuple[torch.Tensor, torch.Tensor]:
    """The standard library's source as bytes: what to train on, and every twentieth file, held out."""
    root = Path(sysconfig.get_path("stdlib"))
    excluded = {"site-packages", "test", "tests", "idlelib", "__pycache__"}
    files = sorted(p for p in root.rglob("*.py") if not excluded & set(p.relative_to(root).parts))
    parts = [
        b"".join(p.read_bytes() for i, p in enumerate(files) if (i % 20 == 0) == held)
        for held in (False, True)
    ]
    train, heldout = (torch.frombuffer(bytearray(part), dtype=torch.uint8).long() for part in parts)
    return train, heldout


def text_batch(
    data: torch.Tensor, task: Task, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random windows of the bytes; the labels are the same."""
    starts = torch.randint(len(data) - task.num_tokens, (task.batch_size,), generator=generator)
    ids = torch.stack([data[start : start + task.num_tokens] for start in starts])
    return ids, ids


def recall_batch(task: Task, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Multi-query associative recall of the task's size."""
    return associative_recall(task.batch_size, task.num_tokens, task.vocab_size, generator, NUM_PAIRS)


def train(model: torch.nn.Module, task: Task, batches) -> None:
    """AdamW, warm-up over a tenth of the steps, cosine to a tenth of the peak, clipping at 1."""
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=task.learning_rate, betas=(0.9, 0.95))
    warmup = task.num_steps // 10

    def factor(step: int) -> float:
        return min(1.0, (step + 1) / warmup) * (0.55 + 0.45 * math.cos(math.pi * step / task.num_steps))

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
    model.train()
    for _ in range(task.num_steps):
        ids, labels = next(batches)
        model(input_ids=ids, labels=labels).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()


@torch.no_grad()
def bits_per_byte(model: torch.nn.Module, data: torch.Tensor, task: Task, num_windows: int = 96) -> float:
    """Mean over the first windows of the held-out bytes."""
    model.eval()
    windows = data[: num_windows * task.num_tokens].view(-1, 16, task.num_tokens)
    losses = [model(input_ids=ids, labels=ids, use_cache=False).loss.item() for ids in windows]
    return statistics.mean(losses) / math.log(2)


@torch.no_grad()
def recall_accuracy(model: torch.nn.Module, task: Task, num_batches: int = 8) -> float:
    """Share of the repeated keys whose value is predicted."""
    model.eval()
    generator = torch.Generator().manual_seed(10_000)
    right = total = 0
    for _ in range(num_batches):
        ids, labels = recall_batch(task, generator)
        predicted = model(input_ids=ids, use_cache=False).logits[:, :-1].argmax(-1)
        asked = labels[:, 1:] != -100
        right += int((predicted == labels[:, 1:])[asked].sum())
        total += int(asked.sum())
    return right / total


def run(task_name: str, variant_name: str, seed: int, num_steps: int | None) -> dict:
    """One training and its score."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    task = TASKS[task_name]
    if num_steps is not None:
        task = Task(**{**asdict(task), "num_steps": num_steps})
    model = build_model(task, VARIANTS[variant_name])
    generator = torch.Generator().manual_seed(seed)
    if task_name == "text":
        training, heldout = read_stdlib()
        train(model, task, iter(lambda: text_batch(training, task, generator), None))
        score = bits_per_byte(model, heldout, task)
    else:
        train(model, task, iter(lambda: recall_batch(task, generator), None))
        score = recall_accuracy(model, task)
    return {"task": task_name, "variant": variant_name, "seed": seed, "steps": task.num_steps, "score": score}


def table(results: list[dict]) -> str:
    """Markdown: mean ± standard deviation over the seeds, and each text score relative to softmax."""
    scores: dict[tuple[str, str], list[float]] = {}
    for result in results:
        scores.setdefault((result["task"], result["variant"]), []).append(result["score"])
    softmax = statistics.mean(scores.get(("text", "softmax (Llama, rotary)"), [math.nan]))
    lines = [
        "| variant | bits per byte | against softmax | recall accuracy | seeds |",
        "|---|---|---|---|---|",
    ]
    for variant in VARIANTS:
        text, recall = scores.get(("text", variant), []), scores.get(("recall", variant), [])
        if not text and not recall:
            continue
        gap = f"{100 * (statistics.mean(text) / softmax - 1):+.1f} %" if text else ""
        percent = [100 * score for score in recall]
        cells = [variant, spread(text, 3), gap, spread(percent, 1, " %"), f"{len(text)}, {len(recall)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def spread(values: list[float], digits: int, unit: str = "") -> str:
    """Mean ± standard deviation."""
    if not values:
        return ""
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return f"{statistics.mean(values):.{digits}f} ± {deviation:.{digits}f}{unit}"


def read_results(path: Path) -> list[dict]:
    """The finished runs."""
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder of results.jsonl")
    parser.add_argument("--tasks", nargs="+", default=list(TASKS), choices=list(TASKS))
    parser.add_argument(
        "--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS), metavar="NAME"
    )
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="steps of each training, instead of the task's own")
    parser.add_argument("--workers", type=int, default=2, help="trainings at a time, one core each")
    parser.add_argument("--table", action="store_true", help="only print the table")
    args = parser.parse_args()
    path = args.output / "results.jsonl"
    done = {(r["task"], r["variant"], r["seed"]) for r in read_results(path)}
    wanted = [
        (t, v, s) for s in args.seeds for v in args.variants for t in args.tasks if (t, v, s) not in done
    ]
    if not args.table and wanted:
        args.output.mkdir(parents=True, exist_ok=True)
        with ProcessPoolExecutor(args.workers) as pool:
            futures = [pool.submit(run, *job, args.steps) for job in wanted]
            for future in tqdm(as_completed(futures), total=len(futures), desc="trainings"):
                with path.open("a") as file:
                    file.write(json.dumps(future.result(), ensure_ascii=False) + "\n")
    print(table(read_results(path)))


if __name__ == "__main__":
    main()
