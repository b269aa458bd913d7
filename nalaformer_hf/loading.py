"""Load checkpoints through the Auto classes, with a sentence where they have a traceback."""

from typing import Any

from safetensors import SafetensorError

from nalaformer_hf.training.errors import ConfigError


def load_pretrained(auto_class: type, name: str, what: str, **options: Any) -> Any:
    """Call `auto_class.from_pretrained`.

    Args:
        auto_class: An Auto class of transformers.
        name: Folder or Hub name.
        what: What is loaded, for the message, such as "a causal language model".
        **options: Those of `from_pretrained`.

    Raises:
        ConfigError: Nothing of the kind can be loaded from there, with the first line of the reason.
    """
    loader: Any = auto_class
    try:
        return loader.from_pretrained(name, **options)
    # What the library lets through of a missing, foreign, broken or half-written checkpoint.
    except (OSError, ValueError, TypeError, LookupError, RuntimeError, SafetensorError) as error:
        reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
        raise ConfigError(f"{what} cannot be loaded from {name!r}: {reason}") from error
