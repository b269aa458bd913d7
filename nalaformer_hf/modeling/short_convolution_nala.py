"""Causal short convolution and padding: what a token may see of the tokens before it.

Letters: B batch, T tokens, C channels, K kernel size, R packed sequences.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class LeftPadding(NamedTuple):
    """Any padding as left padding: `order` (B, T) sorts tokens, padding first; `real` (B, T) after it.

    The mixers then see the real tokens of a row side by side, wherever the padding stood: no convolution
    window, decay or state is touched by it, and the row's last tokens are those that a cache continues.
    """

    order: Tensor
    real: Tensor

    @classmethod
    def of(cls, mask: Tensor | None) -> LeftPadding | None:
        """From a (B, T) mask that is 1 or True at real tokens."""
        if mask is None:
            return None
        order = mask.bool().int().argsort(dim=1, stable=True)
        return cls(order, mask.bool().gather(1, order))

    def first(self, length: int) -> tuple[Tensor, LeftPadding]:
        """Slots (B, length) of the caller's first `length` tokens, and how these are sorted themselves."""
        slots = (self.order >= length).int().argsort(dim=1, stable=True)[:, :length]
        return slots, LeftPadding(self.order.gather(1, slots), self.real.gather(1, slots))

    def sort(self, x: Tensor) -> Tensor:
        """(B, T, C) with the padding moved to the left."""
        return x.gather(1, self.order.unsqueeze(-1).expand_as(x))

    def restore(self, x: Tensor) -> Tensor:
        """(B, T, C) back in the caller's order."""
        return x.scatter(1, self.order.unsqueeze(-1).expand_as(x), x)


def extend_window(x: Tensor, past: int, window: Tensor | None, real: Tensor | None) -> Tensor:
    """x (B, T, C), padding leftmost, with the `past` inputs before its first real token: (B, past + T, C)."""
    if window is None:
        return F.pad(x, (0, 0, past, 0))
    joined = torch.cat((window.to(x.dtype), x), dim=1)
    if real is None:
        return joined
    # [window | pads | real] to [pads | window | real].
    num_pads = (~real).sum(1, keepdim=True)
    slots = torch.arange(joined.shape[1], device=x.device).expand(x.shape[0], -1)
    source = torch.where(slots < num_pads, slots + past, slots - num_pads)
    source = torch.where(slots >= num_pads + past, slots, source)
    return joined.take_along_dim(source.unsqueeze(-1), dim=1)


class ShortConvolution(nn.Conv1d):
    """Causal depthwise convolution over tokens; a sequence begins with zeros, or the cached window."""

    def __init__(self, channels: int, kernel_size: int):
        super().__init__(channels, channels, kernel_size, groups=channels, bias=False)

    def forward(
        self,
        x: Tensor,
        window: Tensor | None = None,
        padding: LeftPadding | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> Tensor:
        """x (B, T, C), zero at padding; window (B, K - 1, C): the inputs before x. Returns (B, T, C)."""
        past = self.kernel_size[0] - 1
        if cu_seqlens is None:
            return self._valid(extend_window(x, past, window, padding and padding.real))
        # Each packed sequence gets its own zero window: R gaps of K - 1 zeros, one before each sequence.
        positions = torch.arange(x.shape[1], device=x.device)
        slots = positions + past * torch.searchsorted(cu_seqlens.to(x.device), positions, right=True)
        gapped = x.new_zeros(1, x.shape[1] + past * (len(cu_seqlens) - 1), x.shape[2])
        return self._valid(gapped.index_copy(1, slots, x)).index_select(1, slots - past)

    def _valid(self, x: Tensor) -> Tensor:
        """(B, K - 1 + T, C) to (B, T, C), as a 2-D convolution: its depthwise kernel is fast on a CPU."""
        y = F.conv2d(x.transpose(1, 2).unsqueeze(2), self.weight.unsqueeze(2), groups=self.groups)
        return y.squeeze(2).transpose(1, 2)
