"""Sums over chunks, and the states between them: the part of the computation that crosses chunks.

sums of a chunk:    Σ [φ̃ ⊗ values | φ · weight]       keys: values v, weight 1
queries (backward): values g / den, weight dden
scan:               state before a chunk = initial + sums of the chunks before it (or behind it)
"""

from typing import Any

import triton
import triton.language as tl

from .features import features, rotate
from .plan import Plan
from .tiles import chunk_span, load_rows, load_scalars, load_tables, product, store_state

SCAN_BLOCK = 512


@triton.jit
def chunk_sums_kernel(
    x, values, inverse, weights, cos, sin, sums,
    chunk_starts, chunk_sequences, bounds, num_heads, num_tables,
    IS_QUERY: tl.constexpr, FORM: tl.constexpr, POWER: tl.constexpr, TAU: tl.constexpr, GAIN: tl.constexpr,
    NORM_SCALE: tl.constexpr, ROTARY: tl.constexpr, C: tl.constexpr, BT: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
    DTYPE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """sums[chunk, head] = Σ_t [φ̃(x_t) ⊗ values_t | φ(x_t) weight_t]; grid (chunks, H, value blocks)."""
    chunk, head, first = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2) * BV
    start, end, _ = chunk_span(chunk, chunk_starts, chunk_sequences, bounds, C)
    sum1 = tl.zeros((BD, BV), tl.float32)
    sum2 = tl.zeros((BD, BV), tl.float32)
    total1 = tl.zeros((BD,), tl.float32)
    total2 = tl.zeros((BD,), tl.float32)
    for block in range(start, end, BT):
        tokens = block + tl.arange(0, BT)
        rows = load_rows(x, tokens, end, head, num_heads, 0, D, BD)
        phi1, phi2 = features(rows, IS_QUERY, FORM, POWER, TAU, GAIN, NORM_SCALE)
        v = load_rows(values, tokens, end, head, num_heads, first, V, BV)
        if IS_QUERY:
            v *= load_scalars(inverse, tokens, end, head, num_heads)[:, None]
            weight = load_scalars(weights, tokens, end, head, num_heads)[:, None]
            total1 += tl.sum(phi1 * weight, axis=0)
            total2 += tl.sum(phi2 * weight, axis=0)
        else:
            total1 += tl.sum(phi1, axis=0)
            total2 += tl.sum(phi2, axis=0)
        c, s = load_tables(cos, sin, block, tokens, end, num_tables, D, BD, ROTARY)
        phi1, phi2 = rotate(phi1, phi2, c, s, ROTARY)
        sum1 = product(tl.trans(phi1), v, sum1, DTYPE, PRECISION)
        sum2 = product(tl.trans(phi2), v, sum2, DTYPE, PRECISION)
    store_state(sums, sum1, total1, chunk, head, num_heads, 0, first, D, BD, V, BV, STRIDE)
    store_state(sums, sum2, total2, chunk, head, num_heads, 1, first, D, BD, V, BV, STRIDE)


@triton.jit
def scan_kernel(
    states, initial, final, first_chunks, num_heads, INITIAL_STRIDE, FINAL_STRIDE,
    REVERSE: tl.constexpr, HAS_INITIAL: tl.constexpr, KEEP: tl.constexpr,
    F: tl.constexpr, WIDTH: tl.constexpr, STRIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """From the sums of chunks to the states before them, in place (if KEEP), and to the state after all.

    Chunks are taken in order, or in reverse; grid (sequences · H, blocks of a state's F · WIDTH numbers).
    """
    program = tl.program_id(0).to(tl.int64)
    sequence, head = program // num_heads, program % num_heads
    numbers = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    row, column = numbers // WIDTH, numbers % WIDTH
    inside = row < F
    start, end = tl.load(first_chunks + sequence), tl.load(first_chunks + sequence + 1)
    running = tl.zeros((BLOCK,), tl.float32)
    if HAS_INITIAL:
        running = tl.load(initial + (program * F + row) * INITIAL_STRIDE + column, mask=inside, other=0.0)
    for i in range(start, end):
        chunk = end - 1 - (i - start) if REVERSE else i
        place = states + ((chunk * num_heads + head) * F + row) * STRIDE + column
        update = tl.load(place, mask=inside, other=0.0)
        if KEEP:
            tl.store(place, running, mask=inside)
        running += update
    tl.store(final + (program * F + row) * FINAL_STRIDE + column, running, mask=inside)


def scan_constants(plan: Plan, reverse: bool, has_initial: bool) -> dict[str, Any]:
    """The constant arguments of the scan."""
    return {
        "REVERSE": reverse,
        "HAS_INITIAL": has_initial,
        "KEEP": plan.causal,
        "F": 2 * plan.D,
        "WIDTH": plan.V + 1,
        "STRIDE": plan.stride,
        "BLOCK": SCAN_BLOCK,
    }
