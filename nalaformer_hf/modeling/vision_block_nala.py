"""Stem, blocks and stages of the vision family. Images are (B, Y, X, C): channels last.

Letters in shapes: B batch, Y rows, X columns, C channels.
"""

from __future__ import annotations

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .configuration_nala_vision import NaLaVisionConfig
from .linear_nala import NaLaLinear, linear_gelu
from .vision_attention_nala import NaLaVisionAttention
from .vision_convolution_nala import NaLaDepthwiseConv
from .vision_pieces_nala import is_cut, map_pieces, piece_tokens, row_pieces
from .vision_rotary_nala import AxialTables, NaLaVisionRotary


class NaLaVisionBatchNorm(nn.BatchNorm2d):
    """BatchNorm that says in words what it cannot do."""

    def _check_input_dim(self, input: Tensor) -> None:
        super()._check_input_dim(input)
        if self.training and input.numel() == input.shape[1]:
            raise ValueError(
                "pixel_values: in training mode BatchNorm needs more than one value a channel, got one image "
                "whose last feature map is 1x1; take a larger batch or image, or model.eval()."
            )


class NaLaVisionStem(nn.Module):
    """Pixels (B, channels, height, width) to (B, ⌈height / 4⌉, ⌈width / 4⌉, C)."""

    def __init__(self, config: NaLaVisionConfig):
        super().__init__()
        channels, width = config.num_channels, config.hidden_sizes[0]
        self.is_patch = config.stem == "patch"
        if self.is_patch:
            self.proj = nn.Sequential(nn.Conv2d(channels, width, 4, stride=4), NaLaVisionBatchNorm(width))
            return
        half = width // 2
        self.proj = nn.Sequential(
            nn.Conv2d(channels, half, 3, stride=2, padding=1),
            NaLaVisionBatchNorm(half),
            nn.GELU(),
            nn.Conv2d(half, half, 3, padding=1),
            NaLaVisionBatchNorm(half),
            nn.GELU(),
            nn.Conv2d(half, half, 3, padding=1),
            NaLaVisionBatchNorm(half),
            nn.GELU(),
            nn.Conv2d(half, width, 3, stride=2, padding=1),
            NaLaVisionBatchNorm(width),
        )

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Embeds the image; a patch stem fills the last patches up with zeros."""
        if self.is_patch:
            height, width = pixel_values.shape[2:]
            pixel_values = F.pad(pixel_values, (0, -width % 4, 0, -height % 4))
        x = self.proj(pixel_values.contiguous(memory_format=torch.channels_last))
        return x.permute(0, 2, 3, 1)


class NaLaVisionFeedForward(nn.Module):
    """fc1, GELU, x + depthwise 3×3 convolution of x, fc2."""

    def __init__(self, width: int, inner: int):
        super().__init__()
        self.fc1 = NaLaLinear(width, inner)
        self.dwconv = NaLaDepthwiseConv(inner, 3, residual=True)
        self.fc2 = NaLaLinear(inner, width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, Y, X, C) to the same."""
        if not is_cut(self, x):
            return self.fc2(self._inner(x))
        return map_pieces(partial(self._piece, x), x, row_pieces(x, piece_tokens(self.fc1.out_features)))

    def _inner(self, x: Tensor) -> Tensor:
        return self.dwconv(linear_gelu(self.fc1, x))

    def _piece(self, x: Tensor, images: slice, rows: slice) -> Tensor:
        """Some rows of some images; the convolution reads a row beyond them."""
        start = max(rows.start - 1, 0)
        inner = self._inner(x[images, start : rows.stop + 1])
        return self.fc2(inner[:, rows.start - start : rows.stop - start])


class NaLaVisionBlock(GradientCheckpointingLayer):
    """x += cpe1(x); x += γ1 attn(norm1(x)); x += cpe2(x); x += γ2 ffn(norm2(x))."""

    def __init__(self, config: NaLaVisionConfig, stage: int, drop_path_rate: float):
        super().__init__()
        width = config.hidden_sizes[stage]
        self.drop_path_rate = drop_path_rate
        self.norm1 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.attn = NaLaVisionAttention(config, stage)
        self.norm2 = nn.LayerNorm(width, eps=config.layer_norm_eps)
        self.ffn = NaLaVisionFeedForward(width, config.inner_size(stage))
        self.cpe1 = NaLaDepthwiseConv(width, 3, residual=True) if config.use_cpe else nn.Identity()
        self.cpe2 = NaLaDepthwiseConv(width, 3, residual=True) if config.use_cpe else nn.Identity()
        self.layer_scale1 = self.layer_scale2 = None
        if config.layer_scale_init_values is not None:
            self.layer_scale_init_value = config.layer_scale_init_values[stage]
            self.layer_scale1 = nn.Parameter(torch.full((width,), float(self.layer_scale_init_value)))
            self.layer_scale2 = nn.Parameter(torch.full((width,), float(self.layer_scale_init_value)))

    def forward(self, hidden_states: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, Y, X, C) to the same."""
        x = self.cpe1(hidden_states)
        x = self._add(x, self.attn(self.norm1(x), tables), self.layer_scale1)
        x = self.cpe2(x)
        return self._add(x, self.ffn(self.norm2(x)), self.layer_scale2)

    def _add(self, x: Tensor, branch: Tensor, scale: Tensor | None) -> Tensor:
        """x + drop_path(scale · branch): in training, whole images skip the branch at the drop path rate."""
        if self.training and self.drop_path_rate > 0:
            keep = 1 - self.drop_path_rate
            kept = branch.new_empty(branch.shape[0], 1, 1, 1).bernoulli_(keep) / keep
            scale = kept if scale is None else scale * kept
        return x + branch if scale is None else torch.addcmul(x, branch, scale)


class NaLaVisionDownsample(nn.Module):
    """Convolution 3×3 with stride 2, BatchNorm."""

    def __init__(self, width: int, out_width: int):
        super().__init__()
        self.reduction = nn.Conv2d(width, out_width, 3, stride=2, padding=1)
        self.norm = NaLaVisionBatchNorm(out_width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, Y, X, C) to (B, ⌈Y / 2⌉, ⌈X / 2⌉, C')."""
        return self.norm(self.reduction(x.permute(0, 3, 1, 2))).permute(0, 2, 3, 1)


class NaLaVisionStage(nn.Module):
    """Blocks of one resolution, and the way down to the next one."""

    def __init__(self, config: NaLaVisionConfig, stage: int, drop_path_rates: list[float]):
        super().__init__()
        width = config.hidden_sizes[stage]
        self.rotary = NaLaVisionRotary(config.head_dim(stage)) if config.use_rotary else None
        self.blocks = nn.ModuleList([NaLaVisionBlock(config, stage, rate) for rate in drop_path_rates])
        is_last = stage == config.num_stages - 1
        self.downsample = None if is_last else NaLaVisionDownsample(width, config.hidden_sizes[stage + 1])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """(B, Y, X, C) to the stage's features (B, Y, X, C) and the next stage's input."""
        tables = None if self.rotary is None else self.rotary(x.shape[1], x.shape[2], x)
        for block in self.blocks:
            x = block(x, tables)
        return x, x if self.downsample is None else self.downsample(x)
