"""Which backend a call runs on: what a name asks for, or what "auto" picks and why."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..modeling.feature_maps_nala import FeatureSpec
from ._checks import check_choice

BACKENDS = ("reference", "recurrent", "torch", "triton", "auto")
TRITON_FORMS = ("cosine", "polarity")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_TRITON_WIDTH = 256


def resolve_backend(
    backend: str = "auto",
    *,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    form: str = "cosine",
    head_dim: int = 64,
    value_head_dim: int = 64,
) -> str:
    """The backend that `nala_attention` runs for this name: the name itself, or what "auto" picks.

    "auto" picks "triton" on a GPU whose kernels passed their self-test (see `nalaformer doctor`), else
    "torch"; on a GPU it says once why.

    Args:
        backend: "reference", "recurrent", "torch", "triton" or "auto".
        device: Where q, k and v are.
        dtype: Their dtype.
        form: Form of the feature maps.
        head_dim: D.
        value_head_dim: V.

    Raises:
        ValueError: An unknown name, or "triton" where its kernels cannot run; the message says why.
    """
    check_choice("backend", backend, BACKENDS)
    if backend not in ("auto", "triton"):
        return backend
    device = torch.device(device)
    if backend == "auto" and device.type == "cpu":
        return "torch"
    reason = why_not_triton(device, dtype, form, head_dim, value_head_dim)
    if backend == "triton":
        if reason is not None:
            raise ValueError(f"backend: 'triton' cannot run here: {reason}; wanted 'torch' or 'auto'")
        return "triton"
    if reason is None:
        from .triton.trust import why_not_trusted

        reason = why_not_trusted(device)
    if reason is None:
        return "triton"
    _say_once(f"nalaformer_hf runs on backend 'torch': {reason}")
    return "torch"


def why_not_triton(
    device: torch.device, dtype: torch.dtype, form: str, head_dim: int, value_head_dim: int
) -> str | None:
    """Why the fused kernels cannot run, in words; None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed (pip install 'nalaformer-hf[kernels]')"
    if device.type != "cuda" and not (device.type == "cpu" and is_interpreting()):
        return f"it needs tensors on a GPU, got {device.type} ones (or TRITON_INTERPRET=1, which is slow)"
    if dtype not in TRITON_DTYPES:
        return f"it takes {', '.join(map(str, TRITON_DTYPES))}, got {dtype}"
    if form not in TRITON_FORMS:
        return f"it has the forms {', '.join(map(repr, TRITON_FORMS))}, got {form!r}"
    for name, width in (("head dim of q", head_dim), ("head dim of v", value_head_dim)):
        if width > MAX_TRITON_WIDTH:
            return f"it takes a {name} of at most {MAX_TRITON_WIDTH}, got {width}"
    return None


class FusedForms(NamedTuple):
    """The fused twins of `modeling.linear_attention_nala`'s two forms."""

    attention: Callable[..., Any]
    step: Callable[..., Any]


def fused_forms(q: Tensor, v: Tensor, spec: FeatureSpec) -> FusedForms | None:
    """What a model's `linear` layer runs instead of the torch form; None where "auto" picks that one."""
    if q.device.type == "cpu":
        return None
    backend = resolve_backend(
        "auto",
        device=q.device,
        dtype=v.dtype,
        form=spec.form,
        head_dim=q.shape[-1],
        value_head_dim=v.shape[-1],
    )
    if backend != "triton":
        return None
    from .triton.attention import fused_attention
    from .triton.decode import fused_step

    return FusedForms(fused_attention, fused_step)


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors; read when kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
