"""flash-linear-attention's delta kernels against the torch form in float64, on this machine."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import normalize

from ...modeling.delta_rule_nala import chunked_delta_rule
from .delta import fla_delta_rule, fla_step_delta_rule
from .selftest import F32, Check, collect, error_of, now

# Largest error, in parts of the largest value: fla rounds features, updates and states to 16 bits.
ALLOWED = {torch.float16: 1e-2, torch.bfloat16: 8e-2}


class DeltaCase(NamedTuple):
    """A call to check; `K`: the width of the features."""

    gated: bool
    dtype: torch.dtype
    H: int
    K: int
    V: int

    @property
    def part(self) -> str:
        """Whose kernels it checks."""
        return "gated_delta" if self.gated else "delta"

    @property
    def allowed(self) -> float:
        """The largest error that is a rounding."""
        return ALLOWED[self.dtype]

    def __str__(self) -> str:
        return f"{self.part}, {str(self.dtype)[6:]}, H={self.H}, K={self.K}, V={self.V}"


FULL = (
    DeltaCase(False, torch.bfloat16, 2, 128, 64),
    DeltaCase(True, torch.bfloat16, 2, 128, 64),
    DeltaCase(True, torch.bfloat16, 2, 256, 256),
    DeltaCase(False, torch.float16, 2, 48, 40),
)


def run_delta_selftest(device: torch.device, cases: tuple[DeltaCase, ...]) -> list[Check]:
    """The kernels of these cases: outputs, final state, every gradient and a decoded token."""
    return collect(cases, _check, device)


def _check(case: DeltaCase, device: torch.device) -> Iterator[Check]:
    inputs, grads = _inputs(case, T=300 if device.type == "cuda" else 70)
    exact, _ = _run(chunked_delta_rule, [x.double() for x in inputs], [x.double() for x in grads])
    on_device = [x.to(device) for x in inputs], [x.to(device) for x in grads]
    if device.type == "cuda":
        _run(fla_delta_rule, *on_device)  # compiles and tunes
    results, milliseconds = _run(fla_delta_rule, *on_device)
    for name, result in results.items():
        is_gradient = name.startswith("d")
        yield Check(case, name, error_of(result, exact[name]), milliseconds[is_gradient])
    yield _check_step(case, inputs, device)


def _inputs(case: DeltaCase, T: int) -> tuple[list[Tensor], list[Tensor]]:
    """q, k, v, β, state and log decay of two rows, and the gradients of o and of the final state."""
    gen = torch.Generator().manual_seed(0)
    B = 2
    q, k = (normalize(torch.rand(B, T, case.H, case.K, generator=gen, dtype=F32), dim=-1) for _ in "qk")
    v, grad_o = (torch.randn(B, T, case.H, case.V, generator=gen, dtype=F32) for _ in range(2))
    state, grad_state = (torch.randn(B, case.H, case.K, case.V, generator=gen, dtype=F32) for _ in range(2))
    beta, log_decay = (torch.rand(B, T, case.H, generator=gen, dtype=F32) for _ in range(2))
    inputs = [q.to(case.dtype).float(), k.to(case.dtype).float(), v.to(case.dtype), beta, state]
    return inputs + ([-0.1 * log_decay] if case.gated else []), [grad_o, grad_state]


def _run(rule, inputs: list[Tensor], grads: list[Tensor]) -> tuple[dict[str, Tensor], tuple[float, float]]:
    """Everything that a call gives, and the milliseconds of its forward and its backward."""
    leaves = [x.detach().requires_grad_() for x in inputs]
    q, k, v, beta, state, *log_decay = leaves
    start = now(q.device)
    o, final = rule(q, k, v, beta, *log_decay, initial_state=state)
    middle = now(q.device)
    gradients = torch.autograd.grad([o, final], leaves, [grads[0].to(o.dtype), grads[1]])
    times = 1e3 * (middle - start), 1e3 * (now(q.device) - middle)
    names = ("dq", "dk", "dv", "dbeta", "dS", "dlog_decay")
    return {"o": o, "S": final, **dict(zip(names, gradients, strict=False))}, times


def _check_step(case: DeltaCase, inputs: list[Tensor], device: torch.device) -> Check:
    """One token after a state."""
    q, k, v, beta, *log_decay = (x[:, :1] for x in (*inputs[:4], *inputs[5:]))
    state = inputs[4]
    exact = chunked_delta_rule(
        *(x.double() for x in (q, k, v, beta, *log_decay)), initial_state=state.double()
    )
    on_device = [x.to(device) for x in (q, k, v, beta, *log_decay)]
    decay = on_device[4] if case.gated else None
    milliseconds = 0.0
    for _ in range(2):  # the first call compiles
        start = now(device)
        result = fla_step_delta_rule(*on_device[:4], decay, state.to(device))
        milliseconds = 1e3 * (now(device) - start)
    error = max(error_of(x, y) for x, y in zip(result, exact, strict=True))
    return Check(case, "decode", error, milliseconds)
