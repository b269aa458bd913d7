"""Configuration of the NaLa vision family, its checks and its presets."""

# No `from __future__ import annotations` here: `strict` checks no field whose annotation is a string.
import dataclasses
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers.backbone_utils import BackboneConfigMixin

from .config_base_nala import (
    AT_LEAST_ONE,
    FEATURE_FORMS,
    FINITE,
    NOT_NEGATIVE,
    POSITIVE,
    RATE,
    NaLaBaseConfig,
    nearest,
    plain_errors,
)
from .feature_maps_nala import FeatureSpec

MIXERS = ("linear", "softmax")
STEMS = ("conv", "patch")

# The published variants: the paper's names and sizes, for the 1,000 classes of ImageNet.
VISION_PRESETS: dict[str, dict[str, Any]] = {
    "xt": {
        "hidden_sizes": [32, 64, 128, 384],
        "depths": [2, 2, 2, 2],
        "num_attention_heads": [1, 2, 4, 12],
        "mlp_ratios": [3.5] * 4,
        "layer_scale_init_values": [1.0] * 4,
        "drop_path_rate": 0.1,
        "num_labels": 1000,
    },
    "t": {
        "hidden_sizes": [64, 128, 256, 512],
        "depths": [2, 2, 6, 2],
        "num_attention_heads": [1, 2, 4, 8],
        "mlp_ratios": [4.0] * 4,
        "layer_scale_init_values": [1.0] * 4,
        "drop_path_rate": 0.1,
        "num_labels": 1000,
    },
    "s": {
        "hidden_sizes": [64, 128, 320, 512],
        "depths": [3, 5, 9, 3],
        "num_attention_heads": [1, 2, 5, 8],
        "mlp_ratios": [3.5] * 4,
        "layer_scale_init_values": [1.0] * 4,
        "drop_path_rate": 0.15,
        "num_labels": 1000,
    },
    "b": {
        "hidden_sizes": [96, 192, 384, 512],
        "depths": [4, 6, 12, 6],
        "num_attention_heads": [1, 2, 6, 8],
        "mlp_ratios": [4.0] * 4,
        "layer_scale_init_values": [1.0, 1.0, 1e-6, 1e-6],
        "drop_path_rate": 0.4,
        "num_labels": 1000,
    },
    "l": {
        "hidden_sizes": [96, 192, 448, 640],
        "depths": [4, 7, 19, 8],
        "num_attention_heads": [1, 2, 7, 10],
        "mlp_ratios": [3.5] * 4,
        "layer_scale_init_values": [1e-6] * 4,
        "drop_path_rate": 0.55,
        "num_labels": 1000,
    },
}


def _default(values: list) -> Any:
    """A list as a field's default."""
    return dataclasses.field(default_factory=values.copy)


