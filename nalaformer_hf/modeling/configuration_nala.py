"""Configuration of the NaLa language model, its checks and its presets."""

# No `from __future__ import annotations` here: `strict` checks no field whose annotation is a string.
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers.activations import ACT2FN
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS, RopeParameters

from .config_base_nala import (
    AT_LEAST_ONE,
    FEATURE_FORMS,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    NaLaBaseConfig,
    nearest,
    plain_errors,
)
from .feature_maps_nala import FeatureSpec

MIXERS = ("linear", "delta", "gated_delta")
LAYER_TYPES = ("nala_attention", "full_attention")
OUTPUT_NORMS = ("layer_norm", "head_rms_norm", "none")
ROPE_TYPES = ("default", *ROPE_INIT_FUNCTIONS)
# Features are twice as wide as heads; flash-linear-attention's delta-rule kernels stop at a key width of 256.
MAX_DELTA_KEY_WIDTH = 256

# The paper's models, so with its norm_scale.
_SIZE_340M: dict[str, Any] = {
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "vocab_size": 32000,
    "norm_scale": 1.0,
}
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": {
        "hidden_size": 256,
        "intermediate_size": 704,
        "vocab_size": 4096,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "tie_word_embeddings": True,
    },
    "small": {
        "hidden_size": 512,
        "intermediate_size": 1408,
        "vocab_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 8,
    },
    "340m-linear": {**_SIZE_340M, "num_hidden_layers": 24, "num_attention_heads": 8, "mixer": "linear"},
    "340m-deltanet": {
        **_SIZE_340M,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "mixer": "delta",
        "use_output_gate": False,
        "use_short_conv": False,
    },
    "340m-deltanet-conv": {
        **_SIZE_340M,
        "num_hidden_layers": 24,
        "num_attention_heads": 8,
        "mixer": "delta",
        "use_output_gate": False,
        "use_short_conv": True,
    },
    "340m-gated-deltanet": {
        **_SIZE_340M,
        "num_hidden_layers": 21,
        "num_attention_heads": 6,
        "head_dim": 128,
        "value_head_dim": 256,
        "mixer": "gated_delta",
        "use_output_gate": True,
        "use_short_conv": True,
    },
}


# `layer_types` in a saved config: the Trainer reads that with the base class, which knows no layer of ours.
SAVED_LAYER_TYPES = "nala_layer_types"


