"""What the sub-commands of `nalaformer` share: what they need installed, and how they speak."""

import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path

from nalaformer_hf.training.errors import ConfigError

# Modules that a sub-command needs beyond the plain installation, by the extra that brings them.
EXTRAS = {
    "train": ("PIL", "accelerate", "datasets", "matplotlib", "omegaconf", "rich", "tensorboard"),
    "eval": ("lm_eval", "matplotlib"),
    "vision": ("PIL", "sklearn", "timm", "torchvision"),
}


def need(extra: str) -> None:
    """Refuse to go on without the modules of an extra.

    Raises:
        ConfigError: One is not installed.
    """
    missing = [name for name in EXTRAS[extra] if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"this command needs {', '.join(missing)}, which are not installed:"
            f" pip install 'nalaformer-hf[{extra}]'"
        )


def need_models(names: str | Sequence[str] | None) -> None:
    """Refuse a folder that does not exist, or that is a run's where its model is wanted.

    Raises:
        ConfigError: A name of `--model` is such a folder; a name on the Hub may be any `name` or `user/name`.
    """
    for name in [names] if isinstance(names, str) else names or ():
        path = Path(name)
        if not (path / "config.json").is_file() and (path / "model" / "config.json").is_file():
            raise ConfigError(f"--model {name} is the folder of a run; its model is {path / 'model'}")
        if not path.exists() and (name.count("/") > 1 or name.startswith(("/", ".", "~"))):
            raise ConfigError(f"--model {name}: there is no such folder")


def write(text: str) -> None:
    """Write a result to the standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(message: str, status: int) -> int:
    """Write a line to the standard error, and return the exit status."""
    sys.stderr.write(f"{message}\n")
    return status
