"""A model whose layers run on the fused kernels is the model on the torch form."""

import pytest
import torch
from interpreted_fla import needs_fla
from tiny_models import error, random_ids, tiny_model

from nalaformer_hf.modeling import attention_nala
from nalaformer_hf.modeling.delta_rule_nala import step_delta_rule
from nalaformer_hf.ops.dispatch import FusedForms
from nalaformer_hf.ops.reference_delta import recurrent_delta_rule

pytestmark = pytest.mark.xdist_group("interpreter")


@pytest.mark.parametrize("name", ["linear", "linear-rotary-hybrid"])
def test_model_on_the_kernels(interpret, name):
    interpret("fused_models", "check_model", name)


@needs_fla
@pytest.mark.parametrize("name", ["delta-no-conv", "gated_delta-hybrid"])
def test_delta_model_on_the_kernels(interpret, name):
    """In fp16, where the torch form is in fp32."""
    errors = interpret("fused_delta_models", "delta_model_errors", name)
    assert max(errors.values()) < 1e-2, errors


@needs_fla
@pytest.mark.parametrize("name", ["linear", "gated_delta"])
def test_norm_and_gate_on_the_kernel(interpret, name):
    errors, kept = interpret("fused_norm_models", "compare", name)
    assert max(errors.values()) < 1e-5, errors
    fused, plain = kept
    assert fused == 6  # o, gate and their product, a channel and token, in 16 bits
    assert plain >= 12  # more where torch writes RMSNorm out


@pytest.mark.parametrize("name", ["delta-no-conv", "gated_delta"])
def test_delta_layers_run_the_forms_they_are_given(name, monkeypatch):
    calls = []

    def rule(*args, **kwargs):
        calls.append("rule")
        return recurrent_delta_rule(*args, **kwargs)

    def step(*args):
        calls.append("step")
        return step_delta_rule(*args)

    def forms(k, v, gated):
        assert gated == (name == "gated_delta")
        return FusedForms(rule, step)

    model, ids = tiny_model(name, num_hidden_layers=1), random_ids(2, 9)
    expected = model(ids).logits
    monkeypatch.setattr(attention_nala, "fused_delta_forms", forms)
    assert error(model(ids).logits, expected) < 1e-5
    with torch.no_grad():
        cache = model(ids[:, :-1], use_cache=True).cache
        assert error(model(ids[:, -1:], cache=cache).logits, expected[:, -1:]) < 1e-5
    assert calls == ["rule", "rule", "step"]
    cache = model(ids[:, :-1], use_cache=True).cache
    model(ids[:, -1:], cache=cache).logits.sum().backward()  # the kernels' step has no gradient
    assert calls == ["rule", "rule", "step", "rule"]
