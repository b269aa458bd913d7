"""Norm and gate of a mixer's output in one kernel of flash-linear-attention, and its self-test.

Its backward makes norm and gate again from its inputs, so that nothing between them is kept.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .selftest import ALLOWED, F32, Check, collect, error_of, now


def fla_gated_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """norm(x) ⊙ SiLU(gate), computed in fp32; LayerNorm, or RMSNorm where there is no bias.

    Args:
        x: (..., C), rounded to the dtype of the gate.
        gate: (..., C).
        weight: (C,).
        bias: (C,).
        eps: Added to the variance or the mean square.

    Returns:
        (..., C) in the dtype of the gate.
    """
    from fla.modules.fused_norm_gate import layer_norm_gated, rms_norm_gated

    norm = rms_norm_gated if bias is None else layer_norm_gated
    return norm(x.to(gate.dtype), gate, weight, bias, eps=eps)


class NormCase(NamedTuple):
    """A call to check."""

    norm: str
    dtype: torch.dtype
    C: int

    @property
    def part(self) -> str:
        """Whose kernels it checks."""
        return self.norm

    @property
    def allowed(self) -> float:
        """The largest error that is a rounding."""
        return ALLOWED[self.dtype]

    def __str__(self) -> str:
        return f"{self.norm} and gate, {str(self.dtype)[6:]}, C={self.C}"


# Up to 512 channels fla has other kernels than above.
FULL = (
    NormCase("layer_norm", torch.bfloat16, 1024),
    NormCase("layer_norm", torch.float32, 200),
    NormCase("head_rms_norm", torch.bfloat16, 128),
    NormCase("head_rms_norm", torch.float16, 600),
)


def run_norm_selftest(device: torch.device, cases: tuple[NormCase, ...]) -> list[Check]:
    """The kernels of these cases: outputs and every gradient."""
    return collect(cases, _check, device)


def _check(case: NormCase, device: torch.device) -> Iterator[Check]:
    gen = torch.Generator().manual_seed(0)
    rows = [(3, 100, case.C)] * 3
    channels = [(case.C,)] * (2 if case.norm == "layer_norm" else 1)
    inputs = [torch.randn(shape, generator=gen, dtype=F32).to(case.dtype) for shape in (*rows, *channels)]
    exact, _ = _run(_gated_norm, [x.double() for x in inputs])
    on_device = [x.to(device) for x in inputs]
    if device.type == "cuda":
        _run(fla_gated_norm, on_device)  # compiles and tunes
    results, milliseconds = _run(fla_gated_norm, on_device)
    for name, result in results.items():
        yield Check(case, name, error_of(result, exact[name]), milliseconds[name != "o"])


def _gated_norm(x: Tensor, gate: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    shape = weight.shape
    normed = F.rms_norm(x, shape, weight, eps) if bias is None else F.layer_norm(x, shape, weight, bias, eps)
    return normed * F.silu(gate)


def _run(function, inputs: list[Tensor]) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Output and gradients, and the milliseconds of forward and backward."""
    grad, *leaves = (x.detach().requires_grad_() for x in inputs)
    x, gate, weight, *bias = leaves
    start = now(x.device)
    o = function(x, gate, weight, bias[0] if bias else None, 1e-5)
    middle = now(x.device)
    gradients = torch.autograd.grad(o, leaves, grad.detach())
    times = 1e3 * (middle - start), 1e3 * (now(x.device) - middle)
    return {"o": o, **dict(zip(("dx", "dgate", "dweight", "dbias"), gradients, strict=False))}, times
