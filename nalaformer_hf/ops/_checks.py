"""What the public operations ask of their arguments; errors name the argument, what was wanted and what came.

Letters: B batch, T tokens, H heads, D head dim of q and k, V head dim of v, F feature width, R sequences.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from ..modeling.feature_maps_nala import FeatureSpec
from ..modeling.inputs_nala import check_bounds

FORMS = ("cosine", "polarity", "relu", "elu")
LAYOUTS = ("phase", "axial")
INPUT_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def check_features(q: Tensor, k: Tensor, spec: FeatureSpec) -> None:
    """Queries and keys of one shape, and constants that the feature maps are defined for."""
    check_choice("form", spec.form, FORMS)
    _check_number("power", spec.power, at_least=1)
    _check_number("tau", spec.tau, at_least=0)
    _check_number("gain", spec.gain, at_least=0)
    _check_number("norm_scale", spec.norm_scale, at_least=0)
    if spec.power * spec.tau < 1:
        raise ValueError(
            f"power * tau: wanted at least 1, got {spec.power} * {spec.tau} = {spec.power * spec.tau}"
        )
    for name, x in (("q", q), ("k", k)):
        _check_input(name, x)
    _check_shape("k", k, tuple(q.shape), "the shape of q")
    _check_same("k", k, q, "q")


def check_attention(q: Tensor, k: Tensor, v: Tensor, spec: FeatureSpec, causal: bool, eps: float) -> None:
    """What every form of attention needs."""
    check_features(q, k, spec)
    _check_input("v", v)
    _check_shape("v", v, (*q.shape[:3], v.shape[-1]), "(B, T, H, V), B, T and H as in q")
    _check_same("v", v, q, "q")
    check_flag("causal", causal)
    _check_number("eps", eps, at_least=0)


def check_rotary(rotary: object, layout: str, q: Tensor, spec: FeatureSpec) -> None:
    """A pair of tables, one angle for each pair of features (phase) or two equal ones (axial)."""
    check_choice("rotary_layout", layout, LAYOUTS)
    if rotary is None:
        return
    cos_sin = _check_pair("rotary", rotary, "(cos, sin)")
    batch, num_tokens, _, head_dim = q.shape
    divisor, kind = (4, "the head dim of q") if layout == "axial" else (2, "the feature width")
    width = head_dim if layout == "axial" else spec.width(head_dim)
    if width % divisor:
        raise ValueError(f"rotary_layout={layout!r}: wanted {kind} divisible by {divisor}, got {width}")
    shape = (num_tokens, head_dim if layout == "axial" else width // 2)
    shapes = [shape] if layout == "axial" else [shape, (1, *shape), (batch, *shape)]
    for name, table in zip(("rotary[0] (cos)", "rotary[1] (sin)"), cos_sin, strict=True):
        if table.dtype not in (torch.float32, torch.float64):
            raise TypeError(
                f"{name}: wanted float32 or float64 (half precision loses the angles), got {table.dtype}"
            )
        if tuple(table.shape) not in shapes:
            wanted = " or ".join(str(s) for s in dict.fromkeys(shapes))
            raise ValueError(f"{name}: wanted the shape {wanted}, got {tuple(table.shape)}")
        if table.requires_grad:
            raise ValueError(
                f"{name}: wanted a table without gradient (it gets none), got requires_grad=True"
            )
        _check_device(name, table, q)
    if cos_sin[0].shape != cos_sin[1].shape:
        raise ValueError(
            f"rotary: wanted cos and sin of one shape, got {cos_sin[0].shape} and {cos_sin[1].shape}"
        )


def check_state(state: object, q: Tensor, v: Tensor, spec: FeatureSpec, num_sequences: int) -> None:
    """S (R, H, F, V) and z (R, H, F) in fp32, or float64 with float64 inputs."""
    if state is None:
        return
    S, z = _check_pair("initial_state", state, "(S, z)")
    shape = (num_sequences, q.shape[2], spec.width(q.shape[3]))
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    for name, x, wanted in (
        ("initial_state[0] (S)", S, (*shape, v.shape[3])),
        ("initial_state[1] (z)", z, shape),
    ):
        if x.dtype != dtype:
            raise TypeError(f"{name}: wanted {dtype}, got {x.dtype}")
        _check_shape(name, x, wanted, "one state a sequence and head")
        _check_device(name, x, q)


def check_cu_seqlens(cu_seqlens: Tensor | None, q: Tensor) -> None:
    """Bounds 0 = c_0 ≤ c_1 ≤ ... ≤ c_R = T of the sequences packed into the one row of q."""
    if cu_seqlens is None:
        return
    check_bounds("cu_seqlens", cu_seqlens, q.shape[1])
    if q.shape[0] != 1:
        raise ValueError(f"cu_seqlens: wanted one packed row, q with B = 1, got B = {q.shape[0]}")


def check_choice(name: str, value: object, choices: Sequence[str]) -> None:
    """One of a few words."""
    if value not in choices:
        raise ValueError(f"{name}: wanted one of {', '.join(map(repr, choices))}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """True or False, and not something that is merely true."""
    if not isinstance(value, bool):
        raise TypeError(f"{name}: wanted True or False, got {type(value).__name__}")


def _check_number(name: str, value: object, at_least: float) -> None:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError(f"{name}: wanted a number, got {value!r}")
    if not (math.isfinite(value) and value >= at_least):
        raise ValueError(f"{name}: wanted a finite number of at least {at_least}, got {value!r}")


def _check_input(name: str, x: object) -> None:
    if not isinstance(x, Tensor):
        raise TypeError(f"{name}: wanted a tensor, got {type(x).__name__}")
    if x.dtype not in INPUT_DTYPES:
        raise TypeError(f"{name}: wanted a dtype of {', '.join(map(str, INPUT_DTYPES))}, got {x.dtype}")
    if x.ndim != 4 or 0 in x.shape:
        raise ValueError(
            f"{name}: wanted the shape (batch, tokens, heads, head dim), none 0, got {tuple(x.shape)}"
        )


def _check_shape(name: str, x: Tensor, wanted: tuple[int, ...], meaning: str) -> None:
    if tuple(x.shape) != wanted:
        raise ValueError(f"{name}: wanted the shape {wanted} ({meaning}), got {tuple(x.shape)}")


def _check_same(name: str, x: Tensor, other: Tensor, other_name: str) -> None:
    """float64 goes with float64 only, and all tensors stand on one device."""
    if (x.dtype == torch.float64) != (other.dtype == torch.float64):
        raise TypeError(
            f"{name}: wanted float64 with float64 only, got {x.dtype} beside {other_name} in {other.dtype}"
        )
    _check_device(name, x, other)


def _check_device(name: str, x: Tensor, q: Tensor) -> None:
    if x.device != q.device:
        raise ValueError(f"{name}: wanted the device of q, {q.device}, got {x.device}")


def _check_pair(name: str, value: object, meaning: str) -> tuple[Tensor, Tensor]:
    if not (
        isinstance(value, (tuple, list)) and len(value) == 2 and all(isinstance(x, Tensor) for x in value)
    ):
        raise TypeError(f"{name}: wanted a pair of tensors {meaning}, got {type(value).__name__}")
    return value[0], value[1]
