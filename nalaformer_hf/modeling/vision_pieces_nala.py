"""Layers in pieces of a batch: where a CPU keeps nothing for a backward, wide inner tensors stay small.

Pieces of this size cost no time (docs/log.md). Letters in shapes: B batch, Y rows, X columns, C channels.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor, nn

from .chunking_nala import cut_range
from .linear_nala import is_hooked, is_traced

# Numbers of each tensor inside a piece.
PIECE_SIZE = 1 << 19
MIN_ROWS = 4  # what reads beyond its rows computes those anew, so fewer would cost more than they save


def is_cut(layer: nn.Module, images: Tensor) -> bool:
    """Whether a layer may be computed in pieces: hooks and adapters inside it get whole batches."""
    if images.device.type != "cpu" or torch.is_grad_enabled() or is_traced():
        return False
    return not is_hooked(*layer.children())


def piece_tokens(width: int) -> int:
    """How many tokens a piece may have whose tensors are so wide."""
    return PIECE_SIZE // width


def image_pieces(images: Tensor, num_tokens: int) -> list[tuple[slice, slice]]:
    """Cuts a batch (B, Y, X, C) evenly into pieces of whole images, of at most so many tokens."""
    batch, height, columns, _ = images.shape
    num_pieces = math.ceil(batch / max(1, num_tokens // (height * columns)))
    return [(part, slice(0, height)) for part in cut_range(batch, math.ceil(batch / num_pieces))]


def row_blocks(images: Tensor, num_tokens: int) -> list[slice]:
    """Cuts rows into blocks of so many tokens of an image."""
    return cut_range(images.shape[1], max(MIN_ROWS, num_tokens // images.shape[2]))


def row_pieces(images: Tensor, num_tokens: int) -> list[tuple[slice, slice]]:
    """`image_pieces`, and larger images in blocks of rows."""
    blocks = row_blocks(images, num_tokens)
    return [(part, rows) for part, _ in image_pieces(images, num_tokens) for rows in blocks]


def map_pieces(
    function: Callable[[slice, slice], Tensor], images: Tensor, pieces: list[tuple[slice, slice]]
) -> Tensor:
    """(B, Y, X, C) put together from function(part, rows), which gives the result's [part, rows]."""
    if len(pieces) == 1:
        return function(*pieces[0])
    out = None
    for piece in pieces:
        result = function(*piece)
        out = result.new_empty(images.shape) if out is None else out
        out[piece] = result
    assert out is not None
    return out
