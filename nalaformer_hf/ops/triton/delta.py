"""The delta rules on flash-linear-attention's kernels, with the signatures of the torch forms.

Letters: B batch, T tokens, H heads, K width of q and k, V head dim of v, R sequences of a packed row.

What this file bridges: fla scales queries by K^-½ unless told otherwise, its chunked kernels take q, k and v
in one 16-bit dtype, its gated step has no backward. Its own l2 norm is left out: the 1e-6 that it adds under
the root is not small beside NaLa's features. Importing `fla.ops` takes seconds and waits for the first call.
"""

from __future__ import annotations

import torch
from torch import Tensor


def fla_delta_rule(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beta: Tensor,
    log_decay: Tensor | None = None,
    *,
    initial_state: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`chunked_delta_rule` on fla's chunked kernels, forward and backward; arguments are trusted.

    Args:
        q: (B, T, H, K) of unit length (or zero), K ≤ 256; rounded to the dtype of v.
        k: (B, T, H, K), as q.
        v: (B, T, H, V), fp16 or bf16.
        beta: (B, T, H), fp32.
        log_decay: (B, T, H), log α ≤ 0, fp32; None: the delta rule without decay.
        initial_state: S, (B, H, K, V), or one a sequence, (R, H, K, V), with `cu_seqlens`; fp32.
        cu_seqlens: (R + 1,) bounds of the sequences of one packed row, B = 1.

    Returns:
        o (B, T, H, V) in the dtype of v, and the final state (B or R, H, K, V) in fp32.
    """
    from fla.ops.delta_rule import chunk_delta_rule
    from fla.ops.gated_delta_rule import chunk_gated_delta_rule

    q, k = q.to(v.dtype), k.to(v.dtype)
    bounds = None if cu_seqlens is None else cu_seqlens.to(v.device)
    options = {"cu_seqlens": bounds, **_options(initial_state)}
    if log_decay is None:
        return chunk_delta_rule(q, k, v, beta, **options)
    return chunk_gated_delta_rule(q, k, v, log_decay, beta, **options)


def fla_step_delta_rule(
    q: Tensor, k: Tensor, v: Tensor, beta: Tensor, log_decay: Tensor | None, state: Tensor
) -> tuple[Tensor, Tensor]:
    """`step_delta_rule` on fla's recurrent kernels, all in fp32 and without gradients.

    Returns:
        o (B, 1, H, V) and the new state; `state` itself is not changed.
    """
    from fla.ops.delta_rule import fused_recurrent_delta_rule
    from fla.ops.gated_delta_rule import fused_recurrent_gated_delta_rule

    q, k, v, options = q.float(), k.float(), v.float(), _options(state)
    with torch.no_grad():
        if log_decay is None:
            return fused_recurrent_delta_rule(q, k, v, beta, **options)
        return fused_recurrent_gated_delta_rule(q, k, v, log_decay, beta=beta, **options)


def _options(state: Tensor | None) -> dict:
    return {
        "scale": 1.0,
        "initial_state": state,
        "output_final_state": True,
        "use_qk_l2norm_in_kernel": False,
    }
