"""Gradients of q and k: one kernel for both, chunk-parallel, which computes the features again.

    x = q, y = k:   dφ̃_q(t) = Σ_{s≤t} (g_t·v_s / den_t) φ̃_k(s) + S g_t / den_t
                    dφ_q(t) = dden_t (Σ_{s≤t} φ_k(s) + z)                           dden_t = -g_t·o_t / den_t
    x = k, y = q:   dφ̃_k(s) = Σ_{t≥s} (g_t·v_s / den_t) φ̃_q(t) + dS v_s
                    dφ_k(s) = Σ_{t≥s} dden_t φ_q(t) + dz

[S | z] and [dS | dz] are the states outside the chunk; the sums run inside it.
"""

from typing import Any

import triton
import triton.language as tl

from .features import features, features_grad, rotate, rotate_back
from .plan import Plan, block_of
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
def den_grad_kernel(
    grad_o, o, inverse, grad_den, num_tokens, num_heads,
    BT: tl.constexpr, V: tl.constexpr, BV: tl.constexpr,
):  # fmt: skip
    """dden_t = -g_t·o_t / den_t; grid (blocks of tokens, H)."""
    head = tl.program_id(1)
    tokens = tl.program_id(0).to(tl.int64) * BT + tl.arange(0, BT)
    g = load_rows(grad_o, tokens, num_tokens, head, num_heads, 0, V, BV)
    outputs = load_rows(o, tokens, num_tokens, head, num_heads, 0, V, BV)
    scale = load_scalars(inverse, tokens, num_tokens, head, num_heads)
    result = -tl.sum(g * outputs, axis=1) * scale
    tl.store(grad_den + tokens * num_heads + head, result, mask=tokens < num_tokens)


def den_grad_constants(plan: Plan) -> dict[str, Any]:
    """The constant arguments of `den_grad_kernel`."""
    BV = block_of(plan.V)
    return {"BT": 32 if BV <= 64 else 16, "V": plan.V, "BV": BV}


@triton.jit
def input_grads_kernel(
    x, y, row_values, column_values, inverse, grad_den, grad_x, cos, sin, states,
    chunk_starts, chunk_sequences, bounds, num_heads, num_tables,
    IS_QUERY: tl.constexpr, CAUSAL: tl.constexpr, FORM: tl.constexpr, POWER: tl.constexpr, TAU: tl.constexpr,
    GAIN: tl.constexpr, NORM_SCALE: tl.constexpr, ROTARY: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """grad_x (tokens, H, D); values are g and v, of the tokens of x and of y; grid (blocks of chunks, H)."""
    block, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    chunk = block // (C // BT)
    chunk_start, end, sequence = chunk_span(chunk, chunk_starts, chunk_sequences, bounds, C)
    start = chunk_start + block % (C // BT) * BT
    if start >= end:
        return
    rows = start + tl.arange(0, BT)
    slot = chunk if CAUSAL else sequence
    row_den = tl.zeros((BT,), tl.float32)
    row_scale = tl.zeros((BT,), tl.float32) + 1.0
    if IS_QUERY:
        row_den = load_scalars(grad_den, rows, end, head, num_heads)
        row_scale = load_scalars(inverse, rows, end, head, num_heads)

    # grad1, grad2: of the turned features; plain1, plain2: of the plain ones, over dden_t if IS_QUERY
    grad1 = tl.zeros((BT, BD), tl.float32)
    grad2 = tl.zeros((BT, BD), tl.float32)
    for first in range(0, V, BV):
        a = load_rows(row_values, rows, end, head, num_heads, first, V, BV) * row_scale[:, None]
        S = load_state(states, slot, head, num_heads, 0, first, D, BD, V, BV, STRIDE)
        grad1 = product(a, tl.trans(S), grad1, DTYPE, PRECISION)
        S = load_state(states, slot, head, num_heads, 1, first, D, BD, V, BV, STRIDE)
        grad2 = product(a, tl.trans(S), grad2, DTYPE, PRECISION)
    z1 = load_normaliser(states, slot, head, num_heads, 0, D, BD, V, STRIDE)
    z2 = load_normaliser(states, slot, head, num_heads, 1, D, BD, V, STRIDE)
    if ROTARY != "none":
        plain1 = tl.zeros((BT, BD), tl.float32) + z1[None, :]
        plain2 = tl.zeros((BT, BD), tl.float32) + z2[None, :]
    elif IS_QUERY:
        grad1 += row_den[:, None] * z1[None, :]
        grad2 += row_den[:, None] * z2[None, :]
    else:
        grad1 += z1[None, :]
        grad2 += z2[None, :]

    if CAUSAL:
        first_column = chunk_start if IS_QUERY else start
        behind_columns = tl.minimum(start + BT, end) if IS_QUERY else end
        for column in range(first_column, behind_columns, BT):
            columns = column + tl.arange(0, BT)
            scores = tl.zeros((BT, BT), tl.float32)
            for first in range(0, V, BV):
                a = load_rows(row_values, rows, end, head, num_heads, first, V, BV)
                b = load_rows(column_values, columns, end, head, num_heads, first, V, BV)
                scores = product(a, tl.trans(b), scores, DTYPE, PRECISION)
            if IS_QUERY:
                visible = rows[:, None] >= columns[None, :]
                den = row_den[:, None]
                scores *= row_scale[:, None]
            else:
                visible = rows[:, None] <= columns[None, :]
                den = load_scalars(grad_den, columns, end, head, num_heads)[None, :]
                scores *= load_scalars(inverse, columns, end, head, num_heads)[None, :]
            other1, other2 = features(
                load_rows(y, columns, end, head, num_heads, 0, D, BD),
                not IS_QUERY, FORM, POWER, TAU, GAIN, NORM_SCALE,
            )  # fmt: skip
            if ROTARY == "none":
                scores += den
            else:
                weights = tl.where(visible, 1.0 if IS_QUERY else den, 0.0)
                plain1 = product(weights, other1, plain1, DTYPE, PRECISION)
                plain2 = product(weights, other2, plain2, DTYPE, PRECISION)
                c, s = load_tables(cos, sin, column, columns, end, num_tables, D, BD, ROTARY)
                other1, other2 = rotate(other1, other2, c, s, ROTARY)
            scores = tl.where(visible, scores, 0.0)
            grad1 = product(scores, other1, grad1, DTYPE, PRECISION)
            grad2 = product(scores, other2, grad2, DTYPE, PRECISION)

    if ROTARY != "none":
        c, s = load_tables(cos, sin, start, rows, end, num_tables, D, BD, ROTARY)
        grad1, grad2 = rotate_back(grad1, grad2, c, s, ROTARY)
        if IS_QUERY:
            plain1 *= row_den[:, None]
            plain2 *= row_den[:, None]
        grad1 += plain1
        grad2 += plain2
    grad = features_grad(
        load_rows(x, rows, end, head, num_heads, 0, D, BD),
        grad1, grad2, IS_QUERY, FORM, POWER, TAU, GAIN, NORM_SCALE,
    )  # fmt: skip
    store_rows(grad_x, grad, rows, end, head, num_heads, 0, D, BD)
