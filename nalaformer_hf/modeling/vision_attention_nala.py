"""The attention layer of the vision family, and its 2-D rotary embedding.

Letters in shapes: B batch, Y rows, X columns, N = Y X tokens, C channels, H heads, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .configuration_nala_vision import NaLaVisionConfig
from .feature_maps_nala import apply_rotary, upcast
from .vision_linear_nala import vision_linear_attention

Rotary = tuple[Tensor, Tensor]
OUTPUT_NORM_EPS = 1e-5  # published code


class NaLaVisionRotary(nn.Module):
    """Axial rotary tables: the first half of D turns with the row, the second with the column.

    θ_j = 10000^(-j / (D/4 - 1)), j = 0 ... D/4 - 1, each for one interleaved pair of either half (published
    code). Angles are made in fp32 and are no buffer: a cast of the model must not touch them. The tables of
    the last size are kept.
    """

    def __init__(self, head_dim: int):
        super().__init__()
        steps = torch.linspace(0, 1, head_dim // 4, dtype=torch.float32, device="cpu")
        self.angles: list[float] = (1.0 / 10000**steps).tolist()
        self._kept: tuple | None = None

    def forward(self, height: int, width: int, like: Tensor) -> Rotary:
        """(cos, sin), each (N, D), float64 where `like` is, else fp32."""
        key = (height, width, like.device, upcast(like[:0]).dtype)
        if torch.compiler.is_compiling():
            return self._tables(*key)
        if self._kept is None or self._kept[0] != key:
            with torch.inference_mode(False):  # a later training step may use them
                self._kept = key, self._tables(*key)
        return self._kept[1]

    def _tables(self, height: int, width: int, device: torch.device, dtype: torch.dtype) -> Rotary:
        angles = torch.tensor(self.angles, device=device, dtype=dtype).repeat_interleave(2)
        rows, columns = (
            torch.arange(n, device=device, dtype=dtype)[:, None] * angles for n in (height, width)
        )
        shape = (height, width, -1)
        turns = torch.cat((rows[:, None].expand(shape), columns[None].expand(shape)), dim=-1).flatten(0, 1)
        return turns.cos(), turns.sin()


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
        self.qkvg = nn.Linear(width, (4 if self.has_gate else 3) * width)
        self.lepe = nn.Conv2d(width, width, 5, padding=2, groups=width) if config.use_lepe else None
        self.ln = nn.LayerNorm(width, eps=OUTPUT_NORM_EPS)
        self.out_proj = nn.Linear(width, width)

    def forward(self, hidden_states: Tensor, rotary: Rotary | None) -> Tensor:
        """(B, Y, X, C) to the same, with the tables of `NaLaVisionRotary`."""
        q, k, v, *gate = self.qkvg(hidden_states).chunk(4 if self.has_gate else 3, dim=-1)
        lepe = None if self.lepe is None else self.lepe(v.permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
        with torch.autocast(q.device.type, enabled=False):
            q, k, v = (y.flatten(1, 2).unflatten(-1, (self.num_heads, -1)) for y in (q, k, v))
            o = self._mix(q, k, v, rotary).reshape(hidden_states.shape)
            o = self._norm(o if lepe is None else o + lepe)
        o = o.to(q.dtype)
        return self.out_proj(o * F.silu(gate[0]) if gate else o)

    def _mix(self, q: Tensor, k: Tensor, v: Tensor, rotary: Rotary | None) -> Tensor:
        """(B, N, H, D) to (B, N, H, D) in fp32 (float64 for float64)."""
        if self.mixer == "linear":
            return vision_linear_attention(q, k, v, self.spec, rotary)
        q, k, v = (upcast(y).transpose(1, 2) for y in (q, k, v))
        if rotary is not None:
            q, k = (apply_rotary(y, *rotary, layout="axial") for y in (q, k))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2)

    def _norm(self, o: Tensor) -> Tensor:
        weight, bias = self.ln.weight.to(o), self.ln.bias.to(o)
        return F.layer_norm(o, o.shape[-1:], weight, bias, self.ln.eps)
