"""How tokens are cut: R sequences, one behind another, in N chunks of up to C tokens."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from ...modeling.chunking_nala import bounds_on_host


class Sequences(NamedTuple):
    """Bounds of sequences and of their chunks, int64 tensors, and the length of the longest sequence."""

    bounds: Tensor  # (R + 1,) first token of each sequence, and the number of tokens
    chunk_starts: Tensor  # (N,) first token of each chunk
    chunk_sequences: Tensor  # (N,) its sequence
    first_chunks: Tensor  # (R + 1,) first chunk of each sequence, and N
    longest: int

    @property
    def num_sequences(self) -> int:
        """R."""
        return len(self.bounds) - 1

    @property
    def num_chunks(self) -> int:
        """N."""
        return len(self.chunk_starts)


def cut_sequences(
    batch: int, num_tokens: int, chunk_size: int, cu_seqlens: Tensor | None, device: torch.device
) -> Sequences:
    """The B rows of T tokens, or the sequences of one packed row, in chunks that each start afresh."""
    if cu_seqlens is None:
        bounds = torch.arange(0, (batch + 1) * num_tokens, num_tokens, device=device)
        num_chunks, longest = batch * triton.cdiv(num_tokens, chunk_size), num_tokens
    else:
        bounds = cu_seqlens.to(device, torch.int64)
        lengths = [end - start for start, end in pairwise(bounds_on_host(cu_seqlens))]
        num_chunks, longest = sum(_num_chunks(n, chunk_size) for n in lengths), max(lengths)
    counts = _num_chunks(bounds.diff(), chunk_size)
    first_chunks = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequences = torch.arange(len(counts), device=device)
    owners = sequences.repeat_interleave(counts, output_size=num_chunks)
    places = torch.arange(num_chunks, device=device) - first_chunks[owners]
    return Sequences(bounds, bounds[owners] + places * chunk_size, owners, first_chunks, longest)


def _num_chunks(lengths, chunk_size: int):
    """Of a number or of a tensor of them."""
    return (lengths + chunk_size - 1) // chunk_size
