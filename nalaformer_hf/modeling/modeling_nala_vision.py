"""The NaLa vision models: a hierarchy of stages, alone, as a backbone, and with a classification head.

Letters in shapes: B batch, C channels, Y rows, X columns.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import initialization as init
from transformers.backbone_utils import BackboneMixin
from transformers.modeling_outputs import (
    BackboneOutput,
    BaseModelOutputWithPoolingAndNoAttention,
    ImageClassifierOutputWithNoAttention,
)
from transformers.utils.generic import can_return_tuple

from .configuration_nala_vision import NaLaVisionConfig
from .hub_nala import HubModel
from .hub_vision_nala import VISION_FAMILY, write_preprocessor
from .inputs_nala import check_keywords
from .linear_nala import NaLaLinear
from .vision_block_nala import (
    NaLaVisionBatchNorm,
    NaLaVisionBlock,
    NaLaVisionStage,
    NaLaVisionStem,
)


class NaLaVisionHead(NaLaLinear):
    """The classifier's last linear: a 1×1 convolution in the published code, and initialised like one."""


class NaLaVisionPreTrainedModel(HubModel):
    """What all vision models share: how weights are made, what the library may do with the model."""

    config: NaLaVisionConfig
    config_class = NaLaVisionConfig
    hub_family = VISION_FAMILY
    base_model_prefix = "model"
    main_input_name = "pixel_values"
    input_modalities = "image"
    supports_gradient_checkpointing = True
    _no_split_modules = ["NaLaVisionBlock"]
    _can_compile_fullgraph = True

    @torch.no_grad()
    def _init_weights(self, module):
        """Published code: convolutions truncated normal with zero bias, linears as torch makes them."""
        if isinstance(module, (nn.Conv2d, NaLaVisionHead)):
            assert module.bias is not None
            init.trunc_normal_(module.weight, std=self.config.initializer_range)
            init.zeros_(module.bias)
        elif isinstance(module, nn.Linear):
            init.kaiming_uniform_(module.weight, a=5**0.5)
            bound = module.in_features**-0.5
            init.uniform_(module.bias, -bound, bound)
        elif isinstance(module, NaLaVisionBlock):
            for scale in (module.layer_scale1, module.layer_scale2):
                if scale is not None:
                    init.constant_(scale, module.layer_scale_init_value)
        else:
            super()._init_weights(module)

    def _write_extras(self, folder) -> None:
        write_preprocessor(self.config, folder)


def check_pixels(pixel_values: Any, num_channels: int, check_finite: bool) -> None:
    """Checks a batch of images (B, num_channels, height, width).

    Raises:
        TypeError: If it is no floating-point tensor.
        ValueError: If its shape is another, it is empty, or, with `check_finite`, a pixel is not finite.
    """
    if not isinstance(pixel_values, Tensor) or not pixel_values.is_floating_point():
        got = pixel_values.dtype if isinstance(pixel_values, Tensor) else type(pixel_values).__name__
        raise TypeError(f"pixel_values must be a floating-point tensor, got {got}.")
    shape = tuple(pixel_values.shape)
    if len(shape) != 4 or shape[1] != num_channels:
        raise ValueError(f"pixel_values must be (batch, {num_channels}, height, width), got {shape}.")
    if 0 in shape:
        raise ValueError(f"pixel_values must hold at least one image with at least one pixel, got {shape}.")
    if check_finite and not pixel_values.isfinite().all():
        image, channel, row, column = (~pixel_values.isfinite()).nonzero()[0].tolist()
        raise ValueError(
            f"pixel_values must be finite, got {pixel_values[image, channel, row, column].item()} in image "
            f"{image}, channel {channel}, row {row}, column {column}."
        )


class NaLaVisionModel(NaLaVisionPreTrainedModel):
    """Stem and stages: features without a head."""

    _auto_class = "AutoModel"

    def __init__(self, config: NaLaVisionConfig):
        super().__init__(config)
        self.patch_embed = NaLaVisionStem(config)
        last = max(sum(config.depths) - 1, 1)
        rates = [config.drop_path_rate * i / last for i in range(sum(config.depths))]
        starts = [sum(config.depths[:i]) for i in range(config.num_stages)]
        self.layers = nn.ModuleList(
            [
                NaLaVisionStage(config, i, rates[start : start + config.depths[i]])
                for i, start in enumerate(starts)
            ]
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        check_finite: bool = False,
        **kwargs: Any,
    ) -> BaseModelOutputWithPoolingAndNoAttention:
        """Features of images of any size.

        Args:
            pixel_values: (B, num_channels, height, width).
            output_hidden_states: Also give the outputs of the stem and of each stage, (B, C, Y, X) at strides
                4, 4, 8, 16, 32; None: as the config says.
            check_finite: Refuse images with a pixel that is not finite, and say which.
            **kwargs: Those of `transformers.utils.TransformersKwargs`.

        Returns:
            The last stage's features (B, C, ⌈height / 32⌉, ⌈width / 32⌉), and their mean (B, C).

        Raises:
            TypeError: If `pixel_values` is no floating-point tensor, or for an unknown keyword.
            ValueError: If the images have another number of channels, are empty, or not finite when asked;
                in training mode, if one image leaves a 1×1 feature map, which BatchNorm cannot take.
        """
        check_keywords(kwargs)
        check_pixels(pixel_values, self.config.num_channels, check_finite)
        if kwargs.get("output_attentions"):
            raise ValueError("output_attentions: the vision models give no attention weights, got True.")
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        x = self.patch_embed(pixel_values.to(self.dtype))
        outputs = [x] if output_hidden_states else []
        for stage in self.layers:
            features, x = stage(x)
            if output_hidden_states:
                outputs.append(features)
        return BaseModelOutputWithPoolingAndNoAttention(
            last_hidden_state=x.permute(0, 3, 1, 2),
            pooler_output=x.mean((1, 2)),
            hidden_states=tuple(y.permute(0, 3, 1, 2) for y in outputs) if output_hidden_states else None,
        )


