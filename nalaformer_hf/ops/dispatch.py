"""Which backend a call runs on: what a name asks for, or what "auto" picks and why."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import warnings
from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
from packaging.version import Version
from torch import Tensor

from ..modeling.configuration_nala import MAX_DELTA_KEY_WIDTH
from ..modeling.feature_maps_nala import FeatureSpec
from ._checks import check_choice

BACKENDS = ("reference", "recurrent", "torch", "triton", "auto")
TRITON_FORMS = ("cosine", "polarity")
TRITON_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_TRITON_WIDTH = 256
FLA_DTYPES = (torch.float16, torch.bfloat16)
MIN_FLA_VERSION = "0.6"
MAX_NORM_WIDTH = 16384
_INSTALL = "pip install 'nalaformer-hf[kernels]'"


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
        return f"triton is not installed ({_INSTALL})"
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


def why_not_fla(device: torch.device) -> str | None:
    """Why no kernel of flash-linear-attention can run, in words; None if they can."""
    version = fla_version()
    if version is None or importlib.util.find_spec("triton") is None:
        return f"flash-linear-attention or triton is not installed ({_INSTALL})"
    if Version(version) < Version(MIN_FLA_VERSION):
        return f"it takes fla-core {MIN_FLA_VERSION} or newer, got {version}"
    if device.type != "cuda":
        return f"flash-linear-attention needs tensors on a GPU, got {device.type} ones"
    return None


def why_not_fla_delta(device: torch.device, dtype: torch.dtype, key_width: int) -> str | None:
    """Why flash-linear-attention's delta kernels cannot run, in words; None if they can.

    Args:
        device: Where v is.
        dtype: Its dtype.
        key_width: Width of the features.
    """
    reason = why_not_fla(device)
    if reason is not None:
        return reason
    if dtype not in FLA_DTYPES:
        return f"flash-linear-attention takes {', '.join(map(str, FLA_DTYPES))}, got {dtype}"
    if key_width > MAX_DELTA_KEY_WIDTH:
        return f"flash-linear-attention takes features up to {MAX_DELTA_KEY_WIDTH} wide, got {key_width}"
    return None


@cache
def fla_version() -> str | None:
    """Version of flash-linear-attention's kernels; None where they are not installed."""
    try:
        return importlib.metadata.version("fla-core")
    except importlib.metadata.PackageNotFoundError:
        return None


class FusedForms(NamedTuple):
    """The fused twins of a mixer's torch forms: for a whole sequence, and for one token after a state."""

    attention: Callable[..., Any]
    step: Callable[..., Any]


def fused_forms(q: Tensor, v: Tensor, spec: FeatureSpec) -> FusedForms | None:
    """What a model's `linear` layer runs instead of the torch form; None where "auto" picks that one."""
    if q.device.type in ("cpu", "meta"):
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


def fused_delta_forms(k: Tensor, v: Tensor, gated: bool) -> FusedForms | None:
    """What a model's delta layer runs instead of the torch form; None where that one is used, said once.

    Args:
        k: Features (B, T, H, K).
        v: (B, T, H, V).
        gated: Whether there is a decay.
    """
    if v.device.type in ("cpu", "meta"):
        return None
    reason = why_not_fla_delta(v.device, v.dtype, k.shape[-1])
    if reason is None:
        from .triton.delta_selftest import DeltaCase
        from .triton.trust import why_not_trusted

        # fla tunes its kernels for each size, so the first test takes the one that is about to be used; its
        # result then stands for all sizes of the mixer.
        case = DeltaCase(gated, v.dtype, v.shape[2], k.shape[-1], v.shape[-1])
        reason = why_not_trusted(v.device, case)
    if reason is not None:
        _say_once(f"nalaformer_hf runs the delta rule on its torch form: {reason}")
        return None
    from .triton.delta import fla_delta_rule, fla_step_delta_rule

    return FusedForms(fla_delta_rule, fla_step_delta_rule)


def fused_gated_norm(x: Tensor, gate: Tensor, norm: str) -> Callable[..., Tensor] | None:
    """What a layer with `fuse_norm` runs instead of norm and gate in torch; None where those are used.

    Args:
        x: (..., C), the mixer's output.
        gate: Its gate.
        norm: "layer_norm" or "head_rms_norm".
    """
    if x.device.type in ("cpu", "meta"):
        return None
    reason = why_not_fla(x.device)
    if reason is None and gate.dtype not in TRITON_DTYPES:
        reason = f"it takes {', '.join(map(str, TRITON_DTYPES))}, got {gate.dtype}"
    if reason is None and x.shape[-1] > MAX_NORM_WIDTH:
        reason = f"it takes up to {MAX_NORM_WIDTH} channels, got {x.shape[-1]}"
    if reason is None:
        from .triton.gated_norm import NormCase
        from .triton.trust import why_not_trusted

        reason = why_not_trusted(x.device, NormCase(norm, gate.dtype, x.shape[-1]))
    if reason is not None:
        _say_once(f"nalaformer_hf runs fuse_norm in torch: {reason}")
        return None
    from .triton.gated_norm import fla_gated_norm

    return fla_gated_norm


def is_interpreting() -> bool:
    """Whether Triton runs kernels in its interpreter, on CPU tensors; read when kernels are imported."""
    return os.environ.get("TRITON_INTERPRET") == "1"


@cache
def _say_once(message: str) -> None:
    warnings.warn(message, stacklevel=4)
