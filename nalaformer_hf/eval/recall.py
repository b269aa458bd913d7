"""`nalaformer eval recall`: small models of one size learn to recall, and are asked beyond their length."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedConfig

from nalaformer_hf import NaLaConfig
from nalaformer_hf.eval.recall_tasks import IGNORED, RECALL_TASKS
from nalaformer_hf.eval.small_runs import add_run, read_runs, spread, train
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.models import count_parameters, match_size
from nalaformer_hf.training.settings import check_known

# None is softmax attention: a Llama, with its feed-forward width chosen for the size of the first NaLa model.
MODELS: dict[str, dict[str, Any] | None] = {
    "linear": {"mixer": "linear"},
    "gated_delta": {"mixer": "gated_delta"},
    "1 + ELU": {"mixer": "linear", "feature_form": "elu"},
    "softmax": None,
}
SHAPE: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "tie_word_embeddings": True,
    "bos_token_id": None,
    "eos_token_id": None,
}
TEST_SEED = 10_000


@dataclass(frozen=True)
class RecallSettings:
    """How the models are trained and asked.

    Args:
        num_steps: Optimizer steps.
        length: Longest sequence of the training.
        vocab_size: Number of tokens.
        batch_size: Sequences a step, all of one length between the task's least and `length`.
        factors: Lengths to ask at, as multiples of it.
        learning_rate: Peak, after a warm-up of a tenth of the steps; then a cosine to a tenth of it.
        num_asked: Sequences to ask at each length.

    Raises:
        ConfigError: A number is not positive.
    """

    num_steps: int
    length: int
    vocab_size: int
    batch_size: int = 64
    factors: tuple[int, ...] = (1, 2, 4)
    learning_rate: float = 3e-3
    num_asked: int = 256

    def __post_init__(self) -> None:
        for name, value in asdict(self).items():
            if min(value if isinstance(value, tuple) else (value,)) <= 0:
                raise ConfigError(f"{name} must be positive, got {value}")


def settings_of(task: str, **overrides: Any) -> RecallSettings:
    """The task's own settings, with other values for some."""
    own = RECALL_TASKS[task]
    sizes = {name: getattr(own, name) for name in ("num_steps", "length", "vocab_size")}
    return RecallSettings(**(sizes | overrides))


class _Sequences(IterableDataset):
    """Training sequences without end, each batch of one random length."""

    def __init__(self, task: str, settings: RecallSettings, seed: int) -> None:
        self.task, self.settings, self.seed = RECALL_TASKS[task], settings, seed

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        generator = torch.Generator().manual_seed(self.seed)
        shortest, longest = self.task.min_length, self.settings.length
        while True:
            length = int(torch.randint(shortest, longest + 1, (), generator=generator))
            batch = self.task.make(self.settings.batch_size, length, self.settings.vocab_size, generator)
            yield from ({"input_ids": ids, "labels": labels} for ids, labels in zip(*batch, strict=True))


def run_recall(
    output_dir: Path,
    *,
    tasks: Sequence[str] = tuple(RECALL_TASKS),
    models: Sequence[str] = tuple(MODELS),
    seeds: Sequence[int] = (0, 1, 2),
    overrides: Mapping[str, Any] | None = None,
) -> list[dict[str, Any]]:
    """Train and ask each model on each task and seed; what stands in the folder is not done again.

    Args:
        output_dir: Folder of `results.jsonl`, a line a run.
        tasks: Of `RECALL_TASKS`.
        models: Of `MODELS`.
        seeds: Of the weights and the training sequences; all are asked the same.
        overrides: Fields of `RecallSettings` that all tasks have other values for than their own.

    Returns:
        All runs of the folder.

    Raises:
        ConfigError: There is no such task or model, a seed is out of range, or the folder has runs with
            other settings.
    """
    if not all(0 <= seed < 2**32 for seed in seeds):
        raise ConfigError(f"seeds must be between 0 and 2**32 - 1, got {list(seeds)}")
    check_known("task ", tasks, RECALL_TASKS)
    check_known("model ", models, MODELS)
    settings = {task: settings_of(task, **(overrides or {})) for task in RECALL_TASKS}
    wanted = {task: json.loads(json.dumps(asdict(settings[task]))) for task in RECALL_TASKS}
    done = read_runs(output_dir, lambda run: wanted.get(run.get("task", ""), {}))
    output_dir.mkdir(parents=True, exist_ok=True)
    keys = {(run["task"], run["model"], run["seed"]) for run in done}
    for seed in seeds:
        for task in tasks:
            for model in models:
                if (task, model, seed) not in keys:
                    run = _run(task, model, seed, settings[task], output_dir)
                    done.append(run | {"settings": wanted[task]})
                    add_run(output_dir, done[-1])
                    keys.add((task, model, seed))
    return done


