"""The kernels against the float64 reference, on this machine: a Triton and a GPU may not fit each other.

What is allowed here tells a miscompiled kernel from a rounding; how exact the kernels are is for the tests.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator
from subprocess import CalledProcessError
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from triton.errors import TritonError

from ...modeling.feature_maps_nala import FeatureSpec
from ...modeling.linear_attention_nala import step_attention
from ..attention import nala_attention
from .decode import fused_step
from .plan import MAX_CANDIDATES
from .tuning import candidate

F32 = torch.float32  # named everywhere, since the process may have another default

# Largest error, in parts of the largest value.
ALLOWED = {torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}


# What kernels raise that do not fit a machine: CalledProcessError comes from a C compiler, OSError from
# Triton's cache where it cannot be written, the last two from an fla whose functions have changed.
KERNEL_ERRORS = (TritonError, RuntimeError, CalledProcessError, OSError, ImportError, TypeError)


class Case(NamedTuple):
    """A call to check."""

    form: str
    rotary: str | None
    causal: bool
    dtype: torch.dtype
    D: int
    V: int

    @property
    def part(self) -> str:
        """Whose kernels it checks."""
        return "linear"

    @property
    def allowed(self) -> float:
        """The largest error that is a rounding."""
        return ALLOWED[self.dtype]

    def __str__(self) -> str:
        direction = "causal" if self.causal else "bidirectional"
        rotary = f"{self.rotary} rotary" if self.rotary else "no rotary"
        return f"{self.form}, {rotary}, {direction}, {str(self.dtype)[6:]}, D={self.D}, V={self.V}"


class Check(NamedTuple):
    """One result of a call beside the reference's; `error` is infinite where the call raised."""

    case: Any
    name: str
    error: float
    milliseconds: float
    message: str = ""

    @property
    def passed(self) -> bool:
        """Whether the error is allowed."""
        return self.error <= self.case.allowed


QUICK = (Case("cosine", "phase", True, torch.bfloat16, 64, 64),)
FULL = (
    *QUICK,
    Case("cosine", None, True, torch.bfloat16, 128, 128),
    Case("polarity", None, True, torch.float16, 64, 40),
    Case("cosine", None, True, torch.float32, 24, 16),
    Case("polarity", "axial", False, torch.float32, 32, 32),
)
# In the interpreter, where each number costs.
TOY = (
    Case("cosine", "phase", True, torch.bfloat16, 16, 8),
    Case("polarity", "axial", False, torch.float32, 16, 8),
)


def run_selftest(device: torch.device, cases: tuple[Case, ...]) -> list[Check]:
    """Every kernel of these cases: outputs, final state, every gradient and a decoded token."""
    return collect(cases, _check, device)


def collect(
    cases: tuple[Any, ...], check: Callable[[Any, torch.device], Iterable[Check]], device: torch.device
) -> list[Check]:
    """The checks of all cases, whatever mode the first use of a kernel runs in.

    Raises:
        torch.OutOfMemoryError: Since that says nothing about a kernel.
    """
    checks = []
    for case in cases:
        try:
            with (
                torch.inference_mode(False),
                torch.enable_grad(),
                torch.autocast(device.type, enabled=False),
                torch.device("cpu"),  # of tensors made without one
                saved_tensors_hooks(_same, _same),  # a checkpoint around the caller would count our tensors
            ):
                checks += check(case, device)
        except torch.OutOfMemoryError:
            raise
        except KERNEL_ERRORS as error:
            first_line = str(error).strip().split("\n")[0]
            checks.append(
                Check(case, "compilation or launch", math.inf, 0.0, f"{type(error).__name__}: {first_line}")
            )
    return checks


def _same(x: Tensor) -> Tensor:
    return x


def _check(case: Case, device: torch.device) -> Iterator[Check]:
    """Many chunks, and where there is another way for one chunk, that one too, with all tiles of the plan."""
    rows, several, one = (2, 300, 100) if device.type == "cuda" else (1, 130, 20)
    for place in range(MAX_CANDIDATES if device.type == "cuda" else 1):
        tiles = f"tiles {place + 1}, " if place else ""
        with candidate(place):
            yield from _check_attention(case, device, rows, several, prefix=tiles)
            if case.causal:
                yield from _check_attention(case, device, 2, one, prefix=f"{tiles}short ")
    if case.causal:
        yield _check_step(case, _inputs(case, 2, 1), device)


