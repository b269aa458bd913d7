"""The depthwise convolutions of the vision family, on images (B, Y, X, C): channels last.

Letters in shapes: B batch, Y rows, X columns, C channels, K kernel size.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from .linear_nala import is_traced


class NaLaDepthwiseConv(nn.Conv2d):
    """Depthwise convolution K×K with bias, plus the image itself if `residual`."""

    def __init__(self, channels: int, kernel_size: int, residual: bool):
        super().__init__(channels, channels, kernel_size, padding=kernel_size // 2, groups=channels)
        self.residual = residual

    def forward(self, x: Tensor) -> Tensor:
        """(B, Y, X, C) to the same."""
        image = x.permute(0, 3, 1, 2)
        if is_traced() or not _is_plain_cpu(x, self.weight):
            y = self._conv_forward(image, self.weight, self.bias)
            return (image + y if self.residual else y).permute(0, 2, 3, 1)
        weight = self.weight
        if self.residual:
            # The image itself is one more tap: a pass less here, and one less in the backward.
            weight = weight + F.pad(weight.new_ones(1, 1, 1, 1), [weight.shape[-1] // 2] * 4)
        if weight.shape[-1] != 5:
            return self._conv_forward(image, weight, self.bias).permute(0, 2, 3, 1)
        return _Depthwise5.apply(image, weight, self.bias).permute(0, 2, 3, 1)


def _is_plain_cpu(x: Tensor, weight: Tensor) -> bool:
    """Whether one added to a tap keeps the tap's digits, and the CPU's kernels run."""
    full = x.dtype == weight.dtype and x.dtype in (torch.float32, torch.float64)
    return full and x.device.type == "cpu" and not torch.is_autocast_enabled("cpu")


class _Depthwise5(torch.autograd.Function):
    """The 5×5 convolution; its weights' gradient is put together from four of 3×3.

    The CPU has a fast kernel for the gradient of 3×3 weights only (measured: 40 times faster than 5×5).
    """

    @staticmethod
    def forward(ctx, image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        ctx.save_for_backward(image, weight)
        return F.conv2d(image, weight, bias, padding=2, groups=weight.shape[0])

    @staticmethod
    @once_differentiable
    def backward(ctx, grad):
        image, weight = ctx.saved_tensors
        grad_image = _conv_grads(grad, image, weight, 2, (True, False, False))[0]
        padded = F.pad(image, (2, 2, 2, 2)).contiguous(memory_format=torch.channels_last)
        grad_weight, grad_bias = torch.empty_like(weight), None
        height, width = (size + 2 for size in image.shape[2:])
        for i, j in ((0, 0), (0, 2), (2, 0), (2, 2)):
            taps = weight[:, :, i : i + 3, j : j + 3]
            window = padded[:, :, i : i + height, j : j + width]
            _, part, grad_bias = _conv_grads(grad, window, taps, 0, (False, True, True))
            grad_weight[:, :, i : i + 3, j : j + 3] = part
        return grad_image, grad_weight, grad_bias


def _conv_grads(grad: Tensor, image: Tensor, weight: Tensor, padding: int, wanted: tuple[bool, bool, bool]):
    """Gradients of a depthwise convolution to its image, weight and bias."""
    channels = weight.shape[0]
    geometry = [channels], [1, 1], [padding, padding], [1, 1], False, [0, 0], channels, wanted
    return torch.ops.aten.convolution_backward(grad, image, weight, *geometry)