def model_config(model: str, settings: RecallSettings) -> PreTrainedConfig:
    """Return the configuration of a model of the comparison, of the size of the first one."""
    sizes: dict[str, Any] = SHAPE | {
        "vocab_size": settings.vocab_size,
        "max_position_embeddings": settings.length,
    }
    fields = MODELS[model]
    if fields is None:
        first = NaLaConfig(**sizes, **next(f for f in MODELS.values() if f is not None))
        return match_size(LlamaConfig(**sizes), count_parameters(first))
    return NaLaConfig(**sizes, **fields)


def _run(task: str, name: str, seed: int, settings: RecallSettings, output_dir: Path) -> dict[str, Any]:
    """One training and its answers."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(model_config(name, settings))
    train(
        model,
        _Sequences(task, settings, seed),
        num_steps=settings.num_steps,
        batch_size=settings.batch_size,
        learning_rate=settings.learning_rate,
        seed=seed,
        output_dir=output_dir,
    )
    accuracy = {
        str(factor * settings.length): _accuracy(model, task, factor * settings.length, settings)
        for factor in settings.factors
    }
    return {
        "task": task,
        "model": name,
        "seed": seed,
        "num_parameters": model.num_parameters(),
        "accuracy": accuracy,
    }


@torch.no_grad()
def _accuracy(model: Any, task: str, length: int, settings: RecallSettings) -> float:
    """Share of the labelled tokens that are the likeliest ones."""
    model.eval()
    generator = torch.Generator().manual_seed(TEST_SEED)
    ids, labels = RECALL_TASKS[task].make(settings.num_asked, length, settings.vocab_size, generator)
    right = total = 0
    for i in range(0, len(ids), settings.batch_size):
        rows = slice(i, i + settings.batch_size)
        logits = model(input_ids=ids[rows].to(model.device), use_cache=False).logits
        predicted = logits[:, :-1].argmax(-1).cpu()
        asked = labels[rows, 1:] != IGNORED
        right += int((predicted == labels[rows, 1:])[asked].sum())
        total += int(asked.sum())
    return right / total


def to_markdown(runs: Sequence[dict[str, Any]]) -> str:
    """Write a table in markdown: accuracy in %, mean and standard deviation over the seeds, by length.

    Args:
        runs: What `run_recall` returned.
    """
    lines = []
    for task in dict.fromkeys(run["task"] for run in runs):
        of_task = [run for run in runs if run["task"] == task]
        lengths = list(of_task[0]["accuracy"])
        lines += [f"| {task}, tokens | parameters | seeds | {' | '.join(lengths)} |"]
        lines += ["|---" * (len(lengths) + 3) + "|"]
        for model in dict.fromkeys(run["model"] for run in of_task):
            of_model = [run for run in of_task if run["model"] == model]
            cells = [spread([100 * run["accuracy"][length] for run in of_model]) for length in lengths]
            size = of_model[0]["num_parameters"]
            lines += [f"| {model} | {size:,} | {len(of_model)} | {' | '.join(cells)} |"]
        lines += [""]
    return "\n".join(lines)
