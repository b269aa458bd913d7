"""What each token reads: o in the forward, the gradient of v in the backward. One kernel, chunk-parallel.

    forward, x = q, y = k:     num_t = φ̃_q(t)·S + Σ_{s≤t} (φ̃_q(t)·φ̃_k(s)) v_s,      o_t = num_t / den_t
                               den_t = φ_q(t)·z + Σ_{s≤t} φ_q(t)·φ_k(s)
    backward, x = k, y = q:    dv_s = φ̃_k(s)·dS + Σ_{t≥s} (φ̃_k(s)·φ̃_q(t)) g_t / den_t

S, z and dS are the states outside the chunk; the sums run inside it. In the bidirectional form there is no
inside: S and z are the sums over the sequence.
"""

import triton
import triton.language as tl

from .features import features, reciprocal, rotate
from .tiles import (
    chunk_span,
    load_normaliser,
    load_rows,
    load_scalars,
    load_state,
    load_tables,
    product,
    store_rows,
)


@triton.jit
def outputs_kernel(
    x, y, values, inverse, outputs, cos, sin, states,
    chunk_starts, chunk_sequences, bounds, num_heads, num_tables, eps,
    IS_QUERY: tl.constexpr, CAUSAL: tl.constexpr, FORM: tl.constexpr, POWER: tl.constexpr, TAU: tl.constexpr,
    GAIN: tl.constexpr, NORM_SCALE: tl.constexpr, ROTARY: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """outputs (tokens, H, V) of x, and 1 / den if IS_QUERY; grid (blocks of chunks, H, value blocks)."""
    block, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    chunk = block // (C // BT)
    chunk_start, end, sequence = chunk_span(chunk, chunk_starts, chunk_sequences, bounds, C)
    start = chunk_start + block % (C // BT) * BT
    if start >= end:
        return
    rows = start + tl.arange(0, BT)
    slot = chunk if CAUSAL else sequence
    plain1, plain2 = features(
        load_rows(x, rows, end, head, num_heads, 0, D, BD),
        IS_QUERY, FORM, POWER, TAU, GAIN, NORM_SCALE,
    )  # fmt: skip
    if IS_QUERY:
        z1 = load_normaliser(states, slot, head, num_heads, 0, D, BD, V, STRIDE)
        z2 = load_normaliser(states, slot, head, num_heads, 1, D, BD, V, STRIDE)
        den = tl.zeros((BT,), tl.float32)
        if CAUSAL and ROTARY != "none":  # in a loop of its own: below, both kinds of features would be kept
            own1, own2 = features(
                load_rows(y, rows, end, head, num_heads, 0, D, BD), False, FORM, POWER, TAU, GAIN, NORM_SCALE
            )
            den += tl.sum(plain1 * tl.cumsum(own1, axis=0) + plain2 * tl.cumsum(own2, axis=0), axis=1)
            for column in range(chunk_start, start, BT):
                columns = column + tl.arange(0, BT)
                other1, other2 = features(
                    load_rows(y, columns, end, head, num_heads, 0, D, BD),
                    False, FORM, POWER, TAU, GAIN, NORM_SCALE,
                )  # fmt: skip
                z1 += tl.sum(other1, axis=0)
                z2 += tl.sum(other2, axis=0)
        den += tl.sum(plain1 * z1[None, :] + plain2 * z2[None, :], axis=1)
    c, s = load_tables(cos, sin, start, rows, end, num_tables, D, BD, ROTARY)
    turned1, turned2 = rotate(plain1, plain2, c, s, ROTARY)

    num = tl.zeros((BT, BV), tl.float32)
    S = load_state(states, slot, head, num_heads, 0, first, D, BD, V, BV, STRIDE)
    num = product(turned1, S, num, DTYPE, PRECISION)
    S = load_state(states, slot, head, num_heads, 1, first, D, BD, V, BV, STRIDE)
    num = product(turned2, S, num, DTYPE, PRECISION)
    if CAUSAL:
        first_column = chunk_start if IS_QUERY else start
        behind_columns = tl.minimum(start + BT, end) if IS_QUERY else end
        for column in range(first_column, behind_columns, BT):
            columns = column + tl.arange(0, BT)
            other1, other2 = features(
                load_rows(y, columns, end, head, num_heads, 0, D, BD),
                not IS_QUERY, FORM, POWER, TAU, GAIN, NORM_SCALE,
            )  # fmt: skip
            later = rows[:, None] >= columns[None, :]
            visible = later if IS_QUERY else rows[:, None] <= columns[None, :]
            c, s = load_tables(cos, sin, column, columns, end, num_tables, D, BD, ROTARY)
            other1, other2 = rotate(other1, other2, c, s, ROTARY)
            scores = tl.zeros((BT, BT), tl.float32)
            scores = product(turned1, tl.trans(other1), scores, DTYPE, PRECISION)
            scores = product(turned2, tl.trans(other2), scores, DTYPE, PRECISION)
            scores = tl.where(visible, scores, 0.0)
            if IS_QUERY and ROTARY == "none":
                den += tl.sum(scores, axis=1)
            v = load_rows(values, columns, end, head, num_heads, first, V, BV)
            if not IS_QUERY:
                v *= load_scalars(inverse, columns, end, head, num_heads)[:, None]
            num = product(scores, v, num, DTYPE, PRECISION)
    if IS_QUERY:
        if not CAUSAL:
            length = tl.load(bounds + sequence + 1) - tl.load(bounds + sequence)
            den += eps * length.to(tl.float32)
        inverse_den = reciprocal(den)
        num *= inverse_den[:, None]
        if first == 0:
            tl.store(inverse + rows * num_heads + head, inverse_den, mask=rows < end)
    store_rows(outputs, num, rows, end, head, num_heads, first, V, BV)
