"""NaLa attention as the paper writes it: the specification that every faster form is compared with.

Letters: B batch, T tokens, H heads, D head dim of q and k, V head dim of v, F feature width (2D; D for the
baselines), d(x) = x / ||x||, λ power, τ tau, α gain, s norm_scale. Equations are those of arXiv 2506.21137.

    p(||q||) = λ (τ + tanh(s ||q||))                                (Eq. 8; s = 1 in the paper)
    φ_q(q) = |d(q)|^p(||q||) ⊙ [cos f(d(q)) ; sin f(d(q))]          (Eq. 16)
    φ_k(k) = |k|^λ           ⊙ [cos f(d(k)) ; sin f(d(k))],    f(x) = (π/4) tanh(α x)
    o_t = Σ_s φ̃_q(q_t)·φ̃_k(k_s) v_s / Σ_s φ_q(q_t)·φ_k(k_s),   φ̃: φ with rotary embedding

For opposite signs the inner product of Eq. 16, cos f cos f' + sin f sin f', is a difference that cancels to
nothing as α grows. The attention forms therefore take the features turned by π/4, [cos(f + π/4) ; sin(f +
π/4)]: every inner product, rotated or not, is the same, and no term is negative. Arguments are trusted:
`nala_attention` checks them.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from ..modeling.feature_maps_nala import FeatureSpec
from ._checks import check_features

Rotary = tuple[Tensor, Tensor]


def nala_feature_maps(
    q: Tensor,
    k: Tensor,
    *,
    form: str = "cosine",
    power: float = 3.0,
    tau: float = 0.5,
    gain: float = 20.0,
    norm_scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    r"""Feature maps of queries and keys, as Eq. 16 prints them.

    - "cosine" (Eq. 16): `φ_q = |d(q)|^p ⊙ [cos f(d(q)) ; sin f(d(q))]`, `φ_k = |k|^λ ⊙ [cos f(d(k)) ; sin
        f(d(k))]`.
    - "polarity" (published classification code, which stacks the halves the other way round):
      `φ_q = [relu(-d(q)) ; relu(d(q))]^p`, `φ_k = [relu(-k) ; relu(k)]^λ`; the limit α → ∞ of the cosine
      form, up to a turn of both by π/4.
    - "relu" and "elu" (1 + ELU): baselines on plain q and k, D features wide.

    Where the norm is zero the published code divides by it and returns NaN; here the features are zero.

    Args:
        q: Queries (B, T, H, D), fp32, fp64, fp16 or bf16.
        k: Keys, same shape.
        form: "cosine", "polarity", "relu" or "elu".
        power: λ.
        tau: τ; λτ ≥ 1, so that no power of a query falls below 1, where its gradient at 0 is infinite.
        gain: α, of the cosine form.
        norm_scale: s in p = λ (τ + tanh(s ||q||)); 0 gives the fixed power λτ.

    Returns:
        φ_q and φ_k, (B, T, H, 2D) in fp32 (fp64 for fp64 inputs).

    Raises:
        TypeError: An argument is of the wrong type or dtype.
        ValueError: An argument has a value or a shape that does not fit.
    """
    spec = FeatureSpec(form, power, tau, gain, norm_scale)
    check_features(q, k, spec)
    return _query_features(q, spec, turned=False), _key_features(k, spec, turned=False)


def quadratic_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: FeatureSpec,
    rotary: Rotary | None,
    layout: str,
    state: Tensor,
    causal: bool,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """All T × T weights at once: o (B, T, H, V) and the turned state [S | z] (B, H, F, V + 1) at the end.

    A causal row has no ε. The bidirectional form adds it to φ_q·mean(φ_k), as the published code does.
    """
    (rq, rk), (fq, fk) = _attention_features(q, k, spec, rotary, layout)
    v, S, z = _upcast(v), state[..., :-1], state[..., -1]
    num_tokens = q.shape[1]
    mask = torch.ones(num_tokens, num_tokens, dtype=v.dtype, device=v.device)
    mask = mask.tril() if causal else mask
    weights = torch.einsum("bthf,bshf->bhts", rq, rk) * mask
    num = torch.einsum("bhts,bshv->bthv", weights, v) + torch.einsum("bthf,bhfv->bthv", rq, S)
    den = torch.einsum("bthf,bshf,ts->bth", fq, fk, mask) + torch.einsum("bthf,bhf->bth", fq, z)
    o = _ratio(num, den if causal else den + eps * num_tokens)
    return o, _join(S + torch.einsum("bthf,bthv->bhfv", rk, v), z + fk.sum(1))


def recurrent_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    spec: FeatureSpec,
    rotary: Rotary | None,
    layout: str,
    state: Tensor,
) -> tuple[Tensor, Tensor]:
    """Token by token: S_t = S_{t-1} + φ̃_k v_tᵀ, z_t = z_{t-1} + φ_k, o_t = φ̃_q·S_t / φ_q·z_t."""
    (rq, rk), (fq, fk) = _attention_features(q, k, spec, rotary, layout)
    v, S, z = _upcast(v), state[..., :-1], state[..., -1]
    outputs = []
    for t in range(q.shape[1]):
        S = S + torch.einsum("bhf,bhv->bhfv", rk[:, t], v[:, t])
        z = z + fk[:, t]
        num = torch.einsum("bhf,bhfv->bhv", rq[:, t], S)
        outputs.append(_ratio(num, torch.einsum("bhf,bhf->bh", fq[:, t], z)))
    return torch.stack(outputs, dim=1), _join(S, z)


def _join(S: Tensor, z: Tensor) -> Tensor:
    return torch.cat((S, z.unsqueeze(-1)), dim=-1)


def _upcast(x: Tensor) -> Tensor:
    """fp32, or float64 where x is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _direction(x: Tensor) -> tuple[Tensor, Tensor]:
    """d(x) and ||x||; a row whose norm is zero has direction zero."""
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norm.masked_fill(norm == 0, math.inf), norm


