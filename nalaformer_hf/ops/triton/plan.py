"""What a launch needs to know: the tiles and constants of the kernels on a device.

Letters: C tokens a chunk, BT tokens a tile, D head dim of q and k, V head dim of v, BD and BV their tiles.
"""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from triton.runtime import driver

from ...modeling.feature_maps_nala import FeatureSpec
from .tiles import INTERPRETED


class Device(NamedTuple):
    """What the choice of tiles and kernels needs to know of a device."""

    is_hip: bool
    shared: int  # bytes of shared memory that one block of threads may have
    processors: int  # that run blocks at the same time


INTERPRETER = Device(is_hip=False, shared=99 << 10, processors=84)
MAX_CANDIDATES = 2  # that a plan has for a kernel; the first use of a GPU tests them all in some seconds
MAX_REGISTERS = 255  # that a thread can have (NVIDIA)


@cache
def device_facts(device: torch.device) -> Device:
    """The facts of a GPU; the interpreter, on a CPU, does as a small one."""
    if device.type == "cpu":
        return INTERPRETER
    facts = driver.active.utils.get_device_properties(device.index)
    return Device(torch.version.hip is not None, facts["max_shared_mem"], facts["multiprocessor_count"])


class Tiles(NamedTuple):
    """Sizes of a kernel's tiles, at least the 16 that a product needs, its warps and pipeline stages."""

    BT: int
    BV: int
    num_warps: int
    num_stages: int = 1
    max_registers: int | None = None  # a thread's; None: the compiler may spill so that more blocks run

    @property
    def roomy(self) -> Tiles:
        """The same with all the registers that a thread can have (NVIDIA)."""
        return self._replace(max_registers=MAX_REGISTERS)


class Plan(NamedTuple):
    """The constants of one call, and for each kernel the tiles that may be fastest, the likeliest first."""

    device: Device
    spec: FeatureSpec
    rotary: str  # "none", "phase" or "axial"
    causal: bool
    eps: float
    D: int
    V: int
    chunk_size: int
    dtype: torch.dtype
    precision: str
    sums: tuple[Tiles, ...]
    outputs: tuple[Tiles, ...]
    gradients: tuple[Tiles, ...]
    sequential: tuple[Tiles, ...]

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

    def options(self, tiles: Tiles) -> dict[str, int]:
        """What a launch takes beside constants."""
        options = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        if tiles.max_registers is not None:
            options["maxnreg"] = tiles.max_registers
        return options


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
    device: Device,
    *,
    rotary: str = "none",
    causal: bool = True,
    eps: float = 0.0,
) -> Plan:
    """Tiles and precision by width, dtype and device.

    bf16 is multiplied as it is. fp16 is multiplied in tf32, which has its precision and the range that keys
    to the third power need. fp32 is multiplied in three tf32 products (AMD: in fp32).
    """
    BD, BV = block_of(D), block_of(V)
    precision = "tf32"
    if dtype == torch.float32:
        precision = "ieee" if device.is_hip else "tf32x3"
    shrink = 1 if dtype == torch.bfloat16 else 2  # operands of four bytes take twice the registers
    rotated = rotary != "none"

    warps = 4 if BD <= 32 or device.is_hip else 8  # AMD's are twice as wide

    def tiles(rows: int, columns: int) -> Tiles:
        return Tiles(max(16, rows // shrink), min(BV, columns), warps)

    sums = tiles(32 if BD <= 64 else 16, 64 if BD <= 128 else 32)
    rows = 16 if BD == 256 else 32 if BD == 128 or rotated else 64
    operands = 2 * shrink * BD * (16 + 64)  # bytes of shared memory; more than gfx942 has in fp16 and fp32
    outputs = tiles(rows, 64 if BD <= 128 or operands <= device.shared else 32)
    # In both directions no loop over columns takes registers; the narrower tile is what spills then.
    is_wide = BD <= 64 or (BD == 128 and not causal and dtype != torch.float32)
    gradients = tiles(16 if BD == 256 or (BD == 128 and rotated) else 32, 64 if is_wide else 32)
    # Registers for both halves of a state, or for loads ahead; three products in tf32 take more of them.
    has_room = (16 if dtype == torch.float32 else 64) >= BD

    def candidates(best: Tiles) -> tuple[Tiles, ...]:
        ahead = best._replace(num_stages=2)
        fits = has_room and shared_bound(ahead, BD) <= device.shared
        return _distinct(best, ahead if fits else _halved(best))

    sequential = tiles(16 if BD == 64 else 32, 32)
    if BD == 32 and not device.is_hip:
        sequential = sequential._replace(num_warps=8)  # with 4, some form spills
    return Plan(
        device,
        spec,
        rotary,
        causal,
        eps,
        D,
        V,
        256 if BD >= 128 else 128,  # a longer chunk spares states, (2D, V) each, and costs products within it
        dtype,
        precision,
        sums=candidates(sums),
        outputs=candidates(outputs),
        gradients=candidates(gradients),
        sequential=_distinct(sequential, _halved(sequential)) if causal and has_room else (),
    )


def _halved(tiles: Tiles) -> Tiles:
    return tiles._replace(BT=max(16, tiles.BT // 2))


def _distinct(*candidates: Tiles) -> tuple[Tiles, ...]:
    """Each once, the likeliest first; exactly one in the interpreter, which has nothing to time."""
    return tuple(dict.fromkeys(candidates[:1] if INTERPRETED else candidates))


def shared_bound(tiles: Tiles, BD: int) -> int:
    """Bytes of shared memory that no kernel exceeds up to D = 128.

    A block holds operands of its products, at most 64 KB, and what it loads ahead: rows of x, of values, of
    cos and of sin, in at most four bytes a number.
    """
    return (64 << 10) + (tiles.num_stages - 1) * 4 * tiles.BT * (3 * BD + tiles.BV)
