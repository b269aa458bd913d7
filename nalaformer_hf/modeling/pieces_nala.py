"""Token-wise work on a CPU, a few tokens at a time.

Letters in shapes: B batch, T tokens, C channels.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from .linear_nala import ROWS, is_hooked, is_traced


def in_pieces(function: Callable[..., Tensor], *inputs: Tensor, calls: Sequence[nn.Module | None]) -> Tensor:
    """`function(*inputs)` of tensors (B, T, ...), computed `ROWS` tokens at a time where that spares memory.

    `function` must treat each token alone; it then sees (1, n, ...). The C library of Linux gives every block
    above 32 MB back to the system as soon as it is free, and the system clears it before it hands it out
    again: in a long training step on a CPU that takes longer than the computing (docs/log.md). Smaller blocks
    are used again. Hooks and adapters on the modules that `function` calls get all tokens at once.
    """
    batch, length = inputs[0].shape[:2]
    if batch * length <= 2 * ROWS or inputs[0].device.type != "cpu" or is_traced() or is_hooked(*calls):
        return function(*inputs)
    flat = (x.reshape(1, batch * length, *x.shape[2:]).split(ROWS, dim=1) for x in inputs)
    out = torch.cat([function(*pieces) for pieces in zip(*flat, strict=True)], dim=1)
    return out.view(batch, length, *out.shape[2:])
