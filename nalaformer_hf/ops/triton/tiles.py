"""How kernels find and load their tiles, and how they multiply them.

Tokens of all batch rows stand behind one another, (tokens, H, width), cut into sequences and those into
chunks (`plan.py`). All address arithmetic is int64.
"""

import triton
import triton.language as tl
from triton import knobs

INTERPRETED: tl.constexpr = tl.constexpr(knobs.runtime.interpret)


@triton.jit
def rounded(x, DTYPE: tl.constexpr):
    """x in DTYPE, rounded to nearest, ties to even; the interpreter by itself cuts bf16 off."""
    if INTERPRETED and tl.bfloat16 == DTYPE:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -0x10000
        x = bits.to(tl.float32, bitcast=True)
    return x.to(DTYPE)


@triton.jit
def chunk_span(chunk, chunk_starts, chunk_sequences, bounds, C: tl.constexpr):
    """First token of a chunk, the token behind its last one, and its sequence."""
    start = tl.load(chunk_starts + chunk)
    sequence = tl.load(chunk_sequences + chunk)
    return start, tl.minimum(start + C, tl.load(bounds + sequence + 1)), sequence


@triton.jit
def load_rows(pointer, tokens, end, head, num_heads, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Columns first.. of one head's rows of a (tokens, H, WIDTH) tensor: (n, BLOCK) in fp32, zero outside."""
    columns = first + tl.arange(0, BLOCK)
    rows = pointer + (tokens * num_heads + head) * WIDTH
    inside = (tokens < end)[:, None] & (columns < WIDTH)[None, :]
    return tl.load(rows[:, None] + columns[None, :], mask=inside, other=0.0).to(tl.float32)


@triton.jit
def store_rows(pointer, x, tokens, end, head, num_heads, first, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    """Writes what `load_rows` would read."""
    columns = first + tl.arange(0, BLOCK)
    rows = pointer + (tokens * num_heads + head) * WIDTH
    inside = (tokens < end)[:, None] & (columns < WIDTH)[None, :]
    tl.store(rows[:, None] + columns[None, :], rounded(x, pointer.dtype.element_ty), mask=inside)


@triton.jit
def load_scalars(pointer, tokens, end, head, num_heads):
    """One head's numbers of a (tokens, H) tensor in fp32, zero outside."""
    return tl.load(pointer + tokens * num_heads + head, mask=tokens < end, other=0.0)


@triton.jit
def load_tables(
    cos, sin, start, tokens, end, num_tables, D: tl.constexpr, BD: tl.constexpr, ROTARY: tl.constexpr
):
    """Rotary tables (n, BD) of the tokens of a tile that begins at `start`.

    Tables (num_tables, D) are used again for each batch row, and a tile never crosses the end of one.
    """
    if ROTARY == "none":
        return 0.0, 0.0
    else:
        dims = tl.arange(0, BD)
        rows = (tokens + (start % num_tables - start)) * D
        inside = (tokens < end)[:, None] & (dims < D)[None, :]
        c = tl.load((cos + rows)[:, None] + dims[None, :], mask=inside, other=0.0)
        s = tl.load((sin + rows)[:, None] + dims[None, :], mask=inside, other=0.0)
        return c, s


@triton.jit
def state_offsets(
    slot, head, num_heads, half: tl.constexpr, column, D: tl.constexpr, BD: tl.constexpr, STRIDE
):
    """Offsets (BD, 1) of one half's rows of a (slots, H, 2D, STRIDE) array of states [S | z], at a column."""
    dims = tl.arange(0, BD)
    row = (slot * num_heads + head) * (2 * D) + half * D + dims
    return (row * STRIDE + column)[:, None]


@triton.jit
def load_state(
    states, slot, head, num_heads, half: tl.constexpr, first,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Columns first.. of one half of S: (BD, BV) in fp32, zero outside."""
    columns = tl.arange(0, BV)
    offsets = state_offsets(slot, head, num_heads, half, first, D, BD, STRIDE) + columns[None, :]
    inside = (tl.arange(0, BD) < D)[:, None] & (first + columns < V)[None, :]
    return tl.load(states + offsets, mask=inside, other=0.0)


@triton.jit
def load_normaliser(
    states, slot, head, num_heads, half: tl.constexpr,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """One half of z: (BD,) in fp32, zero outside."""
    dims = tl.arange(0, BD)
    row = (slot * num_heads + head) * (2 * D) + half * D + dims
    return tl.load(states + row * STRIDE + V, mask=dims < D, other=0.0)


@triton.jit
def store_state(
    states, S, z, slot, head, num_heads, half: tl.constexpr, first,
    D: tl.constexpr, BD: tl.constexpr, V: tl.constexpr, BV: tl.constexpr, STRIDE: tl.constexpr,
):  # fmt: skip
    """Writes what `load_state` would read and, with the first columns, what `load_normaliser` would."""
    columns = tl.arange(0, BV)[None, :]
    dims = (tl.arange(0, BD) < D)[:, None]
    offsets = state_offsets(slot, head, num_heads, half, first, D, BD, STRIDE)
    tl.store(states + offsets + columns, S, mask=dims & (first + columns < V))
    if first == 0:
        tl.store(states + offsets + V, z[:, None], mask=dims)


@triton.jit
def _tf32(x):
    """x rounded to nearest in tf32, which keeps ten bits behind the point; a GPU's NaN would round to -0."""
    bits = (x.to(tl.int32, bitcast=True) + 0x1000) & -0x2000
    return tl.where(x == x, bits.to(tl.float32, bitcast=True), x)


@triton.jit
def product(a, b, acc, DTYPE: tl.constexpr, PRECISION: tl.constexpr):
    """acc + a @ b with operands in DTYPE and sums in fp32.

    "tf32": rounded here, since the processor cuts the other bits off, and sums of features add that bias up.
    "tf32x3" is Triton's precision of that name, but split while the elements are spread over all threads:
    each warp holds whole rows of an operand, and there is no room for both parts of them.
    """
    a, b = rounded(a, DTYPE), rounded(b, DTYPE)
    if INTERPRETED:  # the interpreter's own products in half precision are garbage
        a, b = a.to(tl.float32), b.to(tl.float32)
    if PRECISION == "tf32x3":
        large_a, large_b = _tf32(a), _tf32(b)
        acc = tl.dot(_tf32(a - large_a), large_b, acc, input_precision="tf32")
        acc = tl.dot(large_a, _tf32(b - large_b), acc, input_precision="tf32")
        return tl.dot(large_a, large_b, acc, input_precision="tf32")
    if PRECISION == "tf32" and tl.float32 == DTYPE:
        a, b = _tf32(a), _tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)
