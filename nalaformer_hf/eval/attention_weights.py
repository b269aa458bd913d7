"""Attention weights as explicit matrices, and what the paper's claims say of them.

Letters in shapes: B batch, T tokens, H heads, D head dim.
"""

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from nalaformer_hf.ops import nala_attention

GAINS = (1.0, 5.0, 20.0, 100.0, 1000.0)
HEAD_DIMS = (16, 64, 128)
ROTARY_THETA = 10_000.0


def nala_weights(q: Tensor, k: Tensor, **options: Any) -> Tensor:
    """Weights of the attention: its output for the unit vectors as values.

    Args:
        q: Queries (B, T, H, D).
        k: Keys, same shape.
        **options: As for `nala_attention`: the form and its constants, rotary tables, `causal`.

    Returns:
        (B, H, T, T), each row the weights of one query.
    """
    batch, length, num_heads, _ = q.shape
    unit = torch.eye(length, dtype=q.dtype, device=q.device)
    v = unit.unsqueeze(1).expand(batch, length, num_heads, length)
    return nala_attention(q, k, v, backend="reference", **options)[0].transpose(1, 2)


def softmax_weights(q: Tensor, k: Tensor, *, causal: bool = True) -> Tensor:
    """Weights of softmax attention, scaled by D^-½.

    Args:
        q: Queries (B, T, H, D).
        k: Keys, same shape.
        causal: Whether a query sees the keys up to its own only.

    Returns:
        (B, H, T, T).
    """
    scores = torch.einsum("bthd,bshd->bhts", q, k) * q.shape[-1] ** -0.5
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).triu(1), -math.inf)
    return scores.softmax(-1)


def relative_entropy(weights: Tensor, *, causal: bool = True) -> Tensor:
    """Entropy of each row that sums to 1, relative to that of equal weights: 0 at one key, 1 at all alike.

    Args:
        weights: (B, H, T, T), not negative.
        causal: Whether row t has t keys; else each has T.

    Returns:
        (B, H, T); a row that has one key is 0.
    """
    entropy = -torch.xlogy(weights, weights).sum(-1)
    num_keys = torch.arange(1, weights.shape[-1] + 1, dtype=weights.dtype, device=weights.device)
    largest = (num_keys if causal else num_keys[-1]).log()
    return entropy / largest.clamp_min(torch.finfo(weights.dtype).tiny)


def polarity_limit(length: int = 96, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield how far the cosine form is from the polarity form, by gain, head dim and rotary.

    The distance is the mean total variation, ½ Σ|w - w'|, of the rows from the second on, in float64, for
    normal queries and keys. Claim: it goes to 0 as the gain α grows, without and with either rotary.

    Args:
        length: T.
        seed: Of queries and keys.

    Yields:
        `head_dim`, `rotary`, `gain` and `total_variation`.
    """
    for head_dim in HEAD_DIMS:
        q, k = _normal_pair(length, head_dim, seed)
        for rotary in ("none", "phase", "axial"):
            options = _rotary_options(rotary, length, head_dim)
            limit = nala_weights(q, k, form="polarity", **options)
            for gain in GAINS:
                weights = nala_weights(q, k, form="cosine", gain=gain, **options)
                distance = 0.5 * (weights - limit).abs().sum(-1)[..., 1:].mean()
                yield {
                    "head_dim": head_dim,
                    "rotary": rotary,
                    "gain": gain,
                    "total_variation": float(distance),
                }


def rotary_weights(length: int = 256, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield what rotary in the numerator alone does to the weights, by form and head dim.

    Claim: weights may be negative and rows do not sum to 1, unlike without rotary.

    Args:
        length: T.
        seed: Of queries and keys.

    Yields:
        `head_dim`, `form`, `rotary`, the share of negative weights, the mean sum of a row, and the largest
        sum of a row's absolute weights.
    """
    for head_dim in HEAD_DIMS:
        q, k = _normal_pair(length, head_dim, seed)
        for form in ("cosine", "polarity"):
            for rotary in ("none", "phase"):
                weights = nala_weights(q, k, form=form, **_rotary_options(rotary, length, head_dim))
                visible = weights[..., torch.ones(length, length).tril().bool()]
                yield {
                    "head_dim": head_dim,
                    "form": form,
                    "rotary": rotary,
                    "negative_share": float((visible < 0).double().mean()),
                    "mean_row_sum": float(weights.sum(-1).mean()),
                    "largest_absolute_sum": float(weights.abs().sum(-1).max()),
                }


def _normal_pair(length: int, head_dim: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (1, length, 4, head_dim)
    q = torch.randn(shape, generator=generator, dtype=torch.float64)
    return q, torch.randn(shape, generator=generator, dtype=torch.float64)


def _rotary_options(layout: str, length: int, head_dim: int) -> dict[str, Any]:
    """Tables (T, D) of the usual angles for the layout, or no rotary."""
    if layout == "none":
        return {}
    num_angles = head_dim if layout == "phase" else head_dim // 2
    angles = torch.arange(length).unsqueeze(1) * ROTARY_THETA ** (-torch.arange(num_angles) / num_angles)
    if layout == "axial":
        angles = angles.repeat_interleave(2, dim=1)
    return {"rotary": (angles.cos(), angles.sin()), "rotary_layout": layout}
