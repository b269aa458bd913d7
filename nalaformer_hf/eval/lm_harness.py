"""Score a checkpoint with lm-eval on the sample tasks that the package carries."""

import logging
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, cast

import yaml

SAMPLE_TASKS = Path(str(resources.files("nalaformer_hf.eval") / "sample_tasks"))


def sample_task_names() -> list[str]:
    """Return the names of the sample tasks."""
    return sorted(path.stem for path in SAMPLE_TASKS.glob("*.yaml"))


def load_sample_tasks() -> list[dict[str, Any]]:
    """Return the definitions of the sample tasks, as lm-eval's `TaskManager.load` takes them."""
    return [_task(name) for name in sample_task_names()]


def score_sample_tasks(
    model: str, *, device: str = "cpu", batch_size: int = 8
) -> dict[str, dict[str, float]]:
    """Score a causal language model on the sample tasks, with lm-eval and its Hugging Face backend.

    Args:
        model: Folder or Hub name.
        device: Device to score on.
        batch_size: Requests at once.

    Returns:
        For each task its metrics by name, without the standard errors.
    """
    from lm_eval.api.registry import get_model
    from lm_eval.evaluator import evaluate
    from lm_eval.tasks import TaskManager

    logging.getLogger("lm_eval").setLevel(logging.ERROR)
    lm = get_model("hf").create_from_arg_obj(
        {"pretrained": model}, {"device": device, "batch_size": batch_size}
    )
    tasks = TaskManager(include_defaults=False).load(load_sample_tasks())
    results = evaluate(lm, tasks, bootstrap_iters=0, log_samples=False)
    metrics = cast("dict[str, Any]", results)["results"]
    return {task: _scores(metrics[task]) for task in sample_task_names()}


def _task(name: str) -> dict[str, Any]:
    """The task's definition, its data found wherever the package is installed."""
    task = yaml.safe_load((SAMPLE_TASKS / f"{name}.yaml").read_text(encoding="utf-8"))
    files = task["dataset_kwargs"]["data_files"]
    task["dataset_kwargs"]["data_files"] = {split: str(SAMPLE_TASKS / file) for split, file in files.items()}
    return task


def _scores(metrics: Mapping[str, Any]) -> dict[str, float]:
    named = {key.split(",")[0]: value for key, value in metrics.items() if key.endswith(",none")}
    return {name: float(value) for name, value in named.items() if not name.endswith("_stderr")}