@plain_errors
@strict
class NaLaVisionConfig(BackboneConfigMixin, NaLaBaseConfig):
    r"""Configuration of a NaLa vision model (arXiv 2506.21137): a hierarchy of stages, strides 4, 8, 16, 32.

    The defaults are the preset "xt" but for the number of classes. Lists have one entry a stage.

    Args:
        num_channels: Channels of the image.
        image_size: Height and width that the image processor crops to; the model takes any.
        hidden_sizes: Channels C of each stage.
        depths: Blocks of each stage.
        num_attention_heads: Heads of each stage.
        mlp_ratios: Inner width of the feed-forward networks, as a multiple of C.
        mixers: "linear" (NaLa attention) or "softmax".
        stem: "conv" (four convolutions) or "patch" (one, 4×4 with stride 4).
        projection_dim: Width of the projection head; None: pool the last stage without one.
        layer_scale_init_values: Initial LayerScale; None: no LayerScale.
        drop_path_rate: Rate of the last block; it grows linearly from 0 over all blocks.
        feature_form: "polarity" (published code), "cosine" (Eq. 16); "relu" and "elu" are baselines.
        feature_power, feature_tau: λ and τ of the query power λ (τ + tanh(s ||q||)); λτ must be at least 1.
        feature_gain: α of the cosine form's angle (π/4) tanh(α x).
        norm_scale: s, a number (the paper: 1) or "rsqrt_dim" (1/√head_dim). 0 fixes the power at λτ.
        use_rotary: 2-D rotary embedding.
        use_cpe: Depthwise 3×3 convolutions before the mixer and before the feed-forward network.
        use_lepe: Depthwise 5×5 convolution of the values, added to the mixer's output.
        use_output_gate: Gate the normalised output by SiLU of a projection of the block's input.
        layer_norm_eps: ε of the blocks' two LayerNorms.
        initializer_range: Standard deviation of the convolutions' weights.
        training_facts: How the weights were trained, name to value, for the model card.
        out_features, out_indices: Stages that the backbone gives, of "stem", "stage1", ...

    Raises:
        ValueError: If fields contradict each other; the message names them.
    """

    model_type = "nala_vision"
    _presets = VISION_PRESETS
    _saved_names = ("out_features", "out_indices", "stage_names")

    num_channels: int = 3
    image_size: int = 224
    hidden_sizes: list[int] = _default(VISION_PRESETS["xt"]["hidden_sizes"])
    depths: list[int] = _default(VISION_PRESETS["xt"]["depths"])
    num_attention_heads: list[int] = _default(VISION_PRESETS["xt"]["num_attention_heads"])
    mlp_ratios: list[float | int] = _default(VISION_PRESETS["xt"]["mlp_ratios"])
    mixers: list[str] = _default(["linear", "linear", "softmax", "softmax"])
    stem: str = "conv"
    projection_dim: int | None = 1024
    layer_scale_init_values: list[float | int] | None = _default([1.0] * 4)
    drop_path_rate: float | int = VISION_PRESETS["xt"]["drop_path_rate"]
    feature_form: str = "polarity"
    feature_power: float | int = 3.0
    feature_tau: float | int = 0.5
    feature_gain: float | int = 20.0
    norm_scale: float | int | str = 1.0
    use_rotary: bool = True
    use_cpe: bool = True
    use_lepe: bool = True
    use_output_gate: bool = True
    layer_norm_eps: float | int = 1e-6
    initializer_range: float | int = 0.02
    training_facts: dict | None = None
    _out_features: list[str] | None = None
    _out_indices: list[int] | None = None

    def __post_init__(self, **kwargs):
        kwargs.pop("stage_names", None)
        out_features, out_indices = kwargs.pop("out_features", None), kwargs.pop("out_indices", None)
        self.stage_names = ["stem", *(f"stage{i + 1}" for i in range(len(self.depths)))]
        super().__post_init__(**kwargs)
        self.set_output_features_output_indices(out_features=out_features, out_indices=out_indices)

    @property
    def num_stages(self) -> int:
        """Number of stages."""
        return len(self.hidden_sizes)

    def head_dim(self, stage: int) -> int:
        """Width of a head in a stage."""
        return self.hidden_sizes[stage] // self.num_attention_heads[stage]

    def inner_size(self, stage: int) -> int:
        """Inner width of a stage's feed-forward networks."""
        return int(self.hidden_sizes[stage] * self.mlp_ratios[stage])

    def feature_spec(self, stage: int) -> FeatureSpec:
        """The feature maps' form and constants in a stage, `norm_scale` resolved to a number."""
        return self._feature_spec(self.head_dim(stage))

    def validate_architecture(self):
        """Checks each field's range and what fields demand of each other."""
        self._validate_choices(stem=STEMS, feature_form=FEATURE_FORMS)
        sizes = ("num_channels", "image_size", "projection_dim")
        self._validate_numbers(AT_LEAST_ONE, *sizes, "hidden_sizes", "depths", "num_attention_heads")
        self._validate_numbers(POSITIVE, "mlp_ratios", "layer_norm_eps")
        self._validate_numbers(FINITE, "layer_scale_init_values")
        self._validate_numbers(NOT_NEGATIVE, "initializer_range")
        self._validate_numbers(RATE, "drop_path_rate")
        self._validate_stages()
        self._validate_features()

    def _validate_stages(self):
        if not self.hidden_sizes:
            raise ValueError("hidden_sizes must have one entry a stage, got none.")
        for field in ("depths", "num_attention_heads", "mlp_ratios", "mixers", "layer_scale_init_values"):
            values = getattr(self, field)
            if values is not None and len(values) != self.num_stages:
                raise ValueError(
                    f"{field} must have one entry a stage, {self.num_stages} like hidden_sizes, got {values}."
                )
        for stage, mixer in enumerate(self.mixers):
            if mixer not in MIXERS:
                raise ValueError(f"mixers: got {mixer!r}; {nearest(mixer, MIXERS)}")
            self._validate_stage(stage)
        if self.stem == "conv" and self.hidden_sizes[0] % 2:
            raise ValueError(
                f"hidden_sizes: the 'conv' stem needs an even first width, got {self.hidden_sizes[0]}."
            )

    def _validate_stage(self, stage: int):
        width, num_heads = self.hidden_sizes[stage], self.num_attention_heads[stage]
        if width % num_heads:
            raise ValueError(
                f"hidden_sizes must be multiples of num_attention_heads, got {width} with {num_heads} heads."
            )
        if self.use_rotary and width // num_heads % 4:
            raise ValueError(
                f"hidden_sizes: the 2-D rotary embedding needs a head dim divisible by 4, got {width} / "
                f"{num_heads} = {width // num_heads}; change the heads or set use_rotary=False."
            )
        if self.inner_size(stage) < 1:
            raise ValueError(f"mlp_ratios: the inner width must be at least 1, got {self.mlp_ratios[stage]}.")


__all__ = ["NaLaVisionConfig"]
