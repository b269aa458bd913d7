"""NaLa linear attention in plain torch: the chunked form for training, the step form for decoding.

Letters: B batch, T tokens, N chunks, n chunks of a segment, C tokens a chunk, H heads, D head dim of q and k,
F feature width, V head dim of v, R sequences a row (1, or those of a packed row).

    o_t = φ̃_q(q_t)·S_t / φ_q(q_t)·z_t,      S_t = Σ_{s≤t} φ̃_k(k_s) v_sᵀ,      z_t = Σ_{s≤t} φ_k(k_s)

The state is one matrix [S | z] a head, (F, V + 1). Features are computed from q and k one segment of chunks
at a time, in the forward and again in the backward, so that no pass keeps them for all tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from transformers.utils.generic import maybe_autocast

from .chunking_nala import ChunkLayout, Segment, chunk_layout, cut_segments
from .feature_maps_nala import (
    Features,
    FeatureSpec,
    apply_rotary,
    features,
    features_grad,
    map_features,
    upcast,
)

CHUNK_SIZE = 64
# Elements of q whose features are in memory together: few enough for a CPU's cache, enough to fill a GPU.
SEGMENT_SIZE = {"cpu": 1 << 18, "cuda": 1 << 26}

Rotary = tuple[Tensor, Tensor]


class _Plan(NamedTuple):
    """What does not change between segments."""

    layout: ChunkLayout
    segments: list[Segment]
    spec: FeatureSpec
    rotary_layout: str
    eps: float

    def owners(self, segment: Segment, device: torch.device) -> Tensor:
        """The sequence of each chunk of a segment, (n,)."""
        return torch.tensor(self.layout.sequence_of_chunk[segment.chunks], device=device)


class _Side(NamedTuple):
    """Features of a segment's rows of q or k, (B, n, H, C, F): `turned` above the line, `plain` below it."""

    mapped: Features
    turned: Tensor
    tables: Rotary | None
    plan: _Plan
    is_query: bool

    @property
    def plain(self) -> Tensor:
        return self.mapped.phi

    def sums(self, values: Tensor, weights: Tensor | float) -> Tensor:
        """Σ over each chunk's tokens of [turned ⊗ values | plain · weight]: (B, n, H, F, V + 1)."""
        totals = (self.plain * weights).sum(-2)
        return torch.cat((self.turned.mT @ values, totals.unsqueeze(-1)), dim=-1)

    def reads(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """Features times states [S | z]: (B, n, H, C, V) and (B, n, H, C, 1)."""
        S, z = _split(states)
        return self.turned @ S, (self.plain * z).sum(-1, keepdim=True)

    def grad(self, grad_turned: Tensor, grad_plain: Tensor) -> Tensor:
        """Gradient of the rows of q or k."""
        if self.tables is not None:
            grad_turned = apply_rotary(grad_turned, *self.tables, self.plan.rotary_layout, transpose=True)
        return features_grad(self.mapped, grad_turned.add_(grad_plain), self.plan.spec, self.is_query)


def _side(
    x: Tensor,
    rotary: Rotary | None,
    segment: Segment,
    plan: _Plan,
    *,
    is_query: bool,
    need_grad: bool = False,
) -> _Side:
    """The features of one segment of q or k, (B, N, C, H, D)."""
    mapped = features(_rows_of(x, segment), plan.spec, is_query, need_grad)
    if rotary is None:
        return _Side(mapped, mapped.phi, None, plan, is_query)
    cos, sin = (table[segment].unsqueeze(2) for table in rotary)
    turned = apply_rotary(mapped.phi, cos, sin, plan.rotary_layout)
    return _Side(mapped, turned, (cos, sin), plan, is_query)


def _rows_of(x: Tensor, segment: Segment) -> Tensor:
    """(B, N, C, H, D) to the contiguous, upcast (B, n, H, C, D) of one segment."""
    return upcast(x[segment]).transpose(2, 3).contiguous()


def _write_rows(target: Tensor, segment: Segment, rows: Tensor) -> None:
    """Puts the (B, n, H, C, X) rows of a segment into a (B, N, C, H, X) target."""
    target[segment] = rows.transpose(2, 3)


def _split(states: Tensor) -> tuple[Tensor, Tensor]:
    """S (..., F, V) and z as a row, (..., 1, F): a product with a column is slow."""
    return states[..., :-1], states[..., -1].unsqueeze(-2).contiguous()


def _causal_product(a: Tensor, b: Tensor) -> Tensor:
    """a bᵀ within each chunk, for s ≤ t."""
    return (a @ b.mT).tril_()


def _normalise(num: Tensor, den: Tensor) -> tuple[Tensor, Tensor]:
    """o = num / den and 1 / den; a denominator of zero, or so near that a gradient overflows, gives o = 0."""
    finfo = torch.finfo(den.dtype)
    inverse = den.masked_fill(den.abs() < finfo.tiny / finfo.eps, math.inf).reciprocal()
    return num * inverse, inverse


def _normalise_grad(grad_o: Tensor, o: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of numerator and denominator from that of o."""
    grad_num = grad_o * inverse
    return grad_num, (grad_num * o).sum(-1, keepdim=True).neg_()


def _scan(
    sums: Tensor,
    running: Tensor | None,
    entering: Tensor,
    leaving: Tensor,
    segment: Segment,
    layout: ChunkLayout,
    reverse: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Exclusive running sums over each sequence's chunks, from `entering`; its last sum goes to `leaving`.

    Forward they are the states before each chunk; with `reverse`, from the last chunk to the first, the
    adjoint of that: the gradients of the chunks' sums.
    """
    states = torch.empty_like(sums)
    begins, ends = layout.starts_sequence, layout.ends_sequence
    chunks = list(enumerate(segment.chunk_numbers))
    if reverse:
        begins, ends = ends, begins
        chunks.reverse()
    for i, chunk in chunks:
        owner = layout.sequence_of_chunk[chunk], segment.rows
        if begins(chunk):
            running = entering[owner]
        assert running is not None  # the first chunk of a row, in this order, begins a sequence
        states[:, i] = running
        running = running + sums[:, i]
        if ends(chunk):
            leaving[owner] = running
    return states, running


def full_precision(method: Callable) -> Callable:
    """Decorator: a forward or backward of an autograd.Function with autocast off, which would round."""

    @wraps(method)
    def without_autocast(ctx, x: Tensor, *args):
        with maybe_autocast(x.device.type, enabled=False):
            return method(ctx, x, *args)

    return without_autocast


class _Causal(torch.autograd.Function):
    """Chunked causal attention: q, k, v (B, N, C, H, ·), states (R, B, H, F, V + 1)."""

    @staticmethod
    @full_precision
    def forward(ctx, q, k, v, initial, cos, sin, plan: _Plan):
        rotary = None if cos is None else (cos, sin)
        o = torch.empty(v.shape, dtype=initial.dtype, device=v.device)
        inverse = o.new_empty(*o.shape[:-1], 1)
        final = initial.clone()
        running, entries = None, []
        for segment in plan.segments:
            entries.append(None if plan.layout.starts_sequence(segment.chunks.start) else running)
            values = _rows_of(v, segment)
            queries = _side(q, rotary, segment, plan, is_query=True)
            keys = _side(k, rotary, segment, plan, is_query=False)
            states, running = _scan(keys.sums(values, 1.0), running, initial, final, segment, plan.layout)
            num, den = queries.reads(states)
            scores = _causal_product(queries.turned, keys.turned)
            num += scores @ values
            scores = scores if rotary is None else _causal_product(queries.plain, keys.plain)
            den += scores.sum(-1, keepdim=True)
            rows, inverse_rows = _normalise(num, den)
            _write_rows(o, segment, rows)
            _write_rows(inverse, segment, inverse_rows)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, initial, cos, sin, o, inverse, *entries)
        return o, final

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_o, grad_final):
        q, k, v, initial, cos, sin, o, inverse, *entries = ctx.saved_tensors
        plan: _Plan = ctx.plan
        rotary = None if cos is None else (cos, sin)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_initial, unused_final = grad_final.clone(), initial.clone()
        running = None
        for entry, segment in reversed(list(zip(entries, plan.segments, strict=True))):
            values = _rows_of(v, segment)
            queries = _side(q, rotary, segment, plan, is_query=True, need_grad=True)
            keys = _side(k, rotary, segment, plan, is_query=False, need_grad=True)
            states, _ = _scan(keys.sums(values, 1.0), entry, initial, unused_final, segment, plan.layout)
            grad_num, grad_den = _normalise_grad(*(_rows_of(x, segment) for x in (grad_o, o, inverse)))
            grad_sums, running = _scan(
                queries.sums(grad_num, grad_den),
                running,
                grad_final,
                grad_initial,
                segment,
                plan.layout,
                reverse=True,
            )
            # through the states
            (S, z), (grad_S, grad_z) = _split(states), _split(grad_sums)
            grad_rq, grad_fq = grad_num @ S.mT, grad_den * z
            grad_rk, grad_fk = values @ grad_S.mT, grad_z
            grad_values = keys.turned @ grad_S
            # within the chunks
            grad_scores = grad_num @ values.mT
            if rotary is None:
                grad_scores += grad_den
            else:
                grad_weights = grad_den.expand_as(grad_scores).tril()
                grad_fq = grad_fq + grad_weights @ keys.plain
                grad_fk = grad_fk + grad_weights.mT @ queries.plain
            grad_scores.tril_()
            grad_rq += grad_scores @ keys.turned
            grad_rk += grad_scores.mT @ queries.turned
            grad_values += _causal_product(queries.turned, keys.turned).mT @ grad_num
            _write_rows(grad_q, segment, queries.grad(grad_rq, grad_fq))
            _write_rows(grad_k, segment, keys.grad(grad_rk, grad_fk))
            _write_rows(grad_v, segment, grad_values)
        return grad_q, grad_k, grad_v, grad_initial, None, None, None


