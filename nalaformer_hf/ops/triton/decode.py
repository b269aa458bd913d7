"""One token a call: the state is read once and written once.

S ← S + φ̃_k vᵀ,      z ← z + φ_k,      o = φ̃_q·S / φ_q·z
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...modeling.feature_maps_nala import FeatureSpec
from .features import features, reciprocal, rotate
from .plan import block_of, feature_constants
from .tiles import load_rows, load_tables, rounded

STATE_BLOCK = 2048  # numbers of one half of a state in registers at a time


@triton.jit
def decode_kernel(
    q, k, v, o, state, new_state, cos, sin, num_heads, num_tables,
    FORM: tl.constexpr, POWER: tl.constexpr, TAU: tl.constexpr, GAIN: tl.constexpr,
    NORM_SCALE: tl.constexpr, ROTARY: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr,
    BV: tl.constexpr,
):  # fmt: skip
    """o (B, H, V) and the new states [S | z] (B, H, 2D, V + 1), which may be the old ones; grid (B · H,)."""
    row, head = tl.program_id(0).to(tl.int64) // num_heads, tl.program_id(0) % num_heads
    token = row + tl.arange(0, 1)
    fq1, fq2 = features(
        load_rows(q, token, row + 1, head, num_heads, 0, D, BD), True, FORM, POWER, TAU, GAIN, NORM_SCALE
    )
    fk1, fk2 = features(
        load_rows(k, token, row + 1, head, num_heads, 0, D, BD), False, FORM, POWER, TAU, GAIN, NORM_SCALE
    )
    c, s = load_tables(cos, sin, row, token, row + 1, num_tables, D, BD, ROTARY)
    rq1, rq2 = rotate(fq1, fq2, c, s, ROTARY)
    rk1, rk2 = rotate(fk1, fk2, c, s, ROTARY)
    dims = tl.arange(0, BD)
    first_half = ((row * num_heads + head) * (2 * D) + dims) * (V + 1)
    second_half = first_half + D * (V + 1)
    z1 = tl.load(state + first_half + V, mask=dims < D, other=0.0) + tl.sum(fk1, axis=0)
    z2 = tl.load(state + second_half + V, mask=dims < D, other=0.0) + tl.sum(fk2, axis=0)
    den = tl.sum(tl.sum(fq1, axis=0) * z1 + tl.sum(fq2, axis=0) * z2, axis=0)
    inverse = reciprocal(den)
    tl.debug_barrier()  # all threads have read z, where new_state is state
    tl.store(new_state + first_half + V, z1, mask=dims < D)
    tl.store(new_state + second_half + V, z2, mask=dims < D)
    for first in range(0, V, BV):
        columns = first + tl.arange(0, BV)
        values = load_rows(v, token, row + 1, head, num_heads, first, V, BV)
        inside = (dims < D)[:, None] & (columns < V)[None, :]
        place = first_half[:, None] + columns[None, :]
        S = tl.load(state + place, mask=inside, other=0.0) + tl.trans(rk1) * values
        tl.store(new_state + place, S, mask=inside)
        num = tl.sum(tl.trans(rq1) * S, axis=0)
        place = second_half[:, None] + columns[None, :]
        S = tl.load(state + place, mask=inside, other=0.0) + tl.trans(rk2) * values
        tl.store(new_state + place, S, mask=inside)
        num += tl.sum(tl.trans(rq2) * S, axis=0)
        out = o + (row * num_heads + head) * V + columns
        tl.store(out, rounded(num * inverse, o.dtype.element_ty), mask=columns < V)


def decode_constants(spec: FeatureSpec, rotary: str, D: int, V: int) -> dict[str, Any]:
    """The constant arguments of the kernel."""
    BD = block_of(D)
    return feature_constants(spec, rotary) | {
        "D": D,
        "BD": BD,
        "V": V,
        "BV": min(block_of(V), STATE_BLOCK // BD),
    }


@torch.compiler.disable
def fused_step(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    spec: FeatureSpec,
    *,
    rotary: tuple[Tensor, Tensor] | None = None,
    rotary_layout: str = "phase",
    in_place: bool = False,
) -> tuple[Tensor, Tensor]:
    """`modeling.linear_attention_nala.step_attention` in one kernel, without gradient; arguments are trusted.

    Args:
        q: (B, 1, H, D), fp32, fp16 or bf16, D ≤ 256.
        k: As q.
        v: (B, 1, H, V), V ≤ 256.
        state: [S | z] in fp32, (B, H, 2D, V + 1).
        spec: Feature maps, "cosine" or "polarity".
        rotary: Tables (1, D), (1, 1, D) or (B, 1, D).
        rotary_layout: "phase" or "axial".
        in_place: Whether the new state may overwrite the old one, and does if that is contiguous.

    Returns:
        o (B, 1, H, V) in the dtype of v and the new state. Nothing waits for the device and, given the same
        tensors, the same memory is used: a CUDA graph can record it.
    """
    batch, _, heads, D = q.shape
    V = v.shape[-1]
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    cos, sin = (q, q) if rotary is None else (x.float().contiguous() for x in rotary)
    o, new_state = torch.empty_like(v), state if in_place else torch.empty_like(state)
    constants = decode_constants(spec, "none" if rotary is None else rotary_layout, D, V)
    with torch.cuda.device_of(q):
        decode_kernel[batch * heads,](
            q, k, v, o, state, new_state, cos, sin, heads, cos.numel() // D, num_warps=4, **constants
        )
    return o, new_state
