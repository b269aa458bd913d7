"""Norms of the mixer's output, which is fp32 in every model while their weights have the model's dtype.

They are called like any module, so that hooks on them run: accelerate's load offloaded weights.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class OutputLayerNorm(nn.LayerNorm):
    """LayerNorm in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        return F.layer_norm(x, self.normalized_shape, self.weight.to(x), self.bias.to(x), self.eps)


class OutputRMSNorm(nn.RMSNorm):
    """RMSNorm in the input's dtype."""

    def forward(self, x: Tensor) -> Tensor:
        """(..., C) to (..., C)."""
        return F.rms_norm(x, self.normalized_shape, self.weight.to(x), self.eps)