class NaLaBackbone(BackboneMixin, NaLaVisionPreTrainedModel):
    """Feature maps of the stages in `config.out_features`, each through a LayerNorm of its own.

    For detection and segmentation heads; the weights of a classifier load into it.
    """

    _auto_class = "AutoBackbone"
    has_attentions = False

    def __init__(self, config: NaLaVisionConfig):
        super().__init__(config)
        self.model = NaLaVisionModel(config)
        self.num_features = [config.hidden_sizes[0], *config.hidden_sizes]
        self.hidden_states_norms = nn.ModuleDict(
            {
                stage: nn.LayerNorm(channels, eps=config.layer_norm_eps)
                for stage, channels in zip(self.out_features, self.channels, strict=True)
            }
        )
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        output_hidden_states: bool | None = None,
        check_finite: bool = False,
        **kwargs: Any,
    ) -> BackboneOutput:
        """Feature maps (B, C, Y, X) at strides 4, 8, 16, 32 ("stage1" ...), those of `out_features`.

        Args:
            pixel_values: As for `NaLaVisionModel.forward`, like all arguments.
            output_hidden_states: Also give the outputs of the stem and of each stage, without norm.
            check_finite: Refuse images with a pixel that is not finite.
            **kwargs: Those of `transformers.utils.TransformersKwargs`.
        """
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        outputs = self.model(pixel_values, output_hidden_states=True, check_finite=check_finite, **kwargs)
        feature_maps = [
            self.hidden_states_norms[name](features.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
            for name, features in zip(self.stage_names, outputs.hidden_states, strict=True)
            if name in self.out_features
        ]
        return BackboneOutput(
            feature_maps=tuple(feature_maps),
            hidden_states=outputs.hidden_states if output_hidden_states else None,
        )


class NaLaForImageClassification(NaLaVisionPreTrainedModel):
    """`NaLaVisionModel` with the published head: projection, BatchNorm, SiLU, average pool, linear."""

    _auto_class = "AutoModelForImageClassification"
    accepts_loss_kwargs = False  # its losses are means over images, so the Trainer must scale them itself

    def __init__(self, config: NaLaVisionConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = NaLaVisionModel(config)
        width = config.hidden_sizes[-1]
        if config.projection_dim is not None:
            self.proj = NaLaLinear(width, config.projection_dim)
            self.norm = NaLaVisionBatchNorm(config.projection_dim)
            width = config.projection_dim
        self.head = NaLaVisionHead(width, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        pixel_values: Tensor,
        labels: Tensor | None = None,
        output_hidden_states: bool | None = None,
        check_finite: bool = False,
        **kwargs: Any,
    ) -> ImageClassifierOutputWithNoAttention:
        """Logits of the labels (B, num_labels), and the loss against `labels`.

        Args:
            pixel_values: As for `NaLaVisionModel.forward`, like all arguments not listed here.
            labels: (B,) classes or numbers, or (B, num_labels).
            output_hidden_states: Also give the outputs of the stem and of each stage.
            check_finite: Refuse images with a pixel that is not finite.
            **kwargs: Those of `transformers.utils.TransformersKwargs`.
        """
        outputs = self.model(
            pixel_values, output_hidden_states=output_hidden_states, check_finite=check_finite, **kwargs
        )
        logits = self.head(self.forward_features(outputs))
        loss = None
        if labels is not None:
            loss = self.loss_function(labels=labels, pooled_logits=logits, config=self.config)
        return ImageClassifierOutputWithNoAttention(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states
        )

    def forward_features(self, outputs: BaseModelOutputWithPoolingAndNoAttention) -> Tensor:
        """What the last linear reads (B, projection_dim), from the outputs of `self.model`."""
        assert outputs.last_hidden_state is not None
        assert outputs.pooler_output is not None
        if self.config.projection_dim is None:
            return outputs.pooler_output
        x = self.proj(outputs.last_hidden_state.permute(0, 2, 3, 1))
        return F.silu(self.norm(x.permute(0, 3, 1, 2))).mean((2, 3))
