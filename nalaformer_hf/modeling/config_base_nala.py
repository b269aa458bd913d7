"""What the configurations of all NaLa families share: errors in words, presets, the feature maps' fields."""

# No `from __future__ import annotations` here: `strict` checks no field whose annotation is a string.
import dataclasses
import difflib
import functools
import math
from typing import Any, ClassVar, Self

from huggingface_hub.errors import StrictDataclassError
from transformers.configuration_utils import PreTrainedConfig
from transformers.generation.configuration_utils import GenerationConfig

from .feature_maps_nala import FeatureSpec

FEATURE_FORMS = ("cosine", "polarity", "relu", "elu")
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


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """The known words for an error message, the nearest one first."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]!r}? " if close else ""
    return f"{hint}known: {', '.join(known)}"


def plain_errors(config_class: type) -> type:
    """Class decorator: a rejected field raises the ValueError or TypeError behind the library's own error."""
    checked_init = config_class.__init__

    @functools.wraps(checked_init)
    def init(self, *args, **kwargs):
        try:
            checked_init(self, *args, **kwargs)
        except StrictDataclassError as error:
            cause = error.__cause__
            if isinstance(cause, (ValueError, TypeError)):
                raise type(cause)(str(cause)) from error
            raise

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
        super().__post_init__(**kwargs)

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

    def _validate_at_least_one(self, *fields: str) -> None:
        """Checks fields that count something."""
        for field in fields:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} must be at least 1, got {getattr(self, field)}.")

    def _validate_features(self) -> None:
        fields: Any = self
        if isinstance(fields.norm_scale, str) and fields.norm_scale != "rsqrt_dim":
            raise ValueError(f"norm_scale must be a number or 'rsqrt_dim', got {fields.norm_scale!r}.")
        if not isinstance(fields.norm_scale, str) and not 0 <= fields.norm_scale < math.inf:
            raise ValueError(f"norm_scale must be finite and not negative, got {fields.norm_scale}.")
        for field in ("feature_power", "feature_tau", "feature_gain"):
            if not 0 < getattr(self, field) < math.inf:
                raise ValueError(f"{field} must be finite and positive, got {getattr(self, field)}.")
        if fields.feature_form in ("cosine", "polarity") and fields.feature_power * fields.feature_tau < 1:
            raise ValueError(
                f"feature_power * feature_tau must be at least 1 (the gradient of |d|^p is unbounded below "
                f"that), got {fields.feature_power} * {fields.feature_tau}."
            )
