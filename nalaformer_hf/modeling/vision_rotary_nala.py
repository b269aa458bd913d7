"""2-D rotary embedding of the vision family: one half of D turns with the row, the other with the column.

Letters in shapes: B batch, Y rows, X columns, N = Y X tokens, D head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .feature_maps_nala import apply_rotary, upcast
from .linear_nala import is_traced


class AxialTables:
    """cos and sin of the angles of an image's rows (Y, P, 2) and columns (X, P', 2), P + P' = D / 2."""

    def __init__(self, rows: Tensor, columns: Tensor):
        self.rows, self.columns = rows, columns
        self._pairs: Tensor | None = None

    @classmethod
    def of(cls, cos: Tensor, sin: Tensor) -> AxialTables:
        """From tables (N, D) that hold each angle twice: those of an image with one column."""
        rows = torch.stack((cos[:, ::2], sin[:, ::2]), dim=-1)
        return cls(rows, rows[:1, :0])

    def of_rows(self, rows: slice) -> AxialTables:
        """The tables of a part of the image."""
        return AxialTables(self.rows[rows], self.columns)

    @property
    def pairs(self) -> Tensor:
        """(N, D / 2, 2): cos and sin of each interleaved pair's angle, made when first asked for."""
        if is_traced():
            return self._make_pairs()
        if self._pairs is None:
            with torch.inference_mode(False):  # a later training step may use them
                self._pairs = self._make_pairs()
        return self._pairs

    def _make_pairs(self) -> Tensor:
        size = len(self.rows), len(self.columns)
        rows = self.rows[:, None].expand(*size, -1, -1)
        columns = self.columns[None].expand(*size, -1, -1)
        return torch.cat((rows, columns), dim=-2).flatten(0, 1)

    @property
    def turns(self) -> Tensor:
        """cos + i sin, (N, D / 2)."""
        return torch.view_as_complex(self.pairs)

    @property
    def cos_sin(self) -> tuple[Tensor, Tensor]:
        """Tables (N, D), each angle twice."""
        cos, sin = (x.repeat_interleave(2, dim=-1) for x in self.pairs.unbind(-1))
        return cos, sin


def rotate(x: Tensor, tables: AxialTables) -> Tensor:
    """(..., N, D) with its pairs (2i, 2i + 1) turned."""
    if is_traced():  # compilers and ONNX have no complex numbers
        return apply_rotary(x, *tables.cos_sin, layout="axial")
    return torch.view_as_real(as_pairs(x) * tables.turns).flatten(-2)


def as_pairs(x: Tensor) -> Tensor:
    """(..., D) seen as (..., D / 2) complex numbers."""
    return torch.view_as_complex(x.unflatten(-1, (-1, 2)))


class NaLaVisionRotary(nn.Module):
    """Makes the tables of an image, and keeps those of the last size.

    θ_j = 10000^(-j / (D/4 - 1)), j = 0 ... D/4 - 1 (published code), each for one pair of either half. The
    angles are made in fp32 and are no buffer: a cast of the model must not touch them.
    """

    def __init__(self, head_dim: int):
        super().__init__()
        steps = torch.linspace(0, 1, head_dim // 4, dtype=torch.float32, device="cpu")
        self.angles: list[float] = (1.0 / 10000**steps).tolist()
        self._kept: tuple[tuple, AxialTables] | None = None

    def forward(self, height: int, width: int, like: Tensor) -> AxialTables:
        """Tables in float64 where `like` is, else in fp32."""
        key = (height, width, like.device, upcast(like[:0]).dtype)
        if is_traced():
            return self._tables(*key)
        kept = self._kept  # other threads may replace it
        if kept is None or kept[0] != key:
            with torch.inference_mode(False):  # a later training step may use them
                kept = self._kept = key, self._tables(*key)
        return kept[1]

    def _tables(self, height: int, width: int, device: torch.device, dtype: torch.dtype) -> AxialTables:
        angles = torch.tensor(self.angles, device=device, dtype=dtype)
        turns = [torch.arange(n, device=device, dtype=dtype)[:, None] * angles for n in (height, width)]
        return AxialTables(*(torch.stack((x.cos(), x.sin()), dim=-1) for x in turns))
