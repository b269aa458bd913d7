"""NaLa attention inside timm's DeiT-T and Swin-T, for the paper's drop-in comparison and its ablation.

The replacement keeps the projections of the attention that it replaces and nothing else: no gate, no norm, no
convolution. What differs between two rows is the feature map alone. This needs timm.

Letters in shapes: B images or windows, N tokens, C channels, H heads, D head dim.
"""

# No `from __future__ import annotations` here: `strict` checks no field whose annotation is a string.
from typing import Any, cast

import timm
import torch
from huggingface_hub.dataclasses import strict
from timm.layers.attention import Attention
from timm.models.swin_transformer import SwinTransformer, WindowAttention
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_outputs import ImageClassifierOutputWithNoAttention
from transformers.utils.generic import can_return_tuple, maybe_autocast

from nalaformer_hf.modeling.config_base_nala import AT_LEAST_ONE, RATE, NaLaBaseConfig, plain_errors
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec, upcast
from nalaformer_hf.modeling.inputs_nala import check_keywords
from nalaformer_hf.modeling.modeling_nala_vision import check_pixels
from nalaformer_hf.modeling.vision_linear_nala import vision_linear_attention
from nalaformer_hf.modeling.vision_rotary_nala import NaLaVisionRotary

ARCHITECTURES = {"deit_tiny": "deit_tiny_patch16_224", "swin_tiny": "swin_tiny_patch4_window7_224"}
LINEAR_SWIN_STAGES, LINEAR_SWIN_WINDOW = 2, (56, 56)
POWER = 3.0
# The rows of the ablation, each with one thing more than the row before. A constant power is λτ = 3.
ROWS = {
    "relu": FeatureSpec("relu", POWER, 1.0, norm_scale=0.0),
    "cosine": FeatureSpec("cosine", POWER, 1.0, norm_scale=0.0),
    "norm_aware": FeatureSpec("cosine", POWER, 0.5, norm_scale=1.0),
}
ATTENTIONS = ("softmax", *ROWS)


@plain_errors
@strict
class NaLaDropInConfig(NaLaBaseConfig):
    """Configuration of timm's DeiT-T or Swin-T with another attention.

    Args:
        architecture: "deit_tiny", or "swin_tiny", whose stages 1 and 2 become linear with a window of 56.
        attention: "softmax" (timm's own model), "relu" (ReLU(q)³, ReLU(k)³), "cosine" (Eq. 16 with the
            constant power 3) or "norm_aware" (Eq. 16 with the power of Eq. 8).
        image_size: Height and width of the images.
        num_channels: Their channels.
        drop_path_rate: Rate of the last block.
        training_facts: How the weights were trained, name to value.

    Raises:
        ValueError: If a field is out of range; the message names it.
    """

    model_type = "nala_dropin"

    architecture: str = "deit_tiny"
    attention: str = "norm_aware"
    image_size: int = 224
    num_channels: int = 3
    drop_path_rate: float | int = 0.1
    training_facts: dict | None = None

    def validate_architecture(self):
        """Checks each field's range."""
        self._validate_choices(architecture=tuple(ARCHITECTURES), attention=ATTENTIONS)
        self._validate_numbers(AT_LEAST_ONE, "image_size", "num_channels")
        self._validate_numbers(RATE, "drop_path_rate")
        stride = 16 if self.architecture == "deit_tiny" else 32
        if self.image_size % stride:
            raise ValueError(
                f"image_size must be a multiple of {stride} for {self.architecture}, got {self.image_size}."
            )


