"""What this machine will run, and whether its kernels compute what they should."""

from __future__ import annotations

import importlib.metadata
import importlib.util
from collections.abc import Callable, Iterable

import torch

from . import __version__
from .ops.dispatch import is_interpreting, why_not_triton

PACKAGES = ("torch", "triton", "transformers", "flash-linear-attention")


def run_doctor(write: Callable[[str], object]) -> bool:
    """Write versions, device, backends and the kernels' errors and times; return whether all kernels passed.

    Where kernels can run, on a GPU or in Triton's interpreter, each is compared with the float64 reference;
    on a GPU the result is kept, and `backend="auto"` trusts it.
    """
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for line in _versions(device):
        write(f"{line}\n")
    reason = why_not_triton(device, torch.bfloat16, "cosine", 64, 64)
    if reason is not None:
        write(f"\nlinear: backend 'torch', since for 'triton' {reason}\n{_DELTA}")
        return True
    from .ops.triton.selftest import FULL, TOY, run_selftest

    checks = run_selftest(device, TOY if device.type == "cpu" else FULL)
    write(f"\n{'case':<62} {'result':<22} {'error':>8} {'ms':>9}\n")
    for check in checks:
        verdict = "" if check.passed else f"  FAILED {check.message}"
        write(
            f"{check.case!s:<62} {check.name:<22} {check.error:>8.1e} {check.milliseconds:>9.2f}{verdict}\n"
        )
    passed = all(check.passed for check in checks)
    if device.type == "cuda":
        from .ops.triton.trust import record

        record(device, checks)
    write(f"\nlinear: {_linear(device, passed)}\n{_DELTA}")
    return passed


_DELTA = "delta, gated_delta: the chunked torch form on every device\n"


def _linear(device: torch.device, passed: bool) -> str:
    if not passed:
        return "backend 'torch', since kernels failed on this machine"
    if device.type == "cpu":
        return "backend 'torch'; the interpreter is for tests, and 'triton' has to be named"
    return "backend 'triton' for fp16, bf16 and fp32, head dims up to 256; 'torch' beyond"


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
