"""How the tokens of a batch are cut into chunks, so that each sequence starts on a chunk of its own.

Letters: B batch, T tokens, N chunks, C tokens a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise, product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

# A state is kept for the backward at each segment: with fewer chunks the states would outweigh q, k and v.
MIN_SEGMENT_CHUNKS = 8


@dataclass(frozen=True)
class ChunkLayout:
    """Where each token goes: token `t` of every batch row stands in slot `slots[t]` of N·C slots.

    `slots` is None where the tokens fill the chunks in order and only the tail is padding.
    """

    num_tokens: int
    chunk_size: int
    sequence_of_chunk: tuple[int, ...]
    lengths: tuple[int, ...]
    slots: Tensor | None = None

    @property
    def num_chunks(self) -> int:
        """N."""
        return len(self.sequence_of_chunk)

    def split(self, x: Tensor, fill: float = 0.0) -> Tensor:
        """(B, T, ...) to (B, N, C, ...); slots without a token hold `fill`."""
        num_slots = self.num_chunks * self.chunk_size
        shape = (x.shape[0], self.num_chunks, self.chunk_size, *x.shape[2:])
        if num_slots == self.num_tokens:
            return x.reshape(shape)
        padded = x.new_full((x.shape[0], num_slots, *x.shape[2:]), fill)
        if self.slots is None:
            padded[:, : self.num_tokens] = x
        else:
            padded = padded.index_copy(1, self.slots, x)
        return padded.view(shape)

    def merge(self, x: Tensor) -> Tensor:
        """(B, N, C, ...) back to (B, T, ...)."""
        flat = x.flatten(1, 2)
        if self.slots is None:
            return flat[:, : self.num_tokens]
        return flat.index_select(1, self.slots)

    def starts_sequence(self, chunk: int) -> bool:
        """Whether `chunk` is the first one of its sequence."""
        return chunk == 0 or self.sequence_of_chunk[chunk] != self.sequence_of_chunk[chunk - 1]

    def ends_sequence(self, chunk: int) -> bool:
        """Whether `chunk` is the last one of its sequence."""
        return chunk == self.num_chunks - 1 or self.starts_sequence(chunk + 1)


def bounds_on_host(bounds: Tensor) -> list[int]:
    """The numbers of a tensor of bounds; where layers share it, only the first one waits for the GPU."""
    if bounds.device.type == "cpu" or bounds.is_inference() or torch.compiler.is_compiling():
        return bounds.tolist()
    known = _on_host.get(bounds)
    if known is None or known[0] != bounds._version:
        known = _on_host[bounds] = (bounds._version, bounds.tolist())
    return known[1]


_on_host: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # a tensor's version and numbers


def chunk_layout(num_tokens: int, chunk_size: int, cu_seqlens: Tensor | None = None) -> ChunkLayout:
    """The layout of `num_tokens` tokens: one sequence a row, or those that `cu_seqlens` (S + 1,) cuts out."""
    if cu_seqlens is None:
        chunk_size = min(chunk_size, num_tokens)
        num_chunks = -(-num_tokens // chunk_size)
        return ChunkLayout(num_tokens, chunk_size, (0,) * num_chunks, (num_tokens,))
    bounds = bounds_on_host(cu_seqlens)
    lengths = tuple(end - start for start, end in pairwise(bounds))
    chunk_size = min(chunk_size, max(lengths))
    owners: list[int] = []
    slots = []
    for sequence, length in enumerate(lengths):
        first_slot = len(owners) * chunk_size
        slots.append(torch.arange(first_slot, first_slot + length, device=cu_seqlens.device))
        owners += [sequence] * -(-length // chunk_size)
    return ChunkLayout(num_tokens, chunk_size, tuple(owners), lengths, torch.cat(slots))


class Segment(NamedTuple):
    """Some batch rows and some of their chunks, computed together: an index into (B, N, ...)."""

    rows: slice
    chunks: slice

    @property
    def chunk_numbers(self) -> range:
        """The chunks, in order."""
        return range(self.chunks.start, self.chunks.stop)


def cut_segments(layout: ChunkLayout, batch_size: int, num_tokens: int) -> list[Segment]:
    """Segments of about `num_tokens` tokens: some chunks of all rows, or a few of some rows.

    Segments of the same rows stand together, in the order of their chunks.
    """
    num_chunks = max(1, num_tokens // layout.chunk_size)
    num_rows = min(batch_size, max(1, num_chunks // MIN_SEGMENT_CHUNKS))
    rows = cut_range(batch_size, num_rows)
    chunks = cut_range(layout.num_chunks, max(num_chunks // num_rows, MIN_SEGMENT_CHUNKS))
    return [Segment(*pair) for pair in product(rows, chunks)]


def cut_range(length: int, step: int) -> list[slice]:
    """Neighbouring slices of `step` numbers below `length`."""
    return [slice(start, min(start + step, length)) for start in range(0, length, step)]