class _Bidirectional(torch.autograd.Function):
    """Every token reads the sums over its whole sequence: q, k, v (B, N, C, H, ·), in two passes."""

    @staticmethod
    @full_precision
    def forward(ctx, q, k, v, cos, sin, plan: _Plan):
        rotary = None if cos is None else (cos, sin)
        batch, _, _, heads, width = v.shape
        o = torch.empty(v.shape, dtype=upcast(v[:0]).dtype, device=v.device)
        inverse = o.new_empty(*o.shape[:-1], 1)
        num_sequences = len(plan.layout.lengths)
        totals = o.new_zeros(batch, num_sequences, heads, plan.spec.width(q.shape[-1]), width + 1)
        for segment in plan.segments:
            values = _rows_of(v, segment)
            keys = _side(k, rotary, segment, plan, is_query=False)
            totals[segment.rows].index_add_(1, plan.owners(segment, v.device), keys.sums(values, 1.0))
        guards = _guards(plan, o)
        for segment in plan.segments:
            owners = plan.owners(segment, v.device)
            num, den = _side(q, rotary, segment, plan, is_query=True).reads(totals[segment.rows, owners])
            rows, inverse_rows = _normalise(num, den + guards[owners])
            _write_rows(o, segment, rows)
            _write_rows(inverse, segment, inverse_rows)
        ctx.plan = plan
        ctx.save_for_backward(q, k, v, cos, sin, o, inverse, totals)
        return o

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_o):
        q, k, v, cos, sin, o, inverse, totals = ctx.saved_tensors
        plan: _Plan = ctx.plan
        rotary = None if cos is None else (cos, sin)
        grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
        grad_totals = torch.zeros_like(totals)
        for segment in plan.segments:
            owners = plan.owners(segment, v.device)
            queries = _side(q, rotary, segment, plan, is_query=True, need_grad=True)
            grad_num, grad_den = _normalise_grad(*(_rows_of(x, segment) for x in (grad_o, o, inverse)))
            grad_totals[segment.rows].index_add_(1, owners, queries.sums(grad_num, grad_den))
            S, z = _split(totals[segment.rows, owners])
            _write_rows(grad_q, segment, queries.grad(grad_num @ S.mT, grad_den * z))
        for segment in plan.segments:
            values = _rows_of(v, segment)
            keys = _side(k, rotary, segment, plan, is_query=False, need_grad=True)
            grad_S, grad_z = _split(grad_totals[segment.rows, plan.owners(segment, v.device)])
            _write_rows(grad_k, segment, keys.grad(values @ grad_S.mT, grad_z))
            _write_rows(grad_v, segment, keys.turned @ grad_S)
        return grad_q, grad_k, grad_v, None, None, None


