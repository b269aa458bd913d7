"""What a launch needs to know: how tokens are cut into chunks, and the tiles and constants of the kernels.

Letters: B batch, T tokens a row, R sequences, N chunks, C tokens a chunk, BT tokens a tile, D head dim of q
and k, V head dim of v, BD and BV their tiles.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...modeling.feature_maps_nala import FeatureSpec


class Sequences(NamedTuple):
    """R sequences, one behind another, cut into N chunks of up to C tokens; int64 tensors."""

    bounds: Tensor  # (R + 1,) first token of each sequence, and the number of tokens
    chunk_starts: Tensor  # (N,) first token of each chunk
    chunk_sequences: Tensor  # (N,) its sequence
    first_chunks: Tensor  # (R + 1,) first chunk of each sequence, and N

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
        num_chunks = batch * triton.cdiv(num_tokens, chunk_size)
    else:
        bounds = cu_seqlens.to(device, torch.int64)
        num_chunks = int(((bounds.diff() + chunk_size - 1) // chunk_size).sum())
    counts = (bounds.diff() + chunk_size - 1) // chunk_size
    first_chunks = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sequences = torch.arange(len(counts), device=device)
    owners = sequences.repeat_interleave(counts, output_size=num_chunks)
    places = torch.arange(num_chunks, device=device) - first_chunks[owners]
    return Sequences(bounds, bounds[owners] + places * chunk_size, owners, first_chunks)


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, at least the 16 that a product needs, and its warps."""

    BT: int
    BV: int
    num_warps: int


class Plan(NamedTuple):
    """The constants of one call."""

    spec: FeatureSpec
    rotary: str  # "none", "phase" or "axial"
    causal: bool
    eps: float
    D: int
    V: int
    chunk_size: int
    dtype: torch.dtype
    precision: str
    sums: Tiles
    outputs: Tiles
    gradients: Tiles

    @property
    def stride(self) -> int:
        """Row stride of the scratch states [S | z]: V + 1 rounded up, so that rows of S are aligned."""
        return triton.cdiv(self.V + 1, 4) * 4

    def constants(self, tiles: Tiles) -> dict[str, Any]:
        """The constant arguments that the chunk kernels share."""
        return feature_constants(self.spec, self.rotary) | {
            "C": self.chunk_size,
            "BT": tiles.BT,
            "D": self.D,
            "BD": block_of(self.D),
            "V": self.V,
            "BV": tiles.BV,
            "STRIDE": self.stride,
            "DTYPE": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32,
            "PRECISION": self.precision,
        }


def feature_constants(spec: FeatureSpec, rotary: str) -> dict[str, Any]:
    """The constant arguments of the feature maps."""
    return {
        "FORM": spec.form,
        "POWER": float(spec.power),
        "TAU": float(spec.tau),
        "GAIN": float(spec.gain),
        "NORM_SCALE": float(spec.norm_scale),
        "ROTARY": rotary,
    }


def block_of(width: int) -> int:
    """The tile that holds a width: a power of two, at least the 16 that a product needs."""
    return max(16, triton.next_power_of_2(width))


def make_plan(
    spec: FeatureSpec,
    D: int,
    V: int,
    dtype: torch.dtype,
    *,
    rotary: str = "none",
    causal: bool = True,
    eps: float = 0.0,
    is_hip: bool = False,
) -> Plan:
    """Tiles and precision by width and dtype.

    bf16 is multiplied as it is. fp16 is multiplied in tf32, which has its precision and the range that keys
    to the third power need. fp32 is multiplied in three tf32 products (AMD: in fp32).
    """
    BD, BV = block_of(D), block_of(V)
    precision = "tf32"
    if dtype == torch.float32:
        precision = "ieee" if is_hip else "tf32x3"
    shrink = 1 if dtype == torch.bfloat16 else 2  # operands of four bytes take twice the registers
    warps = 4 if BD <= 32 else 8
    sums = Tiles(max(16, (32 if BD <= 64 else 16) // shrink), min(BV, 64 if BD <= 128 else 32), warps)
    rotated = rotary != "none"
    rows = 16 if BD == 256 else 32 if BD == 128 or rotated else 64
    outputs = Tiles(max(16, rows // shrink), min(BV, 64), warps)
    rows = 16 if BD == 256 or (BD == 128 and rotated) else 32
    gradients = Tiles(max(16, rows // shrink), min(BV, 64 if BD <= 64 else 32), warps)
    # A longer chunk spares states, (2D, V) each, and costs products within the chunk.
    chunk_size = 256 if BD >= 128 else 128
    return Plan(spec, rotary, causal, eps, D, V, chunk_size, dtype, precision, sums, outputs, gradients)