def _query_features(q: Tensor, spec: FeatureSpec, turned: bool) -> Tensor:
    q = _upcast(q)
    if spec.is_baseline:
        return _baseline(q, spec.form)
    d, norm = _direction(q)
    p = spec.power * (spec.tau + torch.tanh(spec.norm_scale * norm))
    return d.abs().pow(p).tile(2) * _halves(d, spec, turned)


def _key_features(k: Tensor, spec: FeatureSpec, turned: bool) -> Tensor:
    k = _upcast(k)
    if spec.is_baseline:
        return _baseline(k, spec.form)
    d, _ = _direction(k)
    return k.abs().pow(spec.power).tile(2) * _halves(d, spec, turned)


def _baseline(x: Tensor, form: str) -> Tensor:
    """relu(x), or 1 + ELU(x) = exp(min(x, 0)) + max(x, 0)."""
    return torch.relu(x) if form == "relu" else torch.exp(x.clamp_max(0)) + torch.relu(x)


def _halves(d: Tensor, spec: FeatureSpec, turned: bool) -> Tensor:
    """[cos f ; sin f], or [cos(f + π/4) ; sin(f + π/4)] if `turned`; signs for the polarity form."""
    if spec.form == "polarity":
        return torch.cat((d < 0, d > 0), dim=-1).to(d.dtype)
    if turned:
        # f + π/4 = (π/2) σ(2αd), cos(f + π/4) = sin((π/2) σ(-2αd)): exact where tanh has rounded to ±1
        return torch.sin(math.pi / 2 * torch.sigmoid(2 * spec.gain * torch.cat((-d, d), dim=-1)))
    f = math.pi / 4 * torch.tanh(spec.gain * d)
    return torch.cat((torch.cos(f), torch.sin(f)), dim=-1)


def _attention_features(
    q: Tensor, k: Tensor, spec: FeatureSpec, rotary: Rotary | None, layout: str
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """Turned features of q and k: (φ̃_q, φ̃_k) for the numerator, (φ_q, φ_k) for the denominator."""
    phi = _query_features(q, spec, turned=True), _key_features(k, spec, turned=True)
    if rotary is None:
        return phi, phi
    cos, sin = (x.to(phi[0].dtype).unsqueeze(-2) for x in rotary)
    rotate = rotate_phase if layout == "phase" else rotate_axial
    return (rotate(phi[0], cos, sin), rotate(phi[1], cos, sin)), phi


def rotate_phase(phi: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pair (φ_i, φ_{i+F/2}) by the angle i of tables (..., F / 2)."""
    first, second = phi.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)


def rotate_axial(phi: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turns the pairs (φ_2i, φ_2i+1) of each D-wide half by tables (..., D) (published vision code)."""
    halves = phi.unflatten(-1, (-1, cos.shape[-1]))
    even, odd = halves[..., 0::2], halves[..., 1::2]
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    turned = even * cos[..., 0::2] - odd * sin[..., 0::2], odd * cos[..., 1::2] + even * sin[..., 1::2]
    return torch.stack(turned, dim=-1).flatten(-3)


def _ratio(num: Tensor, den: Tensor) -> Tensor:
    """num / den; a denominator of zero, or so near that a gradient overflows, gives 0."""
    finfo = torch.finfo(den.dtype)
    return num / den.masked_fill(den.abs() < finfo.tiny / finfo.eps, math.inf).unsqueeze(-1)