class NaLaDropInAttention(nn.Module):
    """Linear attention with the projections `qkv` and `proj` of the timm attention that it replaces.

    Each token reads all tokens of its image or window: o = φ_q(q)·S / (φ_q(q)·z + ε). Swin's windows get the
    2-D rotary embedding in place of the relative position bias. DeiT gets none: its class token has no
    position, and its other tokens have learned ones.

    Args:
        replaced: timm's `Attention` or `WindowAttention`, whose projections are taken over.
        spec: The feature maps.
    """

    def __init__(self, replaced: Attention | WindowAttention, spec: FeatureSpec):
        super().__init__()
        self.qkv, self.proj = replaced.qkv, replaced.proj
        self.num_heads, self.spec = replaced.num_heads, spec
        self.rotary = self.window_size = None
        if isinstance(replaced, WindowAttention):
            self.rotary = NaLaVisionRotary(replaced.dim // replaced.num_heads)
            self.window_size = replaced.window_size

    def set_window_size(self, window_size: tuple[int, int]) -> None:
        """Take windows of another size; timm's blocks call it."""
        self.window_size = window_size

    def forward(
        self, x: Tensor, mask: Tensor | None = None, attn_mask: Tensor | None = None, is_causal: bool = False
    ) -> Tensor:
        """(B, N, C) to the same.

        Raises:
            ValueError: If there is a mask, which linear attention to all tokens cannot take.
        """
        if mask is not None or attn_mask is not None or is_causal:
            raise ValueError("mask: linear attention inside timm's blocks takes no mask, got one.")
        q, k, v = self.qkv(x).unflatten(-1, (3, self.num_heads, -1)).unbind(2)
        with maybe_autocast(x.device.type, enabled=False):
            q, k, v = upcast(q), upcast(k), upcast(v)
            if self.spec.form == "relu":
                q, k = q.relu() ** self.spec.power, k.relu() ** self.spec.power
            tables = None
            if self.rotary is not None:
                assert self.window_size is not None
                tables = self.rotary(*self.window_size, q)
            o = vision_linear_attention(q, k, v, self.spec, tables)
        return self.proj(o.flatten(2).to(x.dtype))


def replace_attention(network: nn.Module, attention: str) -> None:
    """Put NaLa attention in the place of softmax, in a timm DeiT or in stages 1 and 2 of a timm Swin.

    Args:
        network: The model, changed in place.
        attention: One of `ROWS`.

    Raises:
        ValueError: There is no such row.
    """
    if attention not in ROWS:
        raise ValueError(f"attention must be one of {', '.join(ROWS)}, got {attention!r}.")
    spec, parts = ROWS[attention], cast("Any", network)
    if not isinstance(network, SwinTransformer):
        for block in parts.blocks:
            block.attn = NaLaDropInAttention(block.attn, spec)
        return
    for block in (block for stage in parts.layers[:LINEAR_SWIN_STAGES] for block in stage.blocks):
        block.attn = NaLaDropInAttention(block.attn, spec)
        block.target_shift_size = (0, 0)  # what a shift would mask out, linear attention cannot
        block.set_input_size(block.input_resolution, LINEAR_SWIN_WINDOW)


class NaLaDropInForImageClassification(PreTrainedModel):
    """timm's DeiT-T or Swin-T with the attention that the configuration names."""

    config: NaLaDropInConfig
    config_class = NaLaDropInConfig
    base_model_prefix = "network"
    main_input_name = "pixel_values"
    input_modalities = "image"
    accepts_loss_kwargs = False  # its losses are means over images, so the Trainer must scale them itself

    def __init__(self, config: NaLaDropInConfig):
        super().__init__(config)
        self.network = timm.create_model(
            ARCHITECTURES[config.architecture],
            img_size=config.image_size,
            in_chans=config.num_channels,
            num_classes=config.num_labels,
            drop_path_rate=config.drop_path_rate,
        )
        if config.attention != "softmax":
            replace_attention(self.network, config.attention)
        self.post_init()

    @torch.no_grad()
    def _init_weights(self, module):
        """As timm: linears truncated normal with zero bias; what has its own way keeps it."""
        if isinstance(module, nn.Linear):
            init.trunc_normal_(module.weight, std=0.02)
            if module.bias is not None:
                init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm):
            init.ones_(module.weight)
            init.zeros_(module.bias)
        elif callable(refill := getattr(module, "init_non_persistent_buffers", None)):
            refill()

    @can_return_tuple
    def forward(
        self, pixel_values: Tensor, labels: Tensor | None = None, **kwargs: Any
    ) -> ImageClassifierOutputWithNoAttention:
        """Logits of the labels (B, num_labels), and the loss against `labels`.

        Args:
            pixel_values: (B, num_channels, image_size, image_size).
            labels: (B,) classes.
            **kwargs: Those of `transformers.utils.TransformersKwargs`.

        Raises:
            TypeError: If `pixel_values` is no floating-point tensor, or for an unknown keyword.
            ValueError: If the images have another shape.
        """
        check_keywords(kwargs)
        check_pixels(pixel_values, self.config.num_channels, check_finite=False)
        size = self.config.image_size
        if pixel_values.shape[-2:] != (size, size):
            raise ValueError(
                f"pixel_values must be images of {size}x{size}, got {tuple(pixel_values.shape)}."
            )
        logits = self.network(pixel_values)
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return ImageClassifierOutputWithNoAttention(loss=loss, logits=logits)


def register_dropins() -> None:
    """Make the models known to the Auto classes, under the model type "nala_dropin"."""
    AutoConfig.register(NaLaDropInConfig.model_type, NaLaDropInConfig, exist_ok=True)
    AutoModelForImageClassification.register(
        NaLaDropInConfig, NaLaDropInForImageClassification, exist_ok=True
    )


__all__ = [
    "NaLaDropInAttention",
    "NaLaDropInConfig",
    "NaLaDropInForImageClassification",
    "register_dropins",
    "replace_attention",
]
