"""The attention layer of the vision family.

Letters in shapes: B batch, Y rows, X columns, N = Y X tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from .configuration_nala_vision import NaLaVisionConfig
from .feature_maps_nala import upcast
from .linear_nala import NaLaLinear, is_traced
from .output_norm_nala import OutputLayerNorm
from .vision_convolution_nala import NaLaDepthwiseConv
from .vision_linear_nala import KeySums, read_means, sum_keys, vision_linear_attention
from .vision_rotary_nala import AxialTables, rotate

OUTPUT_NORM_EPS = 1e-5  # published code
# Without gradients, a CPU computes images of so many tokens in blocks of rows: same numbers, less memory.
STREAMED_TOKENS = 1 << 15
BLOCK_TOKENS = 1 << 10
MIN_ROWS = 4  # the convolution reads 4 rows more, so fewer would cost more than they save


class NaLaVisionAttention(nn.Module):
    """One mixer: projection to q, k, v and gate, attention, local enhancement, norm, gate, output projection.

    "linear" stages take NaLa attention, "softmax" ones softmax(rope(q) rope(k)ᵀ / √D) v. The projections and
    the convolution run in the dtype of the weights or of autocast; everything from their output to the norm
    is fp32, with autocast off.

    Args:
        config: A `NaLaVisionConfig`.
        stage: Which of its stages the layer belongs to.
    """

    def __init__(self, config: NaLaVisionConfig, stage: int):
        super().__init__()
        width = config.hidden_sizes[stage]
        self.num_heads = config.num_attention_heads[stage]
        self.mixer = config.mixers[stage]
        self.spec = config.feature_spec(stage)
        self.has_gate = config.use_output_gate
        self.qkvg = NaLaLinear(width, (4 if self.has_gate else 3) * width)
        self.lepe = NaLaDepthwiseConv(width, 5, residual=False) if config.use_lepe else None
        self.ln = OutputLayerNorm(width, eps=OUTPUT_NORM_EPS)
        self.out_proj = NaLaLinear(width, width)

    def forward(self, hidden_states: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, Y, X, C) to the same, with the tables of `NaLaVisionRotary`."""
        if self._is_streamed(hidden_states):
            return self._streamed(hidden_states, tables)
        q, k, v, gate = self._project(hidden_states)
        lepe = None if self.lepe is None else self.lepe(v)
        with maybe_autocast(q.device.type, enabled=False):
            o = self._mix(self._heads(q), self._heads(k), self._heads(v), tables).reshape(hidden_states.shape)
        return self._finish(o, lepe, gate, q.dtype)

    def _is_streamed(self, hidden_states: Tensor) -> bool:
        """Whether the image is large enough to be worth two passes, and nothing is kept for a backward."""
        return (
            self.mixer == "linear"
            and self.spec.form == "polarity"
            and hidden_states.device.type == "cpu"
            and hidden_states.shape[1] * hidden_states.shape[2] >= STREAMED_TOKENS
            and not torch.is_grad_enabled()
            and not is_traced()
        )

    def _streamed(self, images: Tensor, tables: AxialTables | None) -> Tensor:
        """`forward` image by image, in two passes over blocks of rows, each of which projects them anew."""
        height, width = images.shape[1:3]
        step = max(MIN_ROWS, BLOCK_TOKENS // width)
        blocks = [slice(start, min(start + step, height)) for start in range(0, height, step)]
        out = images.new_empty(images.shape, dtype=self.out_proj(images[:1, :1, :1]).dtype)
        for i, image in enumerate(images.split(1)):
            means = self._key_means(image, blocks, tables)
            for rows in blocks:
                out[i, rows] = self._streamed_rows(image, rows, means, tables)[0]
        return out

    def _key_means(self, image: Tensor, blocks: list[slice], tables: AxialTables | None) -> KeySums:
        """First pass."""
        sums = None
        for rows in blocks:
            _, k, v, _ = self._project(image[:, rows])
            with maybe_autocast(k.device.type, enabled=False):
                part = sum_keys(self._heads(k), self._heads(v), _turns(tables, rows), self.spec)
            sums = part if sums is None else KeySums(*map(Tensor.add_, sums, part))
        assert sums is not None
        num_tokens = image.shape[1] * image.shape[2]
        return KeySums(sums.S / num_tokens, sums.z / num_tokens)

    def _streamed_rows(
        self, image: Tensor, rows: slice, means: KeySums, tables: AxialTables | None
    ) -> Tensor:
        """Second pass, one block; the convolution reads beyond it."""
        margin = 0 if self.lepe is None else self.lepe.weight.shape[-1] // 2
        start = max(rows.start - margin, 0)
        inner = slice(rows.start - start, rows.stop - start)
        q, _, v, gate = self._project(image[:, start : rows.stop + margin])
        lepe = None if self.lepe is None else self.lepe(v)[:, inner]
        q, gate = q[:, inner], None if gate is None else gate[:, inner]
        with maybe_autocast(q.device.type, enabled=False):
            num, inverse = read_means(self._heads(q), means, _turns(tables, rows), self.spec)
            o = num.mul_(inverse).transpose(1, 2).reshape(q.shape)
        return self._finish(o, lepe, gate, q.dtype)

    def _project(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """q, k, v and gate, (B, Y, X, C) each."""
        q, k, v, *gate = self.qkvg(hidden_states).chunk(4 if self.has_gate else 3, dim=-1)
        return q, k, v, gate[0] if gate else None

    def _heads(self, y: Tensor) -> Tensor:
        """(B, Y, X, C) to (B, N, H, D)."""
        return y.flatten(1, 2).unflatten(-1, (self.num_heads, -1))

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, N, H, D) to (B, N, H, D) in fp32 (float64 for float64)."""
        if self.mixer == "linear":
            return vision_linear_attention(q, k, v, self.spec, tables)
        q, k, v = (upcast(y).transpose(1, 2) for y in (q, k, v))
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def _finish(self, o: Tensor, lepe: Tensor | None, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Local enhancement, norm, gate and output projection of the mixed values (B, Y, X, C)."""
        with maybe_autocast(o.device.type, enabled=False):
            o = o if lepe is None else o + lepe
            o = self.ln(o).to(dtype)
        return self.out_proj(o if gate is None else o * F.silu(gate))


def _turns(tables: AxialTables | None, rows: slice) -> Tensor | None:
    return None if tables is None else tables.of_rows(rows).turns
