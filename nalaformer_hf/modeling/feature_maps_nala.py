"""NaLa's feature maps (Eq. 8 and 16 of arXiv 2506.21137), forward and backward, made to be recomputed.

Letters: D head dim, F feature width (2D; D for the baselines), d(x) = x / ||x||, λ power, τ tau, α gain,
s norm_scale.

    p(||q||) = λ (τ + tanh(s ||q||))        amplitude A of q: |d(q)|^p        amplitude A of k: |k|^λ
    features = A ⊙ [w₁ ; w₂]

    polarity:  w₁ = [x < 0],                               w₂ = [x > 0]
    cosine:    w₁ = cos(f + π/4) = sin(π/2 σ(-2α d)),      w₂ = sin(f + π/4) = sin(π/2 σ(2α d)),
               f = (π/4) tanh(α d)

Eq. 16 prints [cos f ; sin f]. Turning both feature vectors by π/4 leaves every inner product as it is, rotary
phases included, and makes all features ≥ 0: no sum can cancel, and the limit α → ∞ is the polarity form
itself. The baselines "relu" and "elu" (1 + ELU) have one half only, without power or direction.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable


class FeatureSpec(NamedTuple):
    """Which feature maps: the form and its constants."""

    form: str = "cosine"
    power: float = 3.0
    tau: float = 0.5
    gain: float = 20.0
    norm_scale: float = 1.0

    @property
    def is_baseline(self) -> bool:
        """Whether this is one of the two baselines of the ablation."""
        return self.form in ("relu", "elu")

    @property
    def null_key(self) -> float:
        """The key value whose features are all zero (a masked token)."""
        return -math.inf if self.form == "elu" else 0.0

    def width(self, head_dim: int) -> int:
        """Feature width F of a head of `head_dim`."""
        return head_dim if self.is_baseline else 2 * head_dim


class Features(NamedTuple):
    """Features `phi` of x, and what `features_grad` needs of their making."""

    phi: Tensor
    x: Tensor
    direction: Tensor | None = None
    norm: Tensor | None = None
    exponent: Tensor | float = 1.0
    exponent_slope: Tensor | float = 0.0  # dp / d||q||
    angle_slope: Tensor | None = None  # df / dd, where the gradient will be asked for


def features(x: Tensor, spec: FeatureSpec, is_query: bool, need_grad: bool = False) -> Features:
    """Features of queries or keys, (..., D) to (..., F), same dtype. No autograd: see `map_features`.

    Where the norm is zero (or underflows) it is taken as infinite: direction, features and gradient are zero.
    """
    if spec.is_baseline:
        return Features(
            torch.relu(x) if spec.form == "relu" else torch.exp(x.clamp_max(0)) + torch.relu(x), x
        )
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    exponent, exponent_slope, angle_slope = spec.power, 0.0, None
    if is_query:
        tanh_norm = torch.tanh(norm * spec.norm_scale)
        exponent = spec.power * (spec.tau + tanh_norm)
        exponent_slope = (1 - tanh_norm.square()) * (spec.power * spec.norm_scale)
    norm = norm.masked_fill(norm == 0, math.inf)
    direction = x / norm
    amplitude = (direction if is_query else x).abs().pow_(exponent)
    if spec.form == "polarity":
        signed = x.sign().mul_(amplitude)  # ONNX has no copysign
        phi = torch.cat((-signed, signed), dim=-1).relu_()
    else:
        angle = direction * (2 * spec.gain)
        phi = torch.cat((-angle, angle), dim=-1).sigmoid_()
        if need_grad:
            first, second = phi.chunk(2, dim=-1)
            angle_slope = (first * second).mul_(math.pi * spec.gain)
        phi.mul_(math.pi / 2).sin_().unflatten(-1, (2, -1)).mul_(amplitude.unsqueeze(-2))
    return Features(phi, x, direction, norm, exponent, exponent_slope, angle_slope)


def features_grad(f: Features, grad: Tensor, spec: FeatureSpec, is_query: bool) -> Tensor:
    """Gradient of `features` to x, from the gradient of the features."""
    if spec.is_baseline:
        return grad * (f.x > 0) if spec.form == "relu" else grad * torch.exp(f.x.clamp_max(0))
    assert f.direction is not None
    (phi1, phi2), (grad1, grad2) = f.phi.chunk(2, dim=-1), grad.chunk(2, dim=-1)
    # weighted = A · d(loss)/dA, and d|b|^p/db = p |b|^p / b; b / (b² + tiny) is 1 / b, and 0 at 0
    weighted = (grad1 * phi1).addcmul_(grad2, phi2)
    base = f.direction if is_query else f.x
    grad_base = (base / base.square().add_(torch.finfo(base.dtype).tiny)).mul_(weighted).mul_(f.exponent)
    grad_direction = None
    if f.angle_slope is not None:
        grad_direction = (grad2 * phi1).addcmul_(grad1, phi2, value=-1).mul_(f.angle_slope)
    if not is_query:
        return grad_base if grad_direction is None else grad_base.add_(_through_direction(grad_direction, f))
    grad_direction = grad_base if grad_direction is None else grad_base.add_(grad_direction)
    log_direction = f.direction.abs().log_().clamp_min_(-1e4)  # finite where weighted is 0
    grad_norm = weighted.mul_(log_direction).sum(-1, keepdim=True).mul_(f.exponent_slope)
    return _through_direction(grad_direction, f).addcmul_(grad_norm, f.direction)


def _through_direction(grad: Tensor, f: Features) -> Tensor:
    """Gradient through x / ||x||: (g - d (d·g)) / ||x||."""
    assert f.direction is not None
    assert f.norm is not None
    along = (grad * f.direction).sum(-1, keepdim=True)
    return torch.addcmul(grad, along, f.direction, value=-1).div_(f.norm)


class _MapFeatures(torch.autograd.Function):
    """`features` with its hand-written backward: only x is kept."""

    @staticmethod
    def forward(ctx, x: Tensor, spec: FeatureSpec, is_query: bool) -> Tensor:
        ctx.save_for_backward(x)
        ctx.spec, ctx.is_query = spec, is_query
        return features(x, spec, is_query).phi

    @staticmethod
    @once_differentiable
    def backward(ctx, grad: Tensor):
        (x,) = ctx.saved_tensors
        mapped = features(x, ctx.spec, ctx.is_query, need_grad=True)
        return features_grad(mapped, grad, ctx.spec, ctx.is_query), None, None


def map_features(x: Tensor, spec: FeatureSpec, is_query: bool) -> Tensor:
    """Differentiable features of queries or keys, (..., D) to (..., F), in fp32 (float64 for float64)."""
    x = upcast(x)
    return _MapFeatures.apply(x, spec, is_query) if x.requires_grad else features(x, spec, is_query).phi


def upcast(x: Tensor) -> Tensor:
    """fp32, or float64 where x is float64: the dtype of features, states and sums."""
    return x if x.dtype == torch.float64 else x.float()


def unit_features(x: Tensor, spec: FeatureSpec, is_query: bool) -> Tensor:
    """l2-normalised features for the delta rule; a zero row stays zero.

    The row is divided by its maximum first: squares of small features would underflow, and an ε under the
    root is not small here (the median of ||φ_q||² is 7e-6 at D = 128).
    """
    phi = map_features(x, spec, is_query)
    peak = phi.amax(-1, keepdim=True).detach()
    scaled = phi / peak.masked_fill(peak == 0, 1)
    norm = torch.linalg.vector_norm(scaled, dim=-1, keepdim=True)
    return scaled / norm.masked_fill(norm == 0, 1)


def apply_rotary(
    phi: Tensor, cos: Tensor, sin: Tensor, layout: str = "phase", transpose: bool = False
) -> Tensor:
    """Rotary embedding of features (..., F) by tables (..., F): φ cos + J(φ) sin.

    "phase" turns the pairs (i, i + F/2), "axial" the pairs (2i, 2i + 1). `transpose` applies the adjoint.
    """
    turn = _turn_halves if layout == "phase" else _turn_pairs
    if transpose:
        return (phi * cos).sub_(turn(phi * sin))
    return torch.addcmul(phi * cos, turn(phi), sin)


def _turn_halves(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)


def _turn_pairs(x: Tensor) -> Tensor:
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((-odd, even), dim=-1).flatten(-2)
