"""Linear attention of the vision family: every token reads the means over all tokens.

Letters: B batch, N tokens, H heads, D head dim of q and k, F feature width, V head dim of v.

    o_n = φ̃_q(q_n)·S / (φ_q(q_n)·z + ε),      S = mean φ̃_k(k) vᵀ,      z = mean φ_k(k)
"""

from __future__ import annotations

import torch
from torch import Tensor

from .feature_maps_nala import FeatureSpec, apply_rotary, map_features, upcast

EPS = 1e-6  # published code


def vision_linear_attention(q: Tensor, k: Tensor, v: Tensor, spec: FeatureSpec, rotary) -> Tensor:
    """(B, N, H, D) q and k, (B, N, H, V) v to (B, N, H, V), in fp32 (float64 for float64)."""
    fq, fk = map_features(q, spec, True), map_features(k, spec, False)
    den = torch.einsum("bnhf,bhf->bnh", fq, fk.mean(dim=1)) + EPS
    if rotary is not None:
        cos, sin = (x.tile(fq.shape[-1] // x.shape[-1]).unsqueeze(1) for x in rotary)
        fq, fk = (apply_rotary(phi, cos, sin, "axial") for phi in (fq, fk))
    state = torch.einsum("bnhf,bnhv->bhfv", fk, upcast(v) / q.shape[1])
    return torch.einsum("bnhf,bhfv->bnhv", fq, state) / den.unsqueeze(-1)
