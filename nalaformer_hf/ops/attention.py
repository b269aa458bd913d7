"""The public attention function: checks at the door, then one of several forms of the same sum.

Letters: B batch, T tokens, H heads, D head dim of q and k, V head dim of v, F feature width (2D; D for the
baselines), R sequences of a packed row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from ..modeling.feature_maps_nala import FeatureSpec
from ..modeling.linear_attention_nala import chunked_attention
from ._checks import (
    check_attention,
    check_cu_seqlens,
    check_flag,
    check_rotary,
    check_state,
)
from .dispatch import resolve_backend
from .reference import quadratic_attention, recurrent_attention

Rotary = tuple[Tensor, Tensor]
State = tuple[Tensor, Tensor]


def nala_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    form: str = "cosine",
    power: float = 3.0,
    tau: float = 0.5,
    gain: float = 20.0,
    norm_scale: float = 1.0,
    rotary: Rotary | None = None,
    rotary_layout: str = "phase",
    causal: bool = True,
    eps: float = 1e-6,
    initial_state: State | None = None,
    output_final_state: bool = False,
    cu_seqlens: Tensor | None = None,
    backend: str = "auto",
) -> tuple[Tensor, State | None]:
    """Norm-aware linear attention (NaLaFormer, arXiv 2506.21137, Eq. 8 and 16).

        o_t = φ̃_q(q_t)·S_t / φ_q(q_t)·z_t,      S_t = Σ_s φ̃_k(k_s) v_sᵀ,      z_t = Σ_s φ_k(k_s)

    The sums run over s ≤ t if `causal`, else over all tokens. φ̃ is φ with rotary embedding: the numerator
    only is rotated, as in the published code, so that z, a sum of positive features, cannot reach 0.

    ε: the bidirectional form adds it to φ_q·mean(φ_k), as the published code does. The causal form takes
    none, and `eps` has no effect there: z grows with |k|^λ, so that a constant would take the mass of small
    keys. Without one the ratio does not change when all keys of a head are scaled; a denominator of zero
    gives o = 0.

    Everything is computed in fp32 (fp64 for fp64 inputs), with autocast off.

    Args:
        q: Queries (B, T, H, D), fp32, fp64, fp16 or bf16.
        k: Keys, same shape.
        v: Values (B, T, H, V).
        form: "cosine" (Eq. 16), "polarity" (published classification code), or the baselines "relu" and
            "elu".
        power: λ of the feature maps, at least 1.
        tau: τ, λτ ≥ 1.
        gain: α of the cosine form.
        norm_scale: s in p = λ (τ + tanh(s ||q||)); 1 in the paper, 0 for a fixed power.
        rotary: Tables (cos, sin), fp32 or fp64, without gradient.
        rotary_layout: "phase" rotates the pairs (i, i + F/2) by tables (T, F/2) or (B, T, F/2), which in the
            cosine form adds the angle to f; "axial" the pairs (2i, 2i + 1) of each D-wide half by tables (T,
            D), D divisible by 4.
        causal: Whether token t sees s ≤ t only.
        eps: ε of the bidirectional form.
        initial_state: (S (B, H, F, V), z (B, H, F)), fp32 (fp64 with fp64 inputs), in the basis of
            `nala_feature_maps`; with `cu_seqlens` R in place of B. Causal only.
        output_final_state: Whether to return the state after the last token. Causal only.
        cu_seqlens: Bounds (R + 1,), int32 or int64, of R sequences packed into one row (B = 1); some may be
            empty.
        backend: "reference" (all T² weights), "recurrent" (token by token), "torch" (chunks, linear in T),
            "triton" (the same in fused kernels, on a GPU), or "auto", see `resolve_backend`.

    Returns:
        o (B, T, H, V) in v's dtype, and the final state or None.

    Raises:
        TypeError: An argument is of the wrong type or dtype.
        ValueError: An argument has a value or a shape that does not fit.
    """
    spec = FeatureSpec(form, power, tau, gain, norm_scale)
    check_attention(q, k, v, spec, causal, eps)
    check_rotary(rotary, rotary_layout, q, spec)
    check_cu_seqlens(cu_seqlens, q)
    num_sequences = q.shape[0] if cu_seqlens is None else len(cu_seqlens) - 1
    check_state(initial_state, q, v, spec, num_sequences)
    check_flag("output_final_state", output_final_state)
    backend = resolve_backend(
        backend, device=q.device, dtype=v.dtype, form=form, head_dim=q.shape[3], value_head_dim=v.shape[3]
    )
    _check_direction(causal, initial_state, output_final_state, backend)

    with torch.autocast(q.device.type, enabled=False):
        state = None if initial_state is None else _enter(initial_state, spec)
        if backend in ("torch", "triton"):
            o, state = _fast_form(backend)(
                q,
                k,
                v,
                spec,
                rotary=rotary,
                rotary_layout=rotary_layout,
                causal=causal,
                eps=eps,
                initial_state=state,
                cu_seqlens=cu_seqlens,
            )
        else:
            quadratic = partial(quadratic_attention, causal=causal, eps=eps)
            attend = quadratic if backend == "reference" else recurrent_attention
            attend = partial(attend, spec=spec, layout=rotary_layout)
            state = _no_state(q, v, spec, num_sequences) if state is None else state
            o, state = _each_sequence(attend, q, k, v, rotary, state, cu_seqlens)
        if state is None or not output_final_state:
            return o.to(v.dtype), None
        return o.to(v.dtype), _leave(state, spec)


def _check_direction(
    causal: bool, initial_state: State | None, output_final_state: bool, backend: str
) -> None:
    """Only a causal sum has a state, and only a causal sum can be taken token by token."""
    if causal:
        return
    if initial_state is not None:
        raise ValueError(
            "initial_state: wanted None with causal=False (a bidirectional sum has no state), got one"
        )
    if output_final_state:
        raise ValueError(
            "output_final_state: wanted False with causal=False (a bidirectional sum has no state), got True"
        )
    if backend == "recurrent":
        raise ValueError("backend: wanted 'torch', 'reference' or 'auto' with causal=False, got 'recurrent'")


def _fast_form(backend: str) -> Callable[..., Any]:
    if backend == "torch":
        return chunked_attention
    from .triton.attention import fused_attention

    return fused_attention


def _each_sequence(
    attend: Callable[..., tuple[Tensor, Tensor]],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    rotary: Rotary | None,
    state: Tensor,
    cu_seqlens: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """`attend` on each packed sequence by itself; an empty one hands its state on."""
    if cu_seqlens is None:
        return attend(q, k, v, rotary=rotary, state=state)
    outputs, states = [], list(state.split(1))
    for i, (start, end) in enumerate(pairwise(cu_seqlens.tolist())):
        if start == end:
            continue
        tables = rotary and tuple(table[..., start:end, :] for table in rotary)
        o, states[i] = attend(*(x[:, start:end] for x in (q, k, v)), rotary=tables, state=states[i])
        outputs.append(o)
    return torch.cat(outputs, dim=1), torch.cat(states)


def _enter(state: State, spec: FeatureSpec) -> Tensor:
    """[S | z] (R, H, F, V + 1), turned by π/4 as `quadratic_attention` and the fast forms keep it."""
    return _turn(torch.cat((state[0], state[1].unsqueeze(-1)), dim=-1), spec, 1)


def _no_state(q: Tensor, v: Tensor, spec: FeatureSpec, num_sequences: int) -> Tensor:
    dtype = torch.promote_types(q.dtype, torch.float32)
    return v.new_zeros(num_sequences, q.shape[2], spec.width(q.shape[3]), v.shape[3] + 1, dtype=dtype)


def _leave(state: Tensor, spec: FeatureSpec) -> State:
    """(S, z) in the basis of `nala_feature_maps`."""
    state = _turn(state, spec, -1)
    return state[..., :-1], state[..., -1]


def _turn(state: Tensor, spec: FeatureSpec, sign: int) -> Tensor:
    """Turns the feature pairs (i, i + D) of the cosine form by ±π/4; the other forms have one basis."""
    if spec.form != "cosine":
        return state
    first, second = state.chunk(2, dim=-2)
    return torch.cat((first - sign * second, second + sign * first), dim=-2) * math.sqrt(0.5)
