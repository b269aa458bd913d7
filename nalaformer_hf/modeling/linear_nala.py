"""A linear map that a CPU computes with oneDNN.

Letters in shapes: I in features, O out features.
"""

from __future__ import annotations

import functools
from typing import TypeGuard

import torch
import torch.nn.functional as F
import torch.nn.modules.module as registry
from torch import Tensor, nn
from torch.autograd import forward_ad

# Tokens whose part of a weight's gradient is computed together.
ROWS = 2048


class NaLaLinear(nn.Linear):
    """`nn.Linear` whose fp32 products on a CPU go to oneDNN in place of the BLAS.

    The BLAS of the usual builds of torch reads the weights with one thread when there is one token, and runs
    at half speed on processors that are not its vendor's (docs/log.md has the figures). Same numbers up to
    rounding; everywhere else, and under autocast or `torch.compile`, it is `nn.Linear` itself.
    """

    def forward(self, x: Tensor) -> Tensor:
        """(..., I) to (..., O)."""
        if _onednn_takes(x, self.weight, self.bias):
            return _product(x, self.weight, self.bias)
        return super().forward(x)


def gated_linear(linear: nn.Module, gate: Tensor, x: Tensor) -> Tensor:
    """`linear(silu(gate) · x)` of two (..., I), which are all that oneDNN's path keeps for the backward."""
    if torch.is_grad_enabled() and _is_plain(linear) and linear.bias is None:
        weight = linear.weight
        if _onednn_takes(x, weight):
            return _GatedProduct.apply(gate, x, weight)
    return linear(F.silu(gate) * x)


def linear_gelu(linear: nn.Module, x: Tensor) -> Tensor:
    """`gelu(linear(x))`, (..., I) to (..., O), in one pass where nothing is kept for a backward."""
    if not torch.is_grad_enabled() and _is_plain(linear) and _onednn_takes(x, linear.weight, linear.bias):
        return torch.ops.mkldnn._linear_pointwise(x, linear.weight, linear.bias, "gelu", [], "none")
    return F.gelu(linear(x))


def _is_plain(linear: nn.Module) -> TypeGuard[NaLaLinear]:
    """Whether calling `linear` is nothing but its map, so that nobody misses the call."""
    return type(linear) is NaLaLinear and not is_hooked(linear)


def is_hooked(*modules: nn.Module | None) -> bool:
    """Whether somebody else has a say in calls of these modules or of those within: hooks, offloading."""
    return _has_global_hooks() or any(
        "forward" in vars(module)
        or module._forward_hooks
        or module._forward_pre_hooks
        or module._backward_hooks
        or module._backward_pre_hooks
        for outer in modules
        if outer is not None
        for module in outer.modules()
    )


def _has_global_hooks() -> bool:
    return bool(
        registry._global_forward_hooks
        or registry._global_forward_pre_hooks
        or registry._global_backward_hooks
        or registry._global_backward_pre_hooks
    )


def is_traced() -> bool:
    """Whether the caller is being compiled or exported: then plain operations serve better."""
    return torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None


def _is_transformed() -> bool:
    """Whether forward-mode derivatives or a transform of `torch.func` want the operations themselves."""
    functorch = torch._C._functorch  # pyright: ignore[reportAttributeAccessIssue]
    return forward_ad._current_level >= 0 or functorch.peek_interpreter_stack() is not None


def _onednn_takes(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Whether all are plain fp32 tensors on a CPU, and nothing else has a say.

    oneDNN reads a bias as if it was contiguous.
    """
    return (
        not is_traced()
        and not _is_transformed()
        and x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.layout == torch.strided
        and type(weight) in (Tensor, nn.Parameter)
        and (bias is None or (bias.dtype == torch.float32 and bias.is_contiguous()))
        and x.numel() > 0
        and x.ndim > 0
        and x.shape[-1] == weight.shape[1]  # a misfit gets nn.Linear's own error
        and torch.backends.mkldnn.is_available()
        and bool(torch.backends.mkldnn.enabled)
        and not torch.is_autocast_enabled("cpu")
    )


def _product(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """X Wᵀ + b: (..., I), (O, I) and (O,) to (..., O)."""
    if torch.is_grad_enabled():
        return _Product.apply(x, weight, bias)
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


class _Product(torch.autograd.Function):
    """`_product` with its gradients, which are two more such products."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, bias: Tensor | None):
        needs_x, needs_weight, _ = ctx.needs_input_grad
        ctx.save_for_backward(x if needs_weight else None, weight if needs_x else None)
        return _product(x, weight, bias)

    @staticmethod
    def backward(ctx, grad: Tensor):
        x, weight = ctx.saved_tensors
        grad_x = None if weight is None else _product(grad, weight.t())
        rows = grad.reshape(-1, grad.shape[-1])
        grad_weight = None if x is None else _outer(rows, x.reshape(-1, x.shape[-1]))
        return grad_x, grad_weight, rows.sum(0) if ctx.needs_input_grad[2] else None


class _GatedProduct(torch.autograd.Function):
    """`_product(silu(gate) · x, weight)` with its gradients, from gate and x alone."""

    @staticmethod
    def forward(ctx, gate: Tensor, x: Tensor, weight: Tensor):
        ctx.save_for_backward(gate, x, weight)
        return _product(F.silu(gate) * x, weight)

    @staticmethod
    def backward(ctx, grad: Tensor):
        gate, x, weight = ctx.saved_tensors
        sigmoid, grad_weight = gate.sigmoid(), None
        opened = gate * sigmoid
        if ctx.needs_input_grad[2]:
            grad_weight = _outer(grad.reshape(-1, grad.shape[-1]), (opened * x).reshape(-1, x.shape[-1]))
        grad_product = _product(grad, weight.t())
        slope = sigmoid + opened * (1 - sigmoid)
        return grad_product * x * slope, grad_product * opened, grad_weight


def _outer(grad: Tensor, x: Tensor) -> Tensor:
    """Gᵀ X, (tokens, O) and (tokens, I) to (O, I), in pieces: oneDNN copies what it transposes."""
    pieces = zip(grad.split(ROWS), x.split(ROWS), strict=True)
    return functools.reduce(Tensor.add_, (_outer_piece(*piece) for piece in pieces))


def _outer_piece(grad: Tensor, x: Tensor) -> Tensor:
    """`_outer` of a few tokens; fastest where the wider factor takes the weight's place."""
    if grad.shape[1] < x.shape[1]:
        return _product(grad.t(), x.t())
    return _product(x.t(), grad.t()).t()
