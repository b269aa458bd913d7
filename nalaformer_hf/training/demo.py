"""`nalaformer demo`: from text to a trained, reloaded and scored language model, in minutes on a CPU."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import datasets
import transformers
from rich.console import Console
from transformers import LlamaConfig

from nalaformer_hf import NaLaConfig
from nalaformer_hf.eval.lm_harness import score_sample_tasks
from nalaformer_hf.files import write_whole
from nalaformer_hf.modeling.configuration_nala import PRESETS
from nalaformer_hf.training.config import LMTrainConfig, load_config
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lm import TOKENIZER_DIR, train_lm
from nalaformer_hf.training.models import count_parameters, match_size
from nalaformer_hf.training.report import read_history, save_loss_curve, summary_table
from nalaformer_hf.training.runs import CONFIG_FILE, MODEL_DIR
from nalaformer_hf.training.settings import check_known

PROGRESS_FILE = "demo.json"
LOSS_CURVE = "loss_curve.png"
PROMPT = "class Counter:\n    def __init__(self"
# Both models are trained alike.
TRAIN = {
    "per_device_train_batch_size": 4,
    "per_device_eval_batch_size": 8,
    "learning_rate": 3e-3,
    "lr_scheduler_type": "cosine_with_min_lr",
    "lr_scheduler_kwargs": {"min_lr_rate": 0.1},
    "warmup_steps": 0.1,
    "weight_decay": 0.1,
    "adam_beta2": 0.95,
    "eval_strategy": "steps",
    "eval_on_start": True,
    "logging_first_step": True,
    "save_total_limit": 1,
    "use_cpu": True,
}


@dataclass(frozen=True)
class DemoSettings:
    """What can be chosen about the demo.

    Args:
        preset: The NaLa preset to train.
        steps: Optimizer steps of each model.
        text_file: Text to train on; None takes the source of Python's standard library.

    Raises:
        ConfigError: There is no such preset or file, or `steps` is not positive.
    """

    preset: str = "tiny"
    steps: int = 250
    text_file: str | None = None

    def __post_init__(self) -> None:
        check_known("preset ", [self.preset], PRESETS)
        if self.steps < 1:
            raise ConfigError(f"steps must be at least 1, got {self.steps}")
        if self.text_file is not None and not Path(self.text_file).is_file():
            raise ConfigError(f"text_file must be a file, got {self.text_file}")


class _Progress:
    """The stages that are done, and what they came to, in a file that survives an interruption."""

    def __init__(self, path: Path, settings: DemoSettings) -> None:
        self.path = path
        self.settings = asdict(settings)
        self.results: dict[str, Any] = {}

    def load(self) -> None:
        saved = json.loads(self.path.read_text(encoding="utf-8"))
        if saved["settings"] != self.settings:
            raise ConfigError(f"{self.path.parent} holds a demo with other settings: {saved['settings']}")
        self.results = saved["results"]

    def save(self) -> None:
        text = json.dumps({"settings": self.settings, "results": self.results}, indent=2)
        write_whole(self.path, text)


def run_demo(settings: DemoSettings, output_dir: Path, *, resume: bool = False) -> bool:
    """Run the demo; see `nalaformer demo --help`.

    Args:
        settings: What can be chosen.
        output_dir: Folder for all that it makes. An earlier demo there is replaced, or continued by `resume`.
        resume: Skip the stages that are done, and go on inside the one that was interrupted.

    Returns:
        Whether it came to its end; if not, `resume` goes on.

    Raises:
        ConfigError: The folder holds something else, or a demo with other settings.
    """
    datasets.disable_progress_bars()
    transformers.utils.logging.disable_progress_bar()
    progress = _open(settings, output_dir, resume=resume)
    console = Console()
    configs = {"nala": nala_config, "llama": llama_config}
    for name, make_config in configs.items():
        console.rule(f"Train {name}")
        if name not in progress.results and not _train(name, make_config(settings, output_dir), progress):
            return False
    curves = {name: read_history(Path(progress.results[name]["checkpoint"])) for name in configs}
    save_loss_curve(curves, output_dir / LOSS_CURVE)
    stages: dict[str, Callable[[str], Any]] = {"generate": _generate, "score": score_sample_tasks}
    for stage, run in stages.items():
        for name in configs:
            console.rule(f"{stage.capitalize()} {name}, reloaded")
            if (key := f"{stage} {name}") not in progress.results:
                progress.results[key] = run(progress.results[name]["model_dir"])
                progress.save()
    console.rule("Summary")
    console.print(summary_table(progress.results, curves))
    console.print(f"Models: {output_dir}/nala/{MODEL_DIR}, {output_dir}/llama/{MODEL_DIR}", soft_wrap=True)
    console.print(f"Loss curve: {output_dir / LOSS_CURVE}", soft_wrap=True)
    return True


def nala_config(settings: DemoSettings, output_dir: Path) -> LMTrainConfig:
    """Return the configuration of the NaLa run."""
    if settings.text_file is None:
        data: dict[str, Any] = {"corpus": "stdlib", "heldout_fraction": 0.02}
    else:
        data = {"files": settings.text_file, "document_chars": 16384, "heldout_fraction": 0.1}
    vocab_size = NaLaConfig.from_preset(settings.preset).vocab_size
    return load_config(
        {
            "model": {"preset": settings.preset},
            "data": data | {"block_size": 512},
            "tokenizer": {"vocab_size": vocab_size},
            "train": TRAIN
            | {
                "output_dir": str(output_dir / "nala"),
                "max_steps": settings.steps,
                "eval_steps": max(settings.steps // 2, 1),
                "save_steps": max(settings.steps // 6, 1),
            },
        }
    )


def llama_config(settings: DemoSettings, output_dir: Path) -> LMTrainConfig:
    """Return the configuration of the yardstick: Llama of as many parameters, trained on the same batches."""
    values = nala_config(settings, output_dir).to_dict()
    nala = NaLaConfig.from_pretrained(output_dir / "nala" / MODEL_DIR)
    shared = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "tie_word_embeddings")
    llama = match_size(LlamaConfig(**{name: getattr(nala, name) for name in shared}), count_parameters(nala))
    shape = {name: getattr(llama, name) for name in (*shared[1:], "intermediate_size")}
    values["model"] = {"config": {"model_type": "llama", **shape}}
    values["tokenizer"] = {"name": str(output_dir / "nala" / TOKENIZER_DIR)}
    values["train"]["output_dir"] = str(output_dir / "llama")
    return load_config(values)


def _open(settings: DemoSettings, output_dir: Path, *, resume: bool) -> _Progress:
    """Make the folder ready: new, an earlier demo's to replace, or an interrupted demo's to continue."""
    progress = _Progress(output_dir / PROGRESS_FILE, settings)
    if output_dir.exists() and any(output_dir.iterdir()) and not progress.path.is_file():
        raise ConfigError(f"--output-dir {output_dir} holds something that is not a demo")
    if resume and progress.path.is_file():
        progress.load()
    elif output_dir.exists():
        shutil.rmtree(output_dir)
    output_dir.mkdir(parents=True, exist_ok=True)
    progress.save()
    return progress


def _train(name: str, config: LMTrainConfig, progress: _Progress) -> bool:
    result = train_lm(config, resume=(config.output_dir / CONFIG_FILE).is_file())
    if result.finished:
        progress.results[name] = asdict(result)
        progress.save()
    return result.finished


def _generate(model_dir: str) -> dict[str, Any]:
    """Continue the prompt in a new process, which streams to this one's terminal, and return its figures."""
    stats = Path(model_dir).parent / "generation.json"
    command = [sys.executable, "-m", "nalaformer_hf.cli", "generate", "--model", model_dir]
    options = ["--prompt", PROMPT, "--max-new-tokens", "200", "--stats", str(stats)]
    subprocess.run([*command, *options], check=True)
    return json.loads(stats.read_text(encoding="utf-8"))
