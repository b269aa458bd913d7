"""What this machine will run, and whether its kernels compute what they should."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable
from typing import Any

import torch

from . import __version__
from .ops.dispatch import is_interpreting, why_not_fla, why_not_triton

PACKAGES = ("torch", "triton", "transformers", "fla-core")


def run_doctor(write: Callable[[str], object]) -> bool:
    """Write versions, device, backends and the kernels' errors and times; return whether all kernels passed.

    Where kernels can run, on a GPU or in Triton's interpreter (which takes ours only), each is compared with
    a float64 form; on a GPU the result is kept, and `backend="auto"` trusts it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in _versions(device):
        write(f"{line}\n")
    no_triton = why_not_triton(device, torch.bfloat16, "cosine", 64, 64)
    no_fla = why_not_fla(device)
    checks = _selftests(device, no_triton is None, no_fla is None)
    if checks:
        write(f"\n{'case':<62} {'result':<22} {'error':>8} {'ms':>9}\n")
    for check in checks:
        verdict = "" if check.passed else f"  FAILED {check.message}"
        write(
            f"{check.case!s:<62} {check.name:<22} {check.error:>8.1e} {check.milliseconds:>9.2f}{verdict}\n"
        )
    failed = {check.case.part for check in checks if not check.passed}
    write(f"\nlinear: {_linear(device, no_triton, 'linear' in failed)}\n")
    for mixer in ("delta", "gated_delta"):
        write(f"{mixer}: {_delta(no_fla, mixer in failed)}\n")
    write(f"fuse_norm: {_norm(no_fla, failed & {'layer_norm', 'head_rms_norm'})}\n")
    return not failed


def _selftests(device: torch.device, with_linear: bool, with_fla: bool) -> list[Any]:
    """The checks of all kernels that can run here; on a GPU their result is kept."""
    checks: list[Any] = []
    if with_linear:
        from .ops.triton.selftest import FULL, TOY, run_selftest

        checks += run_selftest(device, TOY if device.type == "cpu" else FULL)
    if with_fla:
        from .ops.triton.delta_selftest import FULL as DELTA_FULL
        from .ops.triton.delta_selftest import run_delta_selftest
        from .ops.triton.gated_norm import FULL as NORM_FULL
        from .ops.triton.gated_norm import run_norm_selftest

        checks += run_delta_selftest(device, DELTA_FULL) + run_norm_selftest(device, NORM_FULL)
    if device.type == "cuda" and checks:
        from .ops.triton.trust import record

        for part in sorted({check.case.part for check in checks}):
            record(device, part, [check for check in checks if check.case.part == part])
    return checks


def _linear(device: torch.device, reason: str | None, failed: bool) -> str:
    if reason is not None:
        return f"backend 'torch', since for 'triton' {reason}"
    if failed:
        return "backend 'torch', since kernels failed on this machine"
    if device.type == "cpu":
        return "backend 'torch'; the interpreter is for tests, and 'triton' has to be named"
    return "backend 'triton' for fp16, bf16 and fp32, head dims up to 256; 'torch' beyond"


def _delta(reason: str | None, failed: bool) -> str:
    if reason is not None:
        return f"the chunked torch form, since {reason}"
    if failed:
        return "the chunked torch form, since kernels failed on this machine"
    return "flash-linear-attention's kernels for fp16 and bf16; the chunked torch form for fp32"


def _norm(reason: str | None, failed: set[str]) -> str:
    if reason is not None:
        return f"norm and gate in torch, since {reason}"
    if failed:
        return f"norm and gate in torch for {', '.join(sorted(failed))}, since kernels failed on this machine"
    return "flash-linear-attention's kernel of norm and gate for fp16, bf16 and fp32"


def _versions(device: torch.device) -> Iterable[str]:
    yield f"nalaformer_hf {__version__}"
    for name in PACKAGES:
        try:
            yield f"{name} {importlib.metadata.version(name)}"
        except importlib.metadata.PackageNotFoundError:
            yield f"{name} is not installed"
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / 2**30
        yield f"device {properties.name}, {properties.major}.{properties.minor}, {memory:.0f} GiB"
    else:
        yield "device cpu" + (", kernels in Triton's interpreter" if is_interpreting() else "")
