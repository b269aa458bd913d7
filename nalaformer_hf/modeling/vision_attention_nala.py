"""The attention layer of the vision family.

Letters in shapes: B batch, Y rows, X columns, N = Y X tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from .configuration_nala_vision import NaLaVisionConfig
from .feature_maps_nala import upcast
from .linear_nala import NaLaLinear
from .output_norm_nala import OutputLayerNorm
from .vision_convolution_nala import NaLaDepthwiseConv
from .vision_linear_nala import KeySums, read_means, sum_keys, vision_linear_attention
from .vision_pieces_nala import image_pieces, is_cut, map_pieces, piece_tokens, row_blocks
from .vision_rotary_nala import AxialTables, rotate

OUTPUT_NORM_EPS = 1e-5  # published code
# Where nothing is kept, each of two passes projects images of so many tokens anew, in blocks of so many.
STREAMED_TOKENS = 1 << 15
BLOCK_TOKENS = 1 << 11


class Projections(NamedTuple):
    """q, k, v and gate, (B, Y, X, C) each."""

    q: Tensor
    k: Tensor
    v: Tensor
    gate: Tensor | None = None

    def rows(self, rows: slice) -> Projections:
        """Some rows of the images."""
        gate = None if self.gate is None else self.gate[:, rows]
        return Projections(self.q[:, rows], self.k[:, rows], self.v[:, rows], gate)


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
        if not is_cut(self, hidden_states):
            return self._whole(hidden_states, tables)
        attend = self._in_blocks if self.mixer == "linear" and self.spec.form == "polarity" else self._whole
        pieces = image_pieces(hidden_states, piece_tokens(hidden_states.shape[-1]))
        return map_pieces(lambda part, _: attend(hidden_states[part], tables), hidden_states, pieces)

    def _whole(self, hidden_states: Tensor, tables: AxialTables | None) -> Tensor:
        """`forward` in one piece."""
        q, k, v, gate = self._project(hidden_states)
        lepe = None if self.lepe is None else self.lepe(v)
        with maybe_autocast(q.device.type, enabled=False):
            o = self._mix(self._heads(q), self._heads(k), self._heads(v), tables).reshape(hidden_states.shape)
            o = o if lepe is None else o + lepe
        return self._finish(o, gate, q.dtype)

    def _in_blocks(self, images: Tensor, tables: AxialTables | None) -> Tensor:
        """`_whole` in two passes over blocks of rows: the sums over keys, then what queries read of them."""
        num_tokens = images.shape[1] * images.shape[2]
        is_streamed = num_tokens >= STREAMED_TOKENS
        block_tokens = BLOCK_TOKENS if is_streamed else piece_tokens(self.qkvg.out_features)
        blocks = row_blocks(images, block_tokens)
        if len(blocks) == 1:
            return self._whole(images, tables)
        project = partial(self._project_rows, images) if is_streamed else self._project(images).rows
        means = KeySums(*(x / num_tokens for x in self._sum_keys(project, blocks, tables)))
        pieces = [(slice(None), rows) for rows in blocks]
        return map_pieces(lambda _, rows: self._read_rows(project, rows, means, tables), images, pieces)

    def _sum_keys(
        self, project: Callable[[slice], Projections], blocks: list[slice], tables: AxialTables | None
    ) -> KeySums:
        """First pass."""
        sums = None
        for rows in blocks:
            _, k, v, _ = project(rows)
            with maybe_autocast(k.device.type, enabled=False):
                part = sum_keys(self._heads(k), self._heads(v), _turns(tables, rows), self.spec)
            sums = part if sums is None else KeySums(*map(Tensor.add_, sums, part))
        assert sums is not None
        return sums

    def _read_rows(
        self,
        project: Callable[[slice], Projections],
        rows: slice,
        means: KeySums,
        tables: AxialTables | None,
    ) -> Tensor:
        """Second pass, one block; the convolution reads beyond it."""
        margin = 0 if self.lepe is None else self.lepe.weight.shape[-1] // 2
        start = max(rows.start - margin, 0)
        wide = project(slice(start, rows.stop + margin))
        q, _, _, gate = wide.rows(slice(rows.start - start, rows.stop - start))
        lepe = None if self.lepe is None else self.lepe(wide.v)[:, rows.start - start : rows.stop - start]
        with maybe_autocast(q.device.type, enabled=False):
            num, inverse = read_means(self._heads(q), means, _turns(tables, rows), self.spec)
            o = num.mul_(inverse).transpose(1, 2).reshape(q.shape)
            o = o if lepe is None else o.add_(lepe)
        return self._finish(o, gate, q.dtype)

    def _project(self, hidden_states: Tensor) -> Projections:
        return Projections(*self.qkvg(hidden_states).chunk(4 if self.has_gate else 3, dim=-1))

    def _project_rows(self, images: Tensor, rows: slice) -> Projections:
        return self._project(images[:, rows])

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

    def _finish(self, o: Tensor, gate: Tensor | None, dtype: torch.dtype) -> Tensor:
        """Norm, gate and output projection of the mixed and locally enhanced values (B, Y, X, C)."""
        with maybe_autocast(o.device.type, enabled=False):
            o = self.ln(o).to(dtype)
        return self.out_proj(o if gate is None else o * F.silu(gate))


def _turns(tables: AxialTables | None, rows: slice) -> Tensor | None:
    return None if tables is None else tables.of_rows(rows).turns