@plain_errors
@strict
class NaLaConfig(NaLaBaseConfig):
    r"""Configuration of a NaLa language model (arXiv 2506.21137), decoder or encoder.

    Fields beyond transformers' usual ones:

    Args:
        mixer: "linear" (the paper's attention made causal), "delta" or "gated_delta" (its §4.4, NaLa's maps
            inside DeltaNet and Gated DeltaNet).
        layer_types: "nala_attention" or "full_attention" for each layer; None: all "nala_attention".
        feature_form: "cosine" (Eq. 16), "polarity" (published classification code); "relu" and "elu" are
            baselines.
        feature_power, feature_tau: λ and τ of the query power λ (τ + tanh(s ||q||)); λτ must be at least 1.
        feature_gain: α of the cosine form's angle (π/4) tanh(α x).
        norm_scale: s, a number (the paper: 1) or "rsqrt_dim" (1/√head_dim). 0 fixes the power at λτ.
        head_dim, value_head_dim: Width of a head of q and k, and of v.
        use_rotary: Rotary embedding of the numerator's features, `linear` layers only.
        use_short_conv, conv_size: Causal depthwise convolution on q, k and v.
        use_output_gate: Gate the normalised output by SiLU of a projection of the block's input.
        output_norm: "layer_norm" over all heads, "head_rms_norm" per head, "none"; None: the mixer's own,
            "layer_norm" for `linear` and "head_rms_norm" for the delta mixers.
        is_causal: False makes an encoder (`linear` and full attention only).
        classifier_pooling: "last" or "mean" token for sequence classification.
        chunk_loss: Compute a language model's loss piece by piece of the tokens and return no logits with it:
            less memory, for a third more of the head's products.
        fuse_norm: On a GPU, output norm and gate in one kernel of flash-linear-attention: less memory in
            training.
        training_facts: How the weights were trained, name to value, for the model card.

    `num_key_value_heads`, `attention_bias` and `attention_dropout` concern full attention only; so does
    `rope_parameters`, but for its `rope_theta`, which `use_rotary` takes too.

    Raises:
        ValueError: If fields contradict each other; the message names them.
    """

    model_type = "nala"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache"]
    _presets = PRESETS
    _saved_names = (SAVED_LAYER_TYPES,)
    default_theta = 10000.0

    vocab_size: int = 32000
    hidden_size: int = 1024
    intermediate_size: int = 2816
    num_hidden_layers: int = 24
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    value_head_dim: int | None = None
    mixer: str = "gated_delta"
    layer_types: list[str] | None = None
    feature_form: str = "cosine"
    feature_power: float | int = 3.0
    feature_tau: float | int = 0.5
    feature_gain: float | int = 20.0
    norm_scale: float | int | str = "rsqrt_dim"
    use_rotary: bool = False
    use_short_conv: bool = True
    conv_size: int = 4
    use_output_gate: bool = True
    output_norm: str | None = None
    is_causal: bool = True
    classifier_pooling: str = "last"
    chunk_loss: bool = False
    fuse_norm: bool = False
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    rope_parameters: dict | None = None
    initializer_range: float = 0.02
    rms_norm_eps: float | int = 1e-6
    attention_bias: bool = False
    attention_dropout: float | int = 0.0
    mlp_bias: bool = False
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = 1
    eos_token_id: int | list[int] | None = 2
    tie_word_embeddings: bool = False
    training_facts: dict | None = None

    def __post_init__(self, **kwargs):
        saved_layer_types = kwargs.pop(SAVED_LAYER_TYPES, None)
        if self.head_dim is None:
            if self.num_attention_heads < 1 or self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size must be a multiple of num_attention_heads when head_dim is not given, got "
                    f"hidden_size={self.hidden_size} and num_attention_heads={self.num_attention_heads}."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.value_head_dim is None:
            self.value_head_dim = self.head_dim
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.layer_types is None:
            self.layer_types = saved_layer_types or ["nala_attention"] * self.num_hidden_layers
        if self.output_norm is None:
            self.output_norm = "layer_norm" if self.mixer == "linear" else "head_rms_norm"
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict[str, Any]:
        """As the base class, with `layer_types` under a name of its own."""
        fields = super().to_dict()
        fields[SAVED_LAYER_TYPES] = fields.pop("layer_types")
        return fields

    def _filled(self, field: str) -> Any:
        """A field that may be None to the constructor, and is filled in by it."""
        return getattr(self, field)

    @property
    def feature_spec(self) -> FeatureSpec:
        """The feature maps' form and constants, `norm_scale` resolved to a number."""
        return self._feature_spec(self._filled("head_dim"))

    @property
    def has_recurrent_delta(self) -> bool:
        """Whether some layer keeps a delta-rule state, which cannot be rolled back."""
        return self.mixer != "linear" and "nala_attention" in self._filled("layer_types")

    def validate_layer_type(self):
        """Checks `layer_types` against the two kinds of layer of this family."""
        layer_types = self._filled("layer_types")
        for layer_type in layer_types:
            if layer_type == "linear_attention":
                raise ValueError(
                    "layer_types: 'linear_attention' is another cache's name, use 'nala_attention'."
                )
            if layer_type not in LAYER_TYPES:
                raise ValueError(
                    f"layer_types: no layer type {layer_type!r}; {nearest(layer_type, LAYER_TYPES)}"
                )
        if len(layer_types) != self.num_hidden_layers:
            raise ValueError(
                f"layer_types must have one entry a layer, got {len(layer_types)} entries for "
                f"num_hidden_layers={self.num_hidden_layers}."
            )

    def validate_architecture(self):
        """Checks each field's range and what fields demand of each other."""
        self._validate_choices(
            mixer=MIXERS,
            feature_form=FEATURE_FORMS,
            output_norm=OUTPUT_NORMS,
            classifier_pooling=("last", "mean"),
            hidden_act=tuple(ACT2FN),
        )
        self._validate_sizes()
        self._validate_features()
        self._validate_delta()
        if self.fuse_norm and (self.output_norm == "none" or not self.use_output_gate):
            raise ValueError(
                "fuse_norm needs an output norm and a gate to fuse, got "
                f"output_norm={self.output_norm!r} and use_output_gate={self.use_output_gate}."
            )

    def _validate_sizes(self):
        fields = (
            "vocab_size",
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
        )
        heads = ("num_key_value_heads", "head_dim", "value_head_dim")
        self._validate_numbers(AT_LEAST_ONE, *fields, *heads, "conv_size", "max_position_embeddings")
        self._validate_numbers(POSITIVE, "rms_norm_eps")
        self._validate_numbers(NOT_NEGATIVE, "initializer_range")
        self._validate_numbers(NOT_NEGATIVE, "pad_token_id", "bos_token_id", "eos_token_id")
        self._validate_numbers(RATE, "attention_dropout")
        if "full_attention" not in self._filled("layer_types"):
            return
        head_dim = self._filled("head_dim")
        if head_dim % 2:
            raise ValueError(
                f"head_dim must be even for the rotary embedding of full attention, got {head_dim}."
            )
        if self.num_attention_heads % self._filled("num_key_value_heads"):
            raise ValueError(
                f"num_attention_heads must be a multiple of num_key_value_heads, got "
                f"{self.num_attention_heads} and {self._filled('num_key_value_heads')}."
            )

    def validate_rope(self):
        """Checks `rope_parameters`: its type, keys and numbers, and what `use_rotary` asks of it."""
        parameters = self._filled("rope_parameters")
        rope_type = parameters.get("rope_type", "default")
        if rope_type not in ROPE_TYPES:
            known = nearest(str(rope_type), ROPE_TYPES)
            raise ValueError(f"rope_parameters: no rope_type {rope_type!r}; {known}")
        ignored = {"mrope_section"} | ({"partial_rotary_factor"} if rope_type != "proportional" else set())
        known = tuple(name for name in RopeParameters.__annotations__ if name not in ignored)
        for name, value in parameters.items():
            if name not in known:
                raise ValueError(
                    f"rope_parameters: {rope_type!r} has no {name!r}; {nearest(str(name), known)}"
                )
            if name not in ("rope_type", "truncate") and value is not None:
                _check_rope_numbers(name, value)
        self._validate_rotary()
        if "full_attention" in self._filled("layer_types"):
            try:
                super().validate_rope()
            except KeyError as error:  # a key that this type needs is missing
                raise ValueError(f"rope_parameters: {error.args[0]}") from error

    def _validate_rotary(self):
        if not self.use_rotary:
            return
        if self.mixer != "linear":
            raise ValueError(
                f"use_rotary concerns the 'linear' mixer only, got use_rotary=True with {self.mixer!r}."
            )
        rope_type = self._filled("rope_parameters")["rope_type"]
        if rope_type != "default":
            raise ValueError(f"rope_parameters: use_rotary takes rope_type 'default', got {rope_type!r}.")
        head_dim = self._filled("head_dim")
        if self.feature_spec.width(head_dim) % 2:
            raise ValueError(
                f"head_dim must be even for use_rotary with {self.feature_form!r}, got {head_dim}."
            )

    def _validate_delta(self):
        if self.mixer == "linear":
            return
        if not self.is_causal:
            raise ValueError(f"is_causal=False needs the 'linear' mixer, got mixer={self.mixer!r}.")
        key_width = self.feature_spec.width(self._filled("head_dim"))
        if key_width > MAX_DELTA_KEY_WIDTH:
            raise ValueError(
                f"head_dim: the delta mixers take features up to {MAX_DELTA_KEY_WIDTH} wide, got {key_width} "
                f"from head_dim={self._filled('head_dim')}."
            )


def _check_rope_numbers(name: str, value: Any) -> None:
    """Checks one entry of `rope_parameters`, a number or a list of them."""
    allowed = NOT_NEGATIVE if name.startswith("mscale") else POSITIVE
    takes_list = name in ("short_factor", "long_factor")
    numbers = value if isinstance(value, list) else [value]
    fits = all(type(number) in (int, float) and allowed.holds(number) for number in numbers)
    if not fits or isinstance(value, list) != takes_list:
        kind = "a list, each number " if takes_list else ""
        raise ValueError(f"rope_parameters: {name} must be {kind}{allowed.words}, got {value!r}.")


__all__ = ["NaLaConfig"]