def _guards(plan: _Plan, like: Tensor) -> Tensor:
    """ε times the length of each sequence: the published ε is added to φ_q·mean(φ_k)."""
    return like.new_tensor([plan.eps * length for length in plan.layout.lengths]).view(-1, 1, 1, 1)


def widen_tables(rotary: Rotary, dtype: torch.dtype, copies: int = 2) -> Rotary:
    """Tables (T, X) or (B, T, X) to (1 or B, T, F): the halves of the features turn by the same angles."""
    cos, sin = (x.to(dtype).tile(copies).view(-1, x.shape[-2], copies * x.shape[-1]) for x in rotary)
    return cos, sin


def chunked_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    spec: FeatureSpec,
    *,
    rotary: Rotary | None = None,
    rotary_layout: str = "phase",
    causal: bool = True,
    eps: float = 0.0,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention in chunks; arguments are trusted (`nalaformer_hf.ops.nala_attention` checks them).

    Args:
        q: (B, T, H, D), any float dtype.
        k: As q.
        v: (B, T, H, V).
        spec: Feature maps.
        rotary: Tables (T, X) or (B, T, X) for the numerator: X = F / 2 angles ("phase"), or D of each half
            ("axial").
        rotary_layout: "phase" or "axial".
        causal: Whether token t sees s ≤ t only.
        eps: Added to φ_q·mean(φ_k), bidirectional only: the causal ratio needs none, since scaling all keys
            does not change it; a denominator of zero gives o = 0.
        initial_state: [S | z], (B, H, F, V + 1), or one a sequence, (R, H, F, V + 1), with `cu_seqlens`.
        cu_seqlens: (R + 1,) bounds of the sequences of one packed row, B = 1.
        chunk_size: C.

    Returns:
        o (B, T, H, V) and the final state, in fp32 (float64 for float64 inputs); no state if not `causal`.
    """
    layout = chunk_layout(q.shape[1], chunk_size, cu_seqlens)
    size = SEGMENT_SIZE["cpu" if q.device.type == "cpu" else "cuda"] // (q.shape[2] * q.shape[3])
    plan = _Plan(layout, cut_segments(layout, q.shape[0], size), spec, rotary_layout, eps)
    q, k, v = layout.split(q), layout.split(k, fill=spec.null_key), layout.split(v)
    dtype = upcast(v[:0]).dtype
    cos = sin = None
    if rotary is not None:
        copies = spec.width(q.shape[-1]) // rotary[0].shape[-1]
        tables = (layout.split(x) for x in widen_tables(rotary, dtype, copies))
        cos, sin = (x.expand(q.shape[0], *x.shape[1:]) for x in tables)
    if not causal:
        return layout.merge(_Bidirectional.apply(q, k, v, cos, sin, plan)), None
    batch, heads = q.shape[0], q.shape[3]
    if initial_state is None:
        num_states = len(layout.lengths) if cu_seqlens is not None else batch
        initial_state = v.new_zeros(num_states, heads, spec.width(q.shape[-1]), v.shape[-1] + 1, dtype=dtype)
    sequence_dim = 0 if cu_seqlens is None else 1
    initial = upcast(initial_state).unsqueeze(sequence_dim)
    o, final = _Causal.apply(q, k, v, initial, cos, sin, plan)
    return layout.merge(o), final.squeeze(sequence_dim)


def step_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: Tensor,
    spec: FeatureSpec,
    *,
    rotary: Rotary | None = None,
    rotary_layout: str = "phase",
) -> tuple[Tensor, Tensor]:
    """One token: q, k (B, 1, H, D), v (B, 1, H, V), state [S | z] (B, H, F, V + 1).

    Returns o (B, 1, H, V) and the new state.
    """
    fq, fk = map_features(q[:, 0], spec, True), map_features(k[:, 0], spec, False)
    v = upcast(v[:, 0])
    if rotary is None:
        w = torch.cat((v, v.new_ones(*v.shape[:-1], 1)), dim=-1)
        state = torch.addcmul(state, fk.unsqueeze(-1), w.unsqueeze(-2))
        num, den = (fq.unsqueeze(-2) @ state).squeeze(-2).split((v.shape[-1], 1), dim=-1)
    else:
        cos, sin = widen_tables(rotary, fq.dtype, fq.shape[-1] // rotary[0].shape[-1])
        rq, rk = (apply_rotary(phi, cos, sin, rotary_layout) for phi in (fq, fk))
        state = state + torch.cat((rk.unsqueeze(-1) * v.unsqueeze(-2), fk.unsqueeze(-1)), dim=-1)
        num = (rq.unsqueeze(-2) @ state[..., :-1]).squeeze(-2)
        den = (fq * state[..., -1]).sum(-1, keepdim=True)
    return _normalise(num, den)[0].unsqueeze(1), state
