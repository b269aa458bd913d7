"""The reference with all rounded that a kernel must round, and in parts: what precision alone costs."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from unittest import mock

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from nalaformer_hf.ops import reference

# The reference's products but those of the denominator, which the kernels sum in fp32.
PRODUCTS = ("bthf,bshf->bhts", "bhts,bshv->bthv", "bthf,bhfv->bthv", "bthf,bthv->bhfv")


@contextmanager
def rounded_products(dtype: torch.dtype) -> Iterator[None]:
    """Inside, `quadratic_attention` rounds operands, o and their gradients; sums stay as they are."""
    ratio = mock.patch.object(reference, "_ratio", partial(_Ratio.apply, dtype))
    with ratio, _Operands(lambda x: _Rounded.apply(x, dtype)):
        yield


def absolute_operands() -> TorchFunctionMode:
    """Inside, o and S of `quadratic_attention` are sums of absolute terms."""
    return _Operands(torch.abs)


@contextmanager
def numerators_alone() -> Iterator[None]:
    """Inside, no gradient of `quadratic_attention` goes through the denominator."""
    with mock.patch.object(reference, "_ratio", lambda num, den: num / den.detach().unsqueeze(-1)):
        yield


class _Operands(TorchFunctionMode):
    """Inside, the operands of `PRODUCTS` are changed."""

    def __init__(self, change: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.change = change

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is torch.einsum and args[0] in PRODUCTS:
            args = args[0], *(self.change(x) for x in args[1:])
        return func(*args, **(kwargs or {}))


class _Rounded(torch.autograd.Function):
    """x rounded, and its gradient, which is an operand of the backward's next product."""

    @staticmethod
    def forward(ctx, x: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        return x.to(dtype).to(x.dtype)

    @staticmethod
    def backward(ctx, grad: Tensor):
        return grad.to(ctx.dtype).to(grad.dtype), None


class _Ratio(torch.autograd.Function):
    """num / den rounded, whose backward has only that to work with."""

    @staticmethod
    def forward(ctx, dtype: torch.dtype, num: Tensor, den: Tensor) -> Tensor:
        inverse = 1 / den.unsqueeze(-1)
        o = (num * inverse).to(dtype).to(num.dtype)
        ctx.save_for_backward(o, inverse)
        ctx.dtype = dtype
        return o

    @staticmethod
    def backward(ctx, grad: Tensor):
        o, inverse = ctx.saved_tensors
        grad = grad.to(ctx.dtype).to(grad.dtype) * inverse
        return None, grad, -(grad * o).sum(-1)
