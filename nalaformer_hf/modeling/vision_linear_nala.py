"""Linear attention of the vision family: every token reads the means over all tokens.

Letters: B batch, N tokens, H heads, D head dim of q and k, V head dim of v, F feature width; in a segment r
rows of the batch and n tokens.

    o_n = φ̃_q(q_n)·S / (φ_q(q_n)·z + ε),      S = mean φ̃_k(k) vᵀ,      z = mean φ_k(k)

φ̃ is φ after the rotary embedding. The polarity form, the published one, has its own two passes over segments
that stay in a CPU's cache, with two dense halves, [x < 0] A and [x > 0] A, in place of wide features.
Only q, k, v, o, S, z and the denominators are kept for the backward, which makes the features anew.
"""

from __future__ import annotations

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from .chunking_nala import cut_range
from .feature_maps_nala import FeatureSpec, apply_rotary, map_features, upcast
from .linear_attention_nala import chunked_attention, full_precision
from .linear_nala import is_traced
from .vision_rotary_nala import AxialTables, as_pairs

EPS = 1e-6  # published code
# Numbers of q in a segment: smaller ones cost a CPU's threads more calls, larger ones memory.
SEGMENT_SIZE = {"cpu": 1 << 19, "cuda": 1 << 26}


def vision_linear_attention(
    q: Tensor, k: Tensor, v: Tensor, spec: FeatureSpec, tables: AxialTables | None
) -> Tensor:
    """(B, N, H, D) q and k, (B, N, H, V) v to (B, N, H, V), in fp32 (float64 for float64)."""
    if is_traced():
        return plain_attention(q, k, v, spec, tables)
    if spec.form != "polarity":
        rotary = None if tables is None else tables.cos_sin
        o, _ = chunked_attention(q, k, v, spec, rotary=rotary, rotary_layout="axial", causal=False, eps=EPS)
        return o
    return _Polarity.apply(q, k, v, None if tables is None else tables.turns, spec)


def plain_attention(q: Tensor, k: Tensor, v: Tensor, spec: FeatureSpec, tables: AxialTables | None) -> Tensor:
    """`vision_linear_attention` as one would write it, for compilers and exporters."""
    fq, fk = map_features(q, spec, True), map_features(k, spec, False)
    den = (fq * fk.mean(dim=1, keepdim=True)).sum(-1, keepdim=True) + EPS
    if tables is not None:
        copies = fq.shape[-1] // q.shape[-1]
        cos, sin = (x.repeat(1, copies).unsqueeze(1) for x in tables.cos_sin)
        fq, fk = (apply_rotary(phi, cos, sin, "axial") for phi in (fq, fk))
    fq, fk, v = (x.transpose(1, 2) for x in (fq, fk, upcast(v)))
    state = fk.mT @ (v / q.shape[1])
    return (fq @ state).transpose(1, 2) / den


def _dense(x: Tensor) -> Tensor:
    """(r, n, H, ·) to contiguous (r, H, n, ·), upcast; not a copy where it is that already."""
    return upcast(x).transpose(1, 2).contiguous()


class _Norms(NamedTuple):
    """Of queries (r, H, n, D), (r, H, n, 1) each; a norm of zero is infinite."""

    norm: Tensor
    tanh_norm: Tensor
    exponent: Tensor


def _norms(x: Tensor, spec: FeatureSpec) -> _Norms:
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    tanh_norm = torch.tanh(norm * spec.norm_scale)
    exponent = spec.power * (spec.tau + tanh_norm)
    return _Norms(norm.masked_fill_(norm == 0, torch.inf), tanh_norm, exponent)


def _halves(x: Tensor, norm: Tensor | float, exponent: Tensor | float) -> Tensor:
    """[x < 0] A and [x > 0] A, A = |x / norm|^exponent: (2, ...) in memory that holds all in between."""
    halves = x.new_empty(2, *x.shape)
    signed, positive = halves
    torch.div(x, norm, out=signed)
    signed.abs_().pow_(exponent).copysign_(x)
    torch.clamp_min(signed, 0, out=positive)
    torch.sub(positive, signed, out=signed)
    return halves


def _query_halves(x: Tensor, norms: _Norms) -> Tensor:
    return _halves(x, norms.norm, norms.exponent)


def _key_halves(x: Tensor, spec: FeatureSpec) -> Tensor:
    return _halves(x, 1.0, spec.power)


def _turn_(halves: Tensor, turns: Tensor | None) -> Tensor:
    """The rotary embedding of each half, in place; with conjugate turns, its adjoint."""
    if turns is not None:
        as_pairs(halves).mul_(turns)
    return halves


def _product(a: Tensor, b: Tensor) -> Tensor:
    """a ⊙ b summed over both halves, (2, ...) each."""
    return (a[0] * b[0]).addcmul_(a[1], b[1])


def _inverse(x: Tensor) -> Tensor:
    """1 / x, and 0 at 0."""
    return x / (x * x).add_(torch.finfo(x.dtype).tiny)


def _matmul(a: Tensor, b: Tensor) -> Tensor:
    """Σ over both halves of a b, (2, r, H, ·, ·) each."""
    first = (a[0] @ b[0]).flatten(0, 1)
    total = torch.baddbmm(first, a[1].flatten(0, 1), b[1].flatten(0, 1), out=first)
    return total.unflatten(0, a.shape[1:3])


class KeySums(NamedTuple):
    """S (2, r, H, D, V) and z (2, r, H, 1, D) of the polarity form: over tokens a sum, or a mean."""

    S: Tensor
    z: Tensor


