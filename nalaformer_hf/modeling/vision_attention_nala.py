"""The attention layer of the vision family.

Letters in shapes: B batch, Y rows, X columns, N = Y X tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn
from transformers.utils.generic import maybe_autocast

from .configuration_nala_vision import NaLaVisionConfig
from .feature_maps_nala import upcast
from .linear_nala import NaLaLinear
from .vision_convolution_nala import NaLaDepthwiseConv
from .vision_linear_nala import vision_linear_attention
from .vision_rotary_nala import AxialTables, rotate

OUTPUT_NORM_EPS = 1e-5  # published code


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
        self.ln = nn.LayerNorm(width, eps=OUTPUT_NORM_EPS)
        self.out_proj = NaLaLinear(width, width)

    def forward(self, hidden_states: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, Y, X, C) to the same, with the tables of `NaLaVisionRotary`."""
        q, k, v, *gate = self.qkvg(hidden_states).chunk(4 if self.has_gate else 3, dim=-1)
        lepe = None if self.lepe is None else self.lepe(v)
        with maybe_autocast(q.device.type, enabled=False):
            q, k, v = (y.flatten(1, 2).unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
            o = self._mix(q, k, v, tables).reshape(hidden_states.shape)
            o = self._norm(o if lepe is None else o + lepe)
        o = o.to(q.dtype)
        return self.out_proj(o * F.silu(gate[0]) if gate else o)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, tables: AxialTables | None) -> Tensor:
        """(B, N, H, D) to (B, N, H, D) in fp32 (float64 for float64)."""
        if self.mixer == "linear":
            return vision_linear_attention(q, k, v, self.spec, tables)
        q, k, v = (upcast(y).transpose(1, 2) for y in (q, k, v))
        if tables is not None:
            q, k = rotate(q, tables), rotate(k, tables)
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def _norm(self, o: Tensor) -> Tensor:
        weight, bias = self.ln.weight.to(o), self.ln.bias.to(o)
        return F.layer_norm(o, o.shape[-1:], weight, bias, self.ln.eps)
