"""Settings of a run: a YAML file or packaged recipe, `key=value` overrides, checks in words."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal, get_args, get_type_hints

from huggingface_hub.dataclasses import type_validator
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from nalaformer_hf.training.errors import ConfigError, ConfigTypeError

RECIPES = resources.files("nalaformer_hf.training") / "recipes"
RecipeKind = Literal["lm", "image", "lra"]


def read_sections(
    kind: RecipeKind,
    source: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
    known: Iterable[str],
) -> dict[str, dict[str, Any]]:
    """Read the sections of a configuration, overridden.

    Args:
        kind: Which recipes may be named.
        source: A YAML file, the name of a packaged recipe (`recipe_names`), a mapping, or None for an empty
            one.
        overrides: `key=value` strings with dotted keys; values are YAML.
        known: Names of the sections that there are.

    Returns:
        Each known section's keys and values; those of one that is missing are empty.

    Raises:
        ConfigError: Unknown section, or a file or recipe that does not exist.
        ConfigTypeError: A section is no mapping.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"an override has the form key=value, got {override!r}")
    try:
        merged = OmegaConf.merge(_read(kind, source), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except (OmegaConfBaseException, YAMLError, UnicodeDecodeError, TypeError) as error:
        raise ConfigError(f"the configuration cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration must be a mapping of sections, got {type(values).__name__}")
    known = list(known)
    sections = {str(key): value for key, value in values.items()}
    check_known("key ", sections, known)
    for name, section in sections.items():
        if not isinstance(section, dict | None):
            raise ConfigTypeError(f"section {name} must be a mapping of keys to values, got {section!r}")
    return {name: sections.get(name) or {} for name in known}


def recipe_names(kind: RecipeKind) -> list[str]:
    """Return the names of the packaged recipes, which a configuration takes in place of a file."""
    names = (entry.name for entry in (RECIPES / kind).iterdir())
    return sorted(name.removesuffix(".yaml") for name in names if name.endswith(".yaml"))


def check_known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that are not known, each with the nearest known one.

    Args:
        where: What stands before the name in the message, such as "key train.".
        names: The names that were given.
        known: The names that exist.

    Raises:
        ConfigError: A name is unknown.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; the nearest known one is {where}{near[0]}" if near else ""
            raise ConfigError(f"unknown {where}{name}{hint}")


def checked(section: str, cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Check names and types against the fields of a dataclass; whole numbers may stand for floats.

    Args:
        section: Name of the section, for the messages.
        cls: The dataclass.
        values: Its fields, by name.

    Raises:
        ConfigError: Unknown name.
        ConfigTypeError: A value of the wrong type.
    """
    hints = get_type_hints(cls)
    check_known(f"key {section}.", values, [field.name for field in dataclasses.fields(cls)])
    result = {}
    for name, value in values.items():
        is_whole_float = isinstance(value, int) and not isinstance(value, bool) and _takes_float(hints[name])
        result[name] = float(value) if is_whole_float else value
        try:
            type_validator(f"{section}.{name}", result[name], hints[name])
        except TypeError as error:
            raise ConfigTypeError(str(error)) from error
    return result


def require_one(section: str, values: object, names: Sequence[str]) -> None:
    """Refuse unless exactly one of the fields `names` is set."""
    given = [f"{section}.{name}" for name in names if getattr(values, name) is not None]
    if len(given) != 1:
        choices = ", ".join(f"{section}.{name}" for name in names)
        raise ConfigError(f"exactly one of {choices} must be set, got {', '.join(given) or 'none'}")


def require_at_least(section: str, values: object, name: str, least: float) -> None:
    """Refuse a field that is set and less than `least`."""
    value = getattr(values, name)
    if value is not None and value < least:
        raise ConfigError(f"{section}.{name} must be at least {least}, got {value}")


def _read(kind: RecipeKind, source: str | Path | Mapping[str, Any] | None) -> DictConfig | ListConfig:
    if source is None or isinstance(source, Mapping):
        return OmegaConf.create(dict(source or {}))
    if str(source) in recipe_names(kind):
        return OmegaConf.create((RECIPES / kind / f"{source}.yaml").read_text(encoding="utf-8"))
    if not Path(source).is_file():
        raise ConfigError(
            f"{source} is neither a file nor one of the recipes {', '.join(recipe_names(kind))}"
        )
    return OmegaConf.load(source)


def _takes_float(hint: object) -> bool:
    options = get_args(hint) or (hint,)
    return float in options and int not in options
