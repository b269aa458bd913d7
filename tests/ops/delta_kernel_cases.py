"""What runs in the interpreting process: the delta rules on flash-linear-attention's kernels, in fp16."""

import torch
from interpreted_fla import patch_fla
from torch import Tensor
from torch.nn.functional import normalize

from nalaformer_hf.ops.reference_delta import recurrent_delta_rule
from nalaformer_hf.ops.triton import delta_selftest
from nalaformer_hf.ops.triton.delta import fla_delta_rule, fla_step_delta_rule


def selftest(*cases: tuple, broken: bool = False) -> list[tuple[str, str, float, bool]]:
    """(case, result, error, passed) of the self-test; `broken`: with every output of the step doubled."""
    patch_fla()

    def broken_step(*args) -> tuple[Tensor, Tensor]:
        o, state = fla_step_delta_rule(*args)
        return 2 * o, state

    delta_selftest.fla_step_delta_rule = broken_step if broken else fla_step_delta_rule
    with torch.inference_mode():
        checks = delta_selftest.run_delta_selftest(
            torch.device("cpu"), tuple(delta_selftest.DeltaCase(*case) for case in cases)
        )
    return [(check.case.part, check.name, check.error, check.passed) for check in checks]


def packed(lengths: list[int], gated: bool) -> dict[str, tuple[Tensor, Tensor]]:
    """(fla's, the reference's) outputs, states and gradients of packed sequences."""
    patch_fla()
    torch.manual_seed(0)
    T, H, K, V = sum(lengths), 2, 16, 24
    q, k = (normalize(torch.rand(1, T, H, K), dim=-1).half().float() for _ in "qk")
    v = torch.randn(1, T, H, V).half()
    beta, log_decay = torch.rand(1, T, H), -0.3 * torch.rand(1, T, H)
    inputs = [q, k, v, beta, torch.randn(len(lengths), H, K, V), *([log_decay] if gated else [])]
    weights = torch.randn(1, T, H, V), torch.randn(len(lengths), H, K, V)
    bounds = torch.tensor([0, *lengths]).cumsum(0)
    results = []
    for rule, given in ((fla_delta_rule, inputs), (recurrent_delta_rule, [x.double() for x in inputs])):
        leaves = [x.requires_grad_() for x in given]
        o, state = rule(*leaves[:4], *leaves[5:], initial_state=leaves[4], cu_seqlens=bounds)
        grads = [grad.to(x.dtype) for grad, x in zip(weights, (o, state), strict=True)]
        results.append([o, state, *torch.autograd.grad([o, state], leaves, grads)])
    names = ("o", "S", "dq", "dk", "dv", "dbeta", "dS", "dlog_decay")
    return {name: (x.detach(), y.detach()) for name, x, y in zip(names, *results, strict=False)}
