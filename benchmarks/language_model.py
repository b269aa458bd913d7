"""Speed and memory of the NaLa language model against a transformers Llama of equal size, in one run.

    python benchmarks/language_model.py --output runs/benchmark

Whole models of 8 layers, width 512, head dim 64, intermediate 1,408, vocabulary 4,096, batch 1, fp32; the
Llama uses SDPA, NaLa its `linear` mixer without and with the short convolution. First it is checked that
cached steps equal one pass; then the models take turns, and medians and ratios are printed and written as
JSON. With THP_MEM_ALLOC_ENABLE=1, torch's own switch for large pages, a step at 32,768 tokens waits less for
the system to hand out memory; the results say whether it was set.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import time
from pathlib import Path

import torch
import transformers
from tqdm import tqdm
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.generation import cache_bytes

VOCAB_SIZE = 4096
REPEATS = {2048: 7, 8192: 3, 32768: 1}


def build_models() -> dict[str, PreTrainedModel]:
    """The three models, by name."""
    torch.manual_seed(0)
    llama = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=512,
        intermediate_size=1408,
        num_hidden_layers=8,
        num_attention_heads=8,
        max_position_embeddings=1 << 17,
        attn_implementation="sdpa",
    )
    nala = {"mixer": "linear", "output_norm": "layer_norm", "max_position_embeddings": 1 << 17}
    return {
        "llama": LlamaForCausalLM(llama),
        "nala": NaLaForCausalLM(NaLaConfig.from_preset("small", use_short_conv=False, **nala)),
        "nala with conv": NaLaForCausalLM(NaLaConfig.from_preset("small", use_short_conv=True, **nala)),
    }


def random_ids(num_tokens: int) -> torch.Tensor:
    """(1, T) token ids."""
    return torch.randint(VOCAB_SIZE, (1, num_tokens), generator=torch.Generator().manual_seed(num_tokens))


@torch.no_grad()
def check(model: PreTrainedModel) -> float:
    """Largest difference between one pass and a prefill with cached steps, relative to the largest logit."""
    ids = random_ids(300)
    model.eval()
    whole = model(ids, use_cache=False).logits
    outputs = model(ids[:, :280], use_cache=True)
    steps = []
    for t in range(280, 300):
        outputs = model(ids[:, t : t + 1], cache=outputs.cache, use_cache=True)
        steps.append(outputs.logits)
    error = float((torch.cat(steps, 1) - whole[:, 280:]).abs().max() / whole.abs().max())
    if error > 1e-5:
        raise RuntimeError(
            f"cached steps differ from one pass by {error:.1e} of the largest logit; nothing is timed"
        )
    return error


def training_step(model: PreTrainedModel, ids: torch.Tensor) -> float:
    """Seconds of forward and backward."""
    model.train()
    start = time.perf_counter()
    model(input_ids=ids, labels=ids).loss.backward()
    seconds = time.perf_counter() - start
    model.zero_grad(set_to_none=True)
    return seconds


@torch.no_grad()
def decode(model: PreTrainedModel, context: int, num_tokens: int = 32) -> tuple[float, int]:
    """Median seconds for one more token after `context` tokens, and the bytes of the cache."""
    model.eval()
    outputs = model(random_ids(context), use_cache=True, logits_to_keep=1)
    seconds = []
    for _ in range(num_tokens + 4):
        token = outputs.logits[:, -1:].argmax(-1)
        start = time.perf_counter()
        outputs = model(token, cache=outputs.cache, use_cache=True)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds[4:]), cache_bytes(outputs.cache)


def measure_training(models: dict[str, PreTrainedModel], lengths: list[int]) -> list[dict]:
    """One row a length: median seconds of a step of each model, taken in turns."""
    rows = []
    for length in lengths:
        ids, times = random_ids(length), {name: [] for name in models}
        repeats = REPEATS.get(length, 3)
        for model in models.values() if repeats > 1 else ():
            training_step(model, ids)
        for _ in tqdm(range(repeats), desc=f"training step, {length} tokens"):
            for name, model in models.items():
                times[name].append(training_step(model, ids))
        rows.append({"tokens": length, **{name: statistics.median(values) for name, values in times.items()}})
    return rows


def measure_decoding(
    models: dict[str, PreTrainedModel], contexts: list[int], peer_context: int
) -> list[dict]:
    """One row a context; the Llama at `peer_context` only, since its prefill takes minutes."""
    rows = []
    for context in tqdm(contexts, desc="decoding"):
        row: dict = {"context": context}
        for name, model in models.items():
            if name != "llama" or context == peer_context:
                seconds, num_bytes = decode(model, context)
                row |= {f"{name}: ms a token": 1000 * seconds, f"{name}: cache bytes": num_bytes}
        rows.append(row)
    return rows


def machine() -> dict:
    """What the numbers were made on."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    )
    return {
        "processor": processor_name(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "commit": commit.stdout.strip(),
    }


def processor_name() -> str:
    """The processor's model name where the system tells it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")),
        platform.processor(),
    )


def report(results: dict) -> str:
    """The results as markdown."""
    lines = [str(results["machine"]), ""]
    lines += ["| tokens | Llama s | NaLa s | ratio | NaLa with conv s | ratio |", "|---|---|---|---|---|---|"]
    for row in results["training"]:
        llama, plain, conv = row["llama"], row["nala"], row["nala with conv"]
        seconds = f"{llama:.2f} | {plain:.2f} | {plain / llama:.2f} | {conv:.2f} | {conv / llama:.2f}"
        lines.append(f"| {row['tokens']} | {seconds} |")
    columns = list(results["decoding"][-1])
    lines += ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in results["decoding"]:
        lines.append("| " + " | ".join(f"{row[c]:,.1f}" if c in row else "" for c in columns) + " |")
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--output", type=Path, required=True, help="folder for language_model.json")
    parser.add_argument(
        "--lengths", type=int, nargs="+", default=list(REPEATS), help="tokens of a training step"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192, 65536, 32768])
    parser.add_argument("--threads", type=int, default=2)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    models = build_models()
    results: dict = {"machine": machine() | {"large pages": os.environ.get("THP_MEM_ALLOC_ENABLE", "0")}}
    results["cached steps against one pass"] = {name: check(m) for name, m in models.items()}
    results["training"] = measure_training(models, args.lengths)
    results["decoding"] = measure_decoding(models, args.contexts, args.contexts[-1])
    args.output.mkdir(parents=True, exist_ok=True)
    (args.output / "language_model.json").write_text(json.dumps(results, indent=2) + "\n")
    print(report(results))


if __name__ == "__main__":
    main()
