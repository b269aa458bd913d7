"""The causal forward in one kernel: a program walks through a sequence with the state in its registers.

    num_t = φ̃_q(t)·S + Σ_s (φ̃_q(t)·φ̃_k(s)) v_s,      S ← S + Σ_s φ̃_k(s) v_sᵀ      over the tile's s ≤ t
    den_t = φ_q(t)·z + Σ_s φ_q(t)·φ_k(s),             z ← z + Σ_s φ_k(s)             o_t = num_t / den_t

q, k and v are read once and no state but the last is written; but tile waits for tile.
"""

from typing import Any

import triton
import triton.language as tl

from .features import features, reciprocal, rotate
from .plan import Plan, Tiles
from .sequences import Sequences
from .tiles import load_normaliser, load_rows, load_state, load_tables, product, store_rows, store_state


@triton.jit
def sequential_kernel(
    q, k, values, inverse, outputs, cos, sin, initial, final, bounds, num_heads, num_tables,
    HAS_INITIAL: tl.constexpr, FORM: tl.constexpr, POWER: tl.constexpr, TAU: tl.constexpr,
    GAIN: tl.constexpr, NORM_SCALE: tl.constexpr, ROTARY: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """outputs (tokens, H, V), 1 / den and the final [S | z]; grid (sequences · H, value blocks)."""
    program, first = tl.program_id(0).to(tl.int64), tl.program_id(1) * BV
    sequence, head = program // num_heads, program % num_heads
    sequence_start, end = tl.load(bounds + sequence), tl.load(bounds + sequence + 1)
    S1 = tl.zeros((BD, BV), tl.float32)
    S2 = tl.zeros((BD, BV), tl.float32)
    z1 = tl.zeros((BD,), tl.float32)
    z2 = tl.zeros((BD,), tl.float32)
    if HAS_INITIAL:
        S1 += load_state(initial, sequence, head, num_heads, 0, first, D, BD, V, BV, V + 1)
        S2 += load_state(initial, sequence, head, num_heads, 1, first, D, BD, V, BV, V + 1)
        z1 += load_normaliser(initial, sequence, head, num_heads, 0, D, BD, V, V + 1)
        z2 += load_normaliser(initial, sequence, head, num_heads, 1, D, BD, V, V + 1)
    for start in range(sequence_start, end, BT):
        tokens = start + tl.arange(0, BT)
        key1, key2 = features(
            load_rows(k, tokens, end, head, num_heads, 0, D, BD), False, FORM, POWER, TAU, GAIN, NORM_SCALE
        )
        query1, query2 = features(
            load_rows(q, tokens, end, head, num_heads, 0, D, BD), True, FORM, POWER, TAU, GAIN, NORM_SCALE
        )
        den = tl.sum(query1 * (tl.cumsum(key1, axis=0) + z1[None, :]), axis=1)
        den += tl.sum(query2 * (tl.cumsum(key2, axis=0) + z2[None, :]), axis=1)
        inverse_den = reciprocal(den)
        z1 += tl.sum(key1, axis=0)
        z2 += tl.sum(key2, axis=0)
        c, s = load_tables(cos, sin, start, tokens, end, num_tables, D, BD, ROTARY)
        key1, key2 = rotate(key1, key2, c, s, ROTARY)
        query1, query2 = rotate(query1, query2, c, s, ROTARY)

        v = load_rows(values, tokens, end, head, num_heads, first, V, BV)
        num = tl.zeros((BT, BV), tl.float32)
        scores = tl.zeros((BT, BT), tl.float32)
        # One half after the other: both kinds of features of a half are done before the next one's.
        scores = product(query1, tl.trans(key1), scores, DTYPE, PRECISION)
        num = product(query1, S1, num, DTYPE, PRECISION)
        S1 = product(tl.trans(key1), v, S1, DTYPE, PRECISION)
        scores = product(query2, tl.trans(key2), scores, DTYPE, PRECISION)
        num = product(query2, S2, num, DTYPE, PRECISION)
        S2 = product(tl.trans(key2), v, S2, DTYPE, PRECISION)
        scores = tl.where(tokens[:, None] >= tokens[None, :], scores, 0.0)
        num = product(scores, v, num, DTYPE, PRECISION)
        store_rows(outputs, num * inverse_den[:, None], tokens, end, head, num_heads, first, V, BV)
        if first == 0:
            tl.store(inverse + tokens * num_heads + head, inverse_den, mask=tokens < end)
    store_state(final, S1, z1, sequence, head, num_heads, 0, first, D, BD, V, BV, V + 1)
    store_state(final, S2, z2, sequence, head, num_heads, 1, first, D, BD, V, BV, V + 1)


def sequential_constants(plan: Plan, tiles: Tiles, has_initial: bool) -> dict[str, Any]:
    """The constant arguments of the kernel."""
    constants = plan.constants(tiles) | {"HAS_INITIAL": has_initial}
    del constants["C"], constants["STRIDE"]  # there are no chunks
    return constants


def is_sequential(plan: Plan, sequences: Sequences, num_tokens: int, num_heads: int) -> bool:
    """Whether this kernel can run, and sequences and heads alone keep the device busy or are short.

    Short: no sequence has a second chunk. Busy: the longest sequence takes one program no longer than all
    the work takes all the processors.
    """
    if not plan.sequential:
        return False
    work = num_tokens * num_heads * triton.cdiv(plan.V, plan.sequential[0].BV)
    return sequences.longest <= max(plan.chunk_size, work // plan.device.processors)
