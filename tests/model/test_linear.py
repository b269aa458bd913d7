import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from nalaformer_hf.modeling.linear_nala import NaLaLinear, gated_linear, linear_gelu

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


def gated(layer: NaLaLinear, gate: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The plain form, in the operands' dtype."""
    return F.linear(F.silu(gate) * x, layer.weight.to(x), None)


def test_gated_linear_has_the_outputs_and_gradients_of_float64():
    layer, x = make((2, 5, 24), False)
    gate, grad = torch.randn(2, 5, 24), torch.randn(2, 5, 40)
    exact = [t.double().requires_grad_() for t in (gate, x, layer.weight.detach())]
    F.linear(F.silu(exact[0]) * exact[1], exact[2]).backward(grad.double())
    gate.requires_grad_()
    x.requires_grad_()
    out = gated_linear(layer, gate, x)
    out.backward(grad)
    torch.testing.assert_close(out, gated(layer, gate, x), rtol=TOLERANCE, atol=TOLERANCE)
    for actual, expected in zip((gate, x, layer.weight), exact, strict=True):
        torch.testing.assert_close(actual.grad.double(), expected.grad, rtol=1e-5, atol=1e-5)


@needs_onednn
def test_gated_linear_keeps_its_operands_alone():
    layer, x = make((2, 5, 24), False)
    gate, x, saved = torch.randn_like(x, requires_grad=True), x.requires_grad_(), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.data_ptr()) or t, lambda t: t):
        gated_linear(layer, gate, x)
    assert set(saved) == {t.data_ptr() for t in (gate, x, layer.weight)}


def test_gated_linear_of_a_frozen_weight():
    layer, x = make((2, 5, 24), False)
    layer.requires_grad_(False)
    x.requires_grad_()
    gated_linear(layer, torch.ones_like(x), x).sum().backward()
    assert layer.weight.grad is None
    torch.testing.assert_close(x.grad, (F.silu(torch.ones(24)) * layer.weight.sum(0)).expand_as(x))


def test_gradient_of_a_gated_gradient():
    layer, x = make((3, 24), False)
    gate = torch.randn_like(x, requires_grad=True)
    x.requires_grad_()

    def penalty(form):
        (slope,) = torch.autograd.grad(form(layer, gate, x).square().sum(), gate, create_graph=True)
        return torch.autograd.grad(slope.square().sum(), [gate, x, layer.weight])

    for actual, expected in zip(penalty(gated_linear), penalty(gated), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("hook", ["register_forward_hook", "register_forward_pre_hook"])
def test_a_hook_sees_the_input_of_a_gated_linear(hook):
    layer, x = make((2, 5, 24), False)
    seen = []
    getattr(layer, hook)(lambda module, inputs, *_: seen.append(inputs[0]))
    gated_linear(layer, x, x)
    torch.testing.assert_close(seen[0], F.silu(x) * x)


@pytest.mark.parametrize("bias", [False, True])
def test_gelu_of_a_linear_map_is_that_of_float64(bias):
    layer, x = make((2, 5, 24), bias)
    exact = F.gelu(F.linear(x.double(), layer.weight.double(), layer.bias.double() if bias else None))
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(linear_gelu(layer, x).double(), exact, rtol=TOLERANCE, atol=TOLERANCE)


@pytest.mark.parametrize("spoil", ["stride", "expand", "dtype"])
def test_a_bias_of_any_memory_is_read_right(spoil):
    layer, x = make((5, 24), True)
    biases = {"stride": torch.randn(80)[::2], "expand": torch.full((1,), 3.0).expand(40)}
    layer.bias = nn.Parameter(biases.get(spoil, torch.randn(40)), requires_grad=False)
    if spoil == "dtype":
        layer.bias.data = layer.bias.data.double()
        with pytest.raises(RuntimeError, match="dtype"):  # nn.Linear's own
            layer(x)
        return
    expected = F.linear(x, layer.weight, layer.bias)
    for function in (layer, lambda x: linear_gelu(layer, x)):
        for grad in (True, False):
            with torch.set_grad_enabled(grad):
                wanted = expected if function is layer else F.gelu(expected)
                torch.testing.assert_close(function(x), wanted, rtol=TOLERANCE, atol=TOLERANCE)


def test_forward_mode_and_transforms_get_the_operations():
    layer, x = make((5, 24), True)
    with torch.no_grad():
        _, tangent = torch.func.jvp(layer, (x,), (torch.ones_like(x),))
        torch.testing.assert_close(tangent, layer.weight.sum(1).expand(5, -1))
        torch.testing.assert_close(torch.func.vmap(layer)(x), layer(x), rtol=TOLERANCE, atol=TOLERANCE)


def test_global_hooks_see_every_call():
    layer, x = make((5, 24), True)
    seen = []
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(module))
    try:
        with torch.no_grad():
            linear_gelu(layer, x)
    finally:
        handle.remove()
    assert seen == [layer]


def test_gelu_of_a_hooked_linear_map_calls_it():
    layer, x = make((2, 5, 24), True)
    layer.register_forward_hook(lambda module, inputs, output: torch.zeros_like(output))
    with torch.no_grad():
        assert (linear_gelu(layer, x) == 0).all()
