"""The delta rule and the gated delta rule token by token: the specification of the faster forms.

Letters: B batch, T tokens, H heads, K width of q and k, V head dim of v, R sequences of a packed row.
"""

from __future__ import annotations

import torch
from torch import Tensor


def recurrent_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The (gated) delta rule as it is written down.

        S_t = α_t (I - β_t k_t k_tᵀ) S_{t-1} + β_t k_t v_tᵀ,      o_t = S_tᵀ q_t,      α_t = exp(log_decay_t)

    The recurrences of DeltaNet (arXiv 2406.06484) and Gated DeltaNet (arXiv 2412.06464), into which v1 of the
    paper (§4.4) puts its feature maps. The query scale is 1, where the libraries take K^-½.

    Args:
        q: (B, T, H, K) of unit length (or zero), fp32 or float64: the dtype of the whole computation.
        k: (B, T, H, K), as q.
        v: (B, T, H, V), any float dtype.
        beta: (B, T, H).
        log_decay: (B, T, H), ≤ 0; None: α = 1.
        initial_state: S, (B, H, K, V), or one a sequence, (R, H, K, V), with `cu_seqlens`; None: zeros.
        cu_seqlens: (R + 1,) bounds of the sequences of one packed row, B = 1.

    Returns:
        o (B, T, H, V) and the final state (B or R, H, K, V), in the dtype of q.
    """
    batch, num_tokens, heads, key_dim = q.shape
    bounds = [0, num_tokens] if cu_seqlens is None else cu_seqlens.tolist()
    if initial_state is None:
        num_states = batch if cu_seqlens is None else len(bounds) - 1
        initial_state = q.new_zeros(num_states, heads, key_dim, v.shape[-1])
    v, beta = v.to(q.dtype), beta.to(q.dtype)[..., None, None]
    alpha = torch.ones_like(beta) if log_decay is None else log_decay.to(q.dtype).exp()[..., None, None]
    eye = torch.eye(key_dim, dtype=q.dtype, device=q.device)
    outputs, finals = [], []
    for start, end, state in zip(bounds, bounds[1:], initial_state.to(q.dtype).split(batch), strict=False):
        for t in range(start, end):
            key, value, query = (x[:, t].unsqueeze(-1) for x in (k, v, q))
            state = alpha[:, t] * (eye - beta[:, t] * key @ key.mT) @ state + beta[:, t] * key @ value.mT
            outputs.append((state.mT @ query).squeeze(-1))
        finals.append(state)
    return torch.stack(outputs, dim=1), torch.cat(finals)
