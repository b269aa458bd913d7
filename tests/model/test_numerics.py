"""Numbers of the whole model: zero and huge inputs, low precision, rotary angles."""

import pytest
import torch
from tiny_models import ALL_NALA, FEW, HYBRIDS, VARIANTS, error, random_ids, tiny_config, tiny_model

from nalaformer_hf import NaLaAttention


def assert_finite_gradients(module):
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    assert gradients
    assert [name for name, gradient in gradients.items() if not torch.isfinite(gradient).all()] == []


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("zeros", ["all", "first", "last", "some"])
def test_zero_rows(name, zeros):
    """Zero embeddings give zero queries and keys wherever biases are zero."""
    model = tiny_model(name)
    embeds = model.get_input_embeddings()(random_ids(2, 70)).detach()
    embeds[
        :, {"all": slice(None), "first": slice(3), "last": slice(-3, None), "some": slice(9, 60, 2)}[zeros]
    ] = 0
    embeds.requires_grad_()
    outputs = model(inputs_embeds=embeds, labels=random_ids(2, 70))
    assert torch.isfinite(outputs.logits).all()
    outputs.loss.backward()
    assert torch.isfinite(embeds.grad).all()
    assert_finite_gradients(model)


@pytest.mark.parametrize("name", VARIANTS)
def test_zero_rows_step_by_step(name):
    model = tiny_model(name)
    embeds = torch.zeros(1, 4, 32, requires_grad=True)
    cache, logits = None, []
    for i in range(4):
        outputs = model(inputs_embeds=embeds[:, i : i + 1], cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
    torch.cat(logits, 1).square().sum().backward()
    assert torch.isfinite(torch.cat(logits)).all()
    assert torch.isfinite(embeds.grad).all()
    assert_finite_gradients(model)


@pytest.mark.parametrize("name", ALL_NALA)
@pytest.mark.parametrize("scale", [1e-30, 1e-12, 1e4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_layer_with_tiny_and_huge_inputs(name, scale, dtype):
    torch.manual_seed(0)
    layer = NaLaAttention(tiny_config(name)).to(dtype)
    x = (torch.randn(2, 70, 32) * scale).to(dtype).requires_grad_()
    output, _ = layer(x)
    assert torch.isfinite(output).all()
    output.float().square().sum().backward()
    assert torch.isfinite(x.grad).all()
    assert_finite_gradients(layer)


@pytest.mark.parametrize("name", VARIANTS)
def test_bf16_weights_stay_near_fp32(name):
    ids = random_ids(2, 70)
    model = tiny_model(name, initializer_range=0.1)
    expected = model(ids, labels=ids)
    half = tiny_model(name, initializer_range=0.1).to(torch.bfloat16)
    outputs = half(ids, labels=ids)
    assert outputs.logits.dtype == torch.bfloat16
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=0.02)
    assert error(outputs.logits.float(), expected.logits) < 0.15
    outputs.loss.backward()
    assert_finite_gradients(half)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_decoding_in_low_precision_equals_one_pass(name, dtype):
    model, ids = tiny_model(name, initializer_range=0.1).to(dtype), random_ids(2, 24)
    expected = model(ids).logits.float()
    assert torch.isfinite(expected).all()
    cache = model(ids[:, :10], use_cache=True).cache
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(10, 24)], 1).float()
    assert error(steps, expected[:, 10:]) < (0.05 if dtype == torch.bfloat16 else 0.01)


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_float64_model(name):
    ids = random_ids(2, 24)
    model = tiny_model(name).double()
    assert error(tiny_model(name)(ids).logits.double(), model(ids).logits) < 1e-5
    cache = model(ids[:, :10], use_cache=True).cache
    steps = torch.cat([model(ids[:, i : i + 1], cache=cache).logits for i in range(10, 24)], 1)
    assert error(steps, model(ids).logits[:, 10:]) < 1e-6  # RMSNorm of the library computes in fp32


@torch.no_grad()
@pytest.mark.parametrize("name", [*HYBRIDS, "linear-rotary"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_rotary_angles_are_not_cast_with_the_model(name, dtype):
    """Far positions see the same relative angles as near ones, also after a cast there and back."""
    model = tiny_model(name)
    cast = tiny_model(name).to(dtype).float()
    if cast.model.rotary_emb is not None:
        assert torch.equal(cast.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)
        assert tiny_model(name).to(dtype).model.rotary_emb.inv_freq.dtype == torch.float32
    cast.load_state_dict(model.state_dict())
    ids, positions = random_ids(1, 20), torch.arange(5000, 5020)[None]
    far = model(ids, position_ids=positions).logits
    assert torch.equal(cast(ids, position_ids=positions).logits, far)
    assert error(far, model(ids).logits) < 1e-3


@torch.no_grad()
def test_a_long_sequence_in_bf16_is_finite_and_near_fp32():
    ids = random_ids(1, 4000)
    for name in ("linear", "gated_delta"):
        model = tiny_model(name, initializer_range=0.1, num_hidden_layers=1)
        expected = model(ids, logits_to_keep=100).logits
        half = model.to(torch.bfloat16)(ids, logits_to_keep=100).logits.float()
        assert error(half, expected) < 0.15
