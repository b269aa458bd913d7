"""Norms of the mixer's output, which is fp32 in every model while their weights have the model's dtype.

They are called like any module, so that hooks on them run: accelerate's load offloaded weights. With `fused`,
a kernel of norm and gate, the output is gated too, and has the dtype of the gate.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn


class OutputLayerNorm(nn.LayerNorm):
    """LayerNorm in the input's dtype."""

    def forward(
        self, x: Tensor, gate: Tensor | None = None, fused: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """(..., C) to (..., C)."""
        if fused is not None:
            return fused(x, gate, self.weight, self.bias, self.eps)
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x), self.bias.to(x), self.eps)


class OutputRMSNorm(nn.RMSNorm):
    """RMSNorm in the input's dtype."""

    def forward(
        self, x: Tensor, gate: Tensor | None = None, fused: Callable[..., Tensor] | None = None
    ) -> Tensor:
        """(..., C) to (..., C)."""
        if fused is not None:
            return fused(x, gate, self.weight, None, self.eps)
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x), self.eps)
