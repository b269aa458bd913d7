import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from nalaformer_hf.modeling.linear_nala import NaLaLinear

# One fp32 rounding a product of 24 terms; measured 2e-7.
TOLERANCE = 1e-6
needs_onednn = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="torch without oneDNN")


def make(shape: tuple[int, ...], bias: bool) -> tuple[NaLaLinear, torch.Tensor]:
    torch.manual_seed(0)
    return NaLaLinear(24, 40, bias=bias), torch.randn(shape)


def operators(layer: nn.Module, x: torch.Tensor) -> set[str]:
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        layer(x)
    return {event.name for event in profiled.events()}


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(
    "shape", [(24,), (1, 24), (1, 1, 24), (3, 1, 24), (2, 5, 24), (2, 3, 2, 24), (0, 24)]
)
def test_outputs_and_gradients_are_those_of_float64(shape, bias):
    layer, x = make(shape, bias)
    exact = F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None)
    with torch.no_grad():
        torch.testing.assert_close(layer(x).double(), exact, rtol=TOLERANCE, atol=TOLERANCE)
    x.requires_grad_()
    y = layer(x)
    assert y.shape == (*shape[:-1], 40)
    torch.testing.assert_close(y.double(), exact, rtol=TOLERANCE, atol=TOLERANCE)
    grad = torch.randn_like(y)
    y.backward(grad)
    rows, grads = x.detach().double().reshape(-1, 24), grad.double().reshape(-1, 40)
    torch.testing.assert_close(
        x.grad.double(), grad.double() @ layer.weight.double(), rtol=1e-5, atol=TOLERANCE
    )
    torch.testing.assert_close(layer.weight.grad.double(), grads.T @ rows, rtol=1e-5, atol=TOLERANCE)
    if bias:
        torch.testing.assert_close(layer.bias.grad.double(), grads.sum(0), rtol=1e-5, atol=TOLERANCE)


def test_transposed_input():
    layer, x = make((24, 7), True)
    for gradients in (True, False):
        with torch.set_grad_enabled(gradients):
            torch.testing.assert_close(layer(x.T), F.linear(x.T, layer.weight, layer.bias))


@needs_onednn
@pytest.mark.parametrize("gradients", [True, False])
def test_fp32_on_a_cpu_goes_to_onednn(gradients):
    layer, x = make((2, 5, 24), False)
    with torch.set_grad_enabled(gradients):
        assert "mkldnn::_linear_pointwise" in operators(layer, x)


def test_gradient_of_a_gradient():
    layer, x = make((3, 24), True)

    def penalty(inner, y):
        (slope,) = torch.autograd.grad(inner(y).square().sum(), y, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [y, inner.weight])

    plain = nn.Linear(24, 40)
    plain.load_state_dict(layer.state_dict())
    x.requires_grad_()
    for actual, expected in zip(penalty(layer, x), penalty(plain, x), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_frozen_weight_keeps_no_input():
    layer, x = make((2, 5, 24), True)
    layer.requires_grad_(False)
    x.requires_grad_()
    layer(x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, layer.weight.sum(0).expand_as(x))
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.shape) or t, lambda t: t):
        layer(x)
    assert saved == [layer.weight.shape]


@pytest.mark.parametrize("gradients", [True, False])
def test_where_something_else_has_a_say_it_is_linear(gradients):
    layer, x = make((2, 5, 24), True)
    with torch.set_grad_enabled(gradients):
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
        with torch.backends.mkldnn.flags(enabled=False):
            assert torch.equal(layer(x), F.linear(x, layer.weight, layer.bias))
        assert layer.double()(x.double()).dtype == torch.float64
        assert layer.bfloat16()(x.bfloat16()).dtype == torch.bfloat16
        assert layer.to("meta")(x.to("meta")).device.type == "meta"


@pytest.mark.parametrize("gradients", [True, False])
def test_a_misfit_is_told_as_usual(gradients):
    layer, _ = make((1, 24), False)
    with torch.set_grad_enabled(gradients), pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
        layer(torch.zeros(3, 23))
