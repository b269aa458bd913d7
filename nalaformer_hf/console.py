"""What the sub-commands of `nalaformer` share: what they need installed, and how they speak."""

import importlib.util
import sys

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


def write(text: str) -> None:
    """Write a result to the standard output, at once."""
    sys.stdout.write(text)
    sys.stdout.flush()


def say(message: str, status: int) -> int:
    """Write a line to the standard error, and return the exit status."""
    sys.stderr.write(f"{message}\n")
    return status
