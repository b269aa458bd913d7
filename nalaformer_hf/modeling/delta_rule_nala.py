"""The delta rule and the gated delta rule in plain torch: chunks for training, single steps for decoding.

Letters: B batch, T tokens, N chunks, n chunks of a segment, C tokens a chunk, H heads, K width of q and k,
V head dim of v, R sequences of a packed row, S state (K, V), α = exp(log_decay) or 1, β in [0, 1].

    S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,      o_t = S_tᵀ q_t,      ||k_t|| = 1

This is S_t = α_t S_{t-1} + k_t u_tᵀ with the update u_t = β_t (v_t - α_t S_{t-1}ᵀ k_t). In a chunk that
starts from a state S, with γ_ts = α_{s+1} ⋯ α_t and γ_t = α_1 ⋯ α_t, all updates solve one triangular system
(the UT transform of DeltaNet, arXiv 2406.06484; with decay, arXiv 2412.06464):

    u_t + Σ_{s<t} β_t γ_ts (k_t·k_s) u_s = β_t (v_t - γ_t Sᵀ k_t)
    o_t = γ_t Sᵀ q_t + Σ_{s≤t} γ_ts (q_t·k_s) u_s,           S ← γ_C S + Σ_s γ_Cs k_s u_sᵀ

The inverse of the system needs no state, so only three small products a chunk wait for the chunk before. Each
γ_ts is the exponential of its own sum of log decays, not of a difference of long sums: exact, and at most 1.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from .chunking_nala import chunk_layout

CHUNK_SIZE = 64
# Rows (batch × heads × tokens) that are worked on together, and whose intermediates a backward holds at once.
SEGMENT_ROWS = {"cpu": 1 << 12, "cuda": 1 << 17}


def chunked_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    chunk_size: int = CHUNK_SIZE,
) -> tuple[Tensor, Tensor]:
    """The (gated) delta rule in chunks; arguments are trusted.

    Memory is O(T): of each segment of chunks only the inputs and the state before it are kept, the rest is
    computed again in the backward. A token with k = 0 and log_decay = 0 leaves the state as it is.

    Args:
        q: (B, T, H, K) of unit length (or zero), fp32 or float64: the dtype of the whole computation.
        k: (B, T, H, K), as q.
        v: (B, T, H, V), any float dtype.
        beta: (B, T, H), how much of the value stored at k is replaced.
        log_decay: (B, T, H), log α ≤ 0; None: the delta rule without decay.
        initial_state: S, (B, H, K, V), or one a sequence, (R, H, K, V), with `cu_seqlens`.
        cu_seqlens: (R + 1,) bounds of the sequences of one packed row, B = 1.
        chunk_size: C; changes the result by rounding only.

    Returns:
        o (B, T, H, V) and the final state (B or R, H, K, V), in the dtype of q.
    """
    layout = chunk_layout(q.shape[1], chunk_size, cu_seqlens)
    batch, _, heads, key_dim = q.shape
    if initial_state is None:
        num_states = batch if cu_seqlens is None else len(layout.lengths)
        initial_state = q.new_zeros(num_states, heads, key_dim, v.shape[-1])
    initial = initial_state.to(q.dtype).split(batch)
    states = list(initial)
    segment_rows = SEGMENT_ROWS["cpu" if q.device.type == "cpu" else "cuda"]
    segment_size = max(1, segment_rows // (batch * heads * layout.chunk_size))
    # Views of a split share one backward; slices would each write a gradient of full length.
    inputs = [layout.split(x).split(segment_size, dim=1) for x in (q, k, v, beta)]
    decays = [None] * len(inputs[0])
    if log_decay is not None:
        decays = layout.split(log_decay).split(segment_size, dim=1)
    outputs, running = [], initial[0]
    for i, segment in enumerate(zip(*inputs, decays, strict=True)):
        chunks = range(i * segment_size, i * segment_size + segment[0].shape[1])
        fresh = [initial[layout.sequence_of_chunk[c]] if layout.starts_sequence(c) else None for c in chunks]
        o, after = checkpoint(
            _segment, *segment, running, fresh, use_reentrant=False, preserve_rng_state=False
        )
        outputs.append(o)
        running = after[-1]
        for c, state in zip(chunks, after, strict=True):
            states[layout.sequence_of_chunk[c]] = state
    return layout.merge(torch.cat(outputs, dim=1)), torch.cat(states)


def _segment(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None,
    running: Tensor,
    fresh: list[Tensor | None],
) -> tuple[Tensor, list[Tensor]]:
    """Outputs (B, n, C, H, V) of n chunks and the state after each; `fresh`: the state of a new sequence."""
    q, k, v = (x.to(q.dtype).transpose(2, 3).contiguous() for x in (q, k, v))
    beta = beta.to(q.dtype).transpose(2, 3).unsqueeze(-1)
    values, readers = beta * v, beta * k
    system, scores = readers @ k.mT, q @ k.mT
    kept: list[Tensor | None] = [None] * len(fresh)
    if log_decay is not None:
        log_decay = log_decay.to(q.dtype).transpose(2, 3)
        gamma = log_decay.cumsum(-1).exp().unsqueeze(-1)
        # Above the diagonal this is exp(0), and masked below.
        pairs = log_decay.unsqueeze(-1).expand_as(scores).tril(-1).cumsum(-2).exp()
        system, scores = system * pairs, scores * pairs
        q, readers, k = q * gamma, readers * gamma, k * pairs[..., -1, :].unsqueeze(-1)
        kept = list(gamma[..., -1:, :].unbind(1))
    befores, updates, afters = [], [], []
    parts = (x.unbind(1) for x in (_inverse(system), values, readers, k.mT))
    for inverse, value, reader, key, keep, start in zip(*parts, kept, fresh, strict=True):
        state = running if start is None else start
        update = inverse @ (value - reader @ state)
        running = key @ update + (state if keep is None else keep * state)
        befores.append(state)
        updates.append(update)
        afters.append(running)
    o = q @ torch.stack(befores, dim=1) + scores.tril() @ torch.stack(updates, dim=1)
    return o.transpose(2, 3), afters


def _inverse(system: Tensor) -> Tensor:
    """Inverse of I + the strict lower triangle of `system`: its entries stay within [-1, 1] for unit keys."""
    eye = torch.eye(system.shape[-1], dtype=system.dtype, device=system.device).expand_as(system)
    return torch.linalg.solve_triangular(system, eye, upper=False, unitriangular=True)


def step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """One token of the (gated) delta rule: arguments of `chunked_delta_rule` with T = 1, state (B, H, K, V).

    Returns:
        o (B, 1, H, V) and the new state, in the dtype of q; `state` itself is not changed.
    """
    q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.to(q.dtype).transpose(1, 2)
    beta = beta.to(q.dtype).transpose(1, 2).unsqueeze(-1)
    if log_decay is not None:
        state = state * log_decay.to(q.dtype).exp().transpose(1, 2).unsqueeze(-1)
    update = beta * (v - k @ state)
    state = torch.addcmul(state, k.mT, update)
    return (q @ state).transpose(1, 2), state