def sum_keys(k: Tensor, v: Tensor, turns: Tensor | None, spec: FeatureSpec) -> KeySums:
    """The sums over some tokens: k (r, n, H, D), v (r, n, H, V)."""
    halves = _key_halves(_dense(k), spec)
    z = halves.sum(-2, keepdim=True)
    return KeySums(_turn_(halves, turns).mT @ _dense(v), z)


def read_means(q: Tensor, means: KeySums, turns: Tensor | None, spec: FeatureSpec) -> tuple[Tensor, Tensor]:
    """Numerators (r, H, n, V) and inverse denominators (r, H, n, 1) of queries (r, n, H, D)."""
    x = _dense(q)
    halves = _query_halves(x, _norms(x, spec))
    den = _product(halves, means.z).sum(-1, keepdim=True).add_(EPS)
    return _matmul(_turn_(halves, turns), means.S), den.reciprocal_()


class _Polarity(torch.autograd.Function):
    """q, k (B, N, H, D), v (B, N, H, V) of any strides; S (2, B, H, D, V) and z (2, B, H, 1, D) are means."""

    @staticmethod
    @full_precision
    def forward(ctx, q, k, v, turns, spec: FeatureSpec):
        segments = _segments(q)
        batch, num_tokens, heads, width = v.shape
        o = torch.empty(v.shape, dtype=upcast(v[:0]).dtype, device=v.device)
        S = o.new_zeros(2, batch, heads, q.shape[-1], width)
        z = o.new_zeros(2, batch, heads, 1, q.shape[-1])
        inverse = o.new_empty(batch, heads, num_tokens, 1)
        for rows, tokens in segments:
            part = sum_keys(k[rows, tokens], v[rows, tokens], _at(turns, tokens), spec)
            S[:, rows] += part.S
            z[:, rows] += part.z
        S /= num_tokens
        z /= num_tokens
        for rows, tokens in segments:
            means = KeySums(S[:, rows], z[:, rows])
            num, inverse[rows, :, tokens] = read_means(q[rows, tokens], means, _at(turns, tokens), spec)
            torch.mul(num, inverse[rows, :, tokens], out=o[rows, tokens].transpose(1, 2))
        ctx.spec = spec
        ctx.save_for_backward(q, k, v, turns, o, inverse, S, z)
        return o

    @staticmethod
    @once_differentiable
    @full_precision
    def backward(ctx, grad_o):
        q, k, v, turns, o, inverse, S, z = ctx.saved_tensors
        segments, spec = _segments(q), ctx.spec
        grad_q, grad_k, grad_v = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        grad_S, grad_z = torch.zeros_like(S), torch.zeros_like(z)
        for rows, tokens in segments:
            at = _at(turns, tokens)
            queries = _dense(q[rows, tokens])
            norms = _norms(queries, spec)
            halves = _query_halves(queries, norms)
            grad_num = _dense(grad_o[rows, tokens]) * inverse[rows, :, tokens]
            grad_den = (grad_num * _dense(o[rows, tokens])).sum(-1, keepdim=True).neg_()
            grad_z[:, rows] += (halves * grad_den).sum(-2, keepdim=True)
            grad_halves = _turn_(grad_num @ S[:, rows].mT, _conj(at)).addcmul_(grad_den, z[:, rows])
            weighted = _product(grad_halves, halves)  # A · d(loss)/dA
            grad_S[:, rows] += _turn_(halves, at).mT @ grad_num
            grad_q[rows, tokens] = _query_grad(weighted, queries, norms, spec).transpose(1, 2)
        grad_S /= q.shape[1]
        grad_z /= q.shape[1]
        for rows, tokens in segments:
            at, values = _at(turns, tokens), _dense(v[rows, tokens])
            keys = _dense(k[rows, tokens])
            halves = _key_halves(keys, spec)
            grad_halves = _turn_(values @ grad_S[:, rows].mT, _conj(at)).add_(grad_z[:, rows])
            grad = _product(grad_halves, halves).mul_(_inverse(keys)).mul_(spec.power)
            grad_k[rows, tokens] = grad.transpose(1, 2)
            grad_v[rows, tokens] = _matmul(_turn_(halves, at), grad_S[:, rows]).transpose(1, 2)
        return grad_q, grad_k, grad_v, None, None


def _query_grad(weighted: Tensor, x: Tensor, norms: _Norms, spec: FeatureSpec) -> Tensor:
    """Gradient of the queries x: through their direction, and through the exponent's norm."""
    norm, tanh_norm, exponent = norms
    d = x / norm
    slope = (1 - tanh_norm * tanh_norm) * (spec.power * spec.norm_scale)
    log_direction = d.abs().log_().clamp_min_(-1e4)  # finite where weighted is 0
    grad_norm = (weighted * log_direction).sum(-1, keepdim=True).mul_(slope)
    rate = exponent / norm
    along = weighted.sum(-1, keepdim=True).mul_(rate)
    return _inverse(d).mul_(weighted).mul_(rate).addcmul_(d, grad_norm.sub_(along))


def _segments(q: Tensor) -> list[tuple[slice, slice]]:
    """Rows and tokens that are computed together: whole rows, or parts of one."""
    batch, num_tokens, heads, dim = q.shape
    size = max(1, SEGMENT_SIZE["cpu" if q.device.type == "cpu" else "cuda"] // (heads * dim))
    num_rows = min(batch, max(1, size // num_tokens))
    return list(product(cut_range(batch, num_rows), cut_range(num_tokens, size)))


def _at(turns: Tensor | None, tokens: slice) -> Tensor | None:
    return None if turns is None else turns[tokens]


def _conj(turns: Tensor | None) -> Tensor | None:
    return None if turns is None else turns.conj()