def _check_attention(case: Case, device: torch.device, rows: int, T: int, prefix: str) -> Iterator[Check]:
    inputs = _inputs(case, rows, T)
    exact, _ = _attend(case, [x.double() for x in inputs], T, "reference")
    on_device = [x.to(device) for x in inputs]
    if device.type == "cuda":
        _attend(case, on_device, T, "triton")  # compiles
    results, milliseconds = _attend(case, on_device, T, "triton")
    for name, result in results.items():
        is_gradient = name.startswith("d")
        yield Check(case, prefix + name, error_of(result, exact[name]), milliseconds[is_gradient])


def _inputs(case: Case, rows: int, T: int) -> list[Tensor]:
    """q, k, v of two heads, and the gradient of o, rounded to the dtype."""
    gen = torch.Generator().manual_seed(0)
    widths = (case.D, case.D, case.V, case.V)
    return [torch.randn(rows, T, 2, width, generator=gen, dtype=F32).to(case.dtype) for width in widths]


def _tables(case: Case, T: int) -> tuple[Tensor, Tensor] | None:
    if case.rotary is None:
        return None
    angles = torch.arange(T)[:, None] * 10000 ** -torch.linspace(0, 1, case.D, dtype=F32)
    return angles.cos(), angles.sin()


def _attend(
    case: Case, inputs: list[Tensor], T: int, backend: str
) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Everything that a call gives, and the milliseconds of its forward and its backward."""
    *qkv, grad = inputs
    q, k, v = (x.detach().requires_grad_() for x in qkv)
    tables = _tables(case, T)
    rotary = None if tables is None else (tables[0].to(q.device), tables[1].to(q.device))
    start = now(q.device)
    o, state = nala_attention(
        q,
        k,
        v,
        form=case.form,
        rotary=rotary,
        rotary_layout=case.rotary or "phase",
        causal=case.causal,
        output_final_state=case.causal,
        backend=backend,
    )
    middle = now(q.device)
    gradients = torch.autograd.grad(o, (q, k, v), grad)
    times = 1e3 * (middle - start), 1e3 * (now(q.device) - middle)
    results = {"o": o, **dict(zip(("dq", "dk", "dv"), gradients, strict=True))}
    if state is not None:
        results |= {"S": state[0], "z": state[1]}
    return results, times


def _check_step(case: Case, inputs: list[Tensor], device: torch.device) -> Check:
    """One token after a state."""
    q, k, v = inputs[:3]
    gen = torch.Generator().manual_seed(1)
    state = torch.rand(2, 2, 2 * case.D, case.V + 1, generator=gen, dtype=F32)
    spec, layout = FeatureSpec(case.form), case.rotary or "phase"
    tables = _tables(case, 8)
    rotary = None if tables is None else (tables[0][7:], tables[1][7:])
    exact = step_attention(
        q.double(), k.double(), v.double(), state.double(), spec, rotary=rotary, rotary_layout=layout
    )
    rotary = None if rotary is None else (rotary[0].to(device), rotary[1].to(device))
    on_device = [x.to(device) for x in (q, k, v, state)]
    milliseconds = 0.0
    for _ in range(2):  # the first call compiles
        start = now(device)
        result = fused_step(*on_device, spec, rotary=rotary, rotary_layout=layout)
        milliseconds = 1e3 * (now(device) - start)
    error = max(error_of(x, y) for x, y in zip(result, exact, strict=True))
    return Check(case, "decode", error, milliseconds)


def error_of(result: Tensor, exact: Tensor) -> float:
    """Largest error in parts of the largest value; infinite where a value is not finite."""
    result, exact = result.detach().cpu().double(), exact.detach().double()
    error = float((result - exact).abs().max() / exact.abs().max())
    return error if math.isfinite(error) else math.inf


def now(device: torch.device) -> float:
    """Seconds, once the device is idle."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
