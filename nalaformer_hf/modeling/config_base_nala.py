"""What the configurations of all NaLa families share: errors in words, presets, the feature maps' fields."""

# No `from __future__ import annotations` here: `strict` checks no field whose annotation is a string.
import dataclasses
import difflib
import functools
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal, NamedTuple, Self

import torch
from huggingface_hub.dataclasses import type_validator
from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from .feature_maps_nala import FeatureSpec

FEATURE_FORMS = ("cosine", "polarity", "relu", "elu")


class Range(NamedTuple):
    """The numbers that a field takes, in words and as a test."""

    words: str
    holds: Callable[[float], bool]


AT_LEAST_ONE = Range("at least 1", lambda x: x >= 1)
FINITE = Range("finite", math.isfinite)
NOT_NEGATIVE = Range("finite and not negative", lambda x: 0 <= x < math.inf)
POSITIVE = Range("finite and positive", lambda x: 0 < x < math.inf)
RATE = Range("in [0, 1)", lambda x: 0 <= x < 1)

# Keywords that the base class takes besides its fields.
_LIBRARY_KEYWORDS = {
    "attn_implementation",
    "auto_map",
    "experts_implementation",
    "is_decoder",
    "model_type",
    "name_or_path",
    "num_labels",
    "output_attentions",
    "per_layer_config",
    "quantization_config",
    "rope_scaling",
    "rope_theta",
    "torch_dtype",
}
# Types of what the base class takes and does not check.
_LIBRARY_TYPES: dict[str, Any] = {
    "num_labels": int | None,
    "id2label": dict[int | str, Any] | None,
    "label2id": dict | None,
    "problem_type": Literal["regression", "single_label_classification", "multi_label_classification"] | None,
    "dtype": str | torch.dtype | None,
    "torch_dtype": str | torch.dtype | None,
    "output_attentions": bool | None,
}


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """The known words for an error message, the nearest one first."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def _names_dtype(word: str) -> bool:
    return isinstance(getattr(torch, word, None), torch.dtype)


def plain_errors(config_class: type) -> type:
    """Class decorator: a rejected field raises the innermost ValueError or TypeError of the library's own."""
    checked_init = config_class.__init__

    @functools.wraps(checked_init)
    def init(self, *args, **kwargs):
        try:
            checked_init(self, *args, **kwargs)
        except StrictDataclassError as error:
            cause: BaseException = error
            while isinstance(cause.__cause__, (ValueError, TypeError)):
                cause = cause.__cause__
            if cause is error:
                raise
            raise type(cause)(str(cause)) from error

    config_class.__init__ = init
    return config_class


class NaLaBaseConfig(PreTrainedConfig):
    """A configuration that refuses unknown keywords, knows presets and has the fields of the feature maps.

    Families declare the fields `feature_form`, `feature_power`, `feature_tau`, `feature_gain` and
    `norm_scale`, each with its own default.
    """

    _auto_class = "AutoConfig"
    _presets: ClassVar[dict[str, dict[str, Any]]] = {}
    # Names that a saved config may have besides its fields.
    _saved_names: ClassVar[tuple[str, ...]] = ()

    def __post_init__(self, **kwargs):
        for keyword in self._foreign(kwargs):
            raise TypeError(
                f"{type(self).__name__} has no field {keyword!r}; {nearest(keyword, self._field_names())}"
            )
        self._check_library_fields(kwargs)
        super().__post_init__(**kwargs)

    def _check_library_fields(self, keywords: dict[str, Any]) -> None:
        """Checks what the base class takes as it comes, and stumbles over or keeps."""
        given = {name: keywords.get(name, vars(self).get(name)) for name in _LIBRARY_TYPES}
        for name, value in given.items():
            type_validator(name, value, _LIBRARY_TYPES[name])
            if name.endswith("dtype") and isinstance(value, str) and not _names_dtype(value):
                raise ValueError(f"{name} must name a dtype of torch, such as 'float32', got {value!r}.")
        labels = given["id2label"]
        if labels is not None and not all(str(number).isdecimal() for number in labels):
            raise ValueError(f"id2label must map numbers to names, got the keys {list(labels)}.")
        counted, count = ("num_labels", given["num_labels"]) if labels is None else ("id2label", len(labels))
        if count is not None and count < 1:
            raise ValueError(f"{counted} must have at least 1 label, got {count}.")

    @classmethod
    def _field_names(cls) -> list[str]:
        return sorted(field.name for field in dataclasses.fields(cls) if not field.name.startswith("_"))

    @classmethod
    def _foreign(cls, keywords: dict[str, Any]) -> list[str]:
        """Keywords that are neither fields nor the library's."""
        known = {*cls._field_names(), *_LIBRARY_KEYWORDS, *GenerationConfig._get_default_generation_params()}
        known.update(cls._saved_names)
        return [keyword for keyword in keywords if keyword not in known and not keyword.startswith("_")]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs):
        """As the base class; what other programs added to a saved config is kept as plain attributes."""
        foreign = {keyword: config_dict[keyword] for keyword in cls._foreign(config_dict)}
        own = {keyword: value for keyword, value in config_dict.items() if keyword not in foreign}
        result = super().from_dict(own, **kwargs)
        config = result[0] if isinstance(result, tuple) else result
        for keyword, value in foreign.items():
            setattr(config, keyword, value)
        return result

    @classmethod
    def from_preset(cls, name: str, **overrides) -> Self:
        """The named preset, with any field overridden.

        Raises:
            ValueError: If there is no preset of that name.
        """
        if name not in cls._presets:
            raise ValueError(f"name: no preset {name!r}; {nearest(name, tuple(cls._presets))}")
        fields = {**cls._presets[name], **overrides}
        if "id2label" in overrides:
            fields.pop("num_labels", None)
        return cls(**fields)

    def _feature_spec(self, head_dim: int) -> FeatureSpec:
        """The feature maps' form and constants, `norm_scale` resolved to a number."""
        fields: Any = self
        scale = head_dim**-0.5 if fields.norm_scale == "rsqrt_dim" else float(fields.norm_scale)
        return FeatureSpec(
            fields.feature_form, fields.feature_power, fields.feature_tau, fields.feature_gain, scale
        )

    def _validate_choices(self, **choices: tuple[str, ...]) -> None:
        """Checks fields that take one of some words."""
        for field, known in choices.items():
            if getattr(self, field) not in known:
                raise ValueError(
                    f"{field}: got {getattr(self, field)!r}; {nearest(getattr(self, field), known)}"
                )

    def _validate_numbers(self, allowed: Range, *fields: str) -> None:
        """Checks fields of one number, or of a list of them; None is left to the field's type."""
        for field in fields:
            value = getattr(self, field)
            numbers = value if isinstance(value, list) else [value]
            if not all(number is None or allowed.holds(number) for number in numbers):
                raise ValueError(f"{field} must be {allowed.words}, got {value}.")

    def _validate_features(self) -> None:
        fields: Any = self
        if not isinstance(fields.norm_scale, str):
            self._validate_numbers(NOT_NEGATIVE, "norm_scale")
        elif fields.norm_scale != "rsqrt_dim":
            raise ValueError(f"norm_scale must be a number or 'rsqrt_dim', got {fields.norm_scale!r}.")
        self._validate_numbers(POSITIVE, "feature_power", "feature_tau", "feature_gain")
        if fields.feature_form in ("cosine", "polarity") and fields.feature_power * fields.feature_tau < 1:
            raise ValueError(
                f"feature_power * feature_tau must be at least 1 (the gradient of |d|^p is unbounded below "
                f"that), got {fields.feature_power} * {fields.feature_tau}."
            )
