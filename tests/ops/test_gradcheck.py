"""Numerical gradients in float64 for q, k, v and the initial state, over several chunks."""

import pytest
import torch
from op_cases import FORMS, ROTARIES, make_case

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.linear_attention_nala import chunked_attention, step_attention
from nalaformer_hf.ops import nala_attention


def options_of(case) -> dict:
    names = ("rotary", "rotary_layout", "causal", "cu_seqlens")
    return {name: case.options[name] for name in names if name in case.options}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 3, 5, 5]])
def test_causal_chunks(form, rotary, bounds):
    case = make_case(form, 5, B=1, H=1, D=4, V=2, rotary=rotary, bounds=bounds)
    S0, z0 = case.options["initial_state"]

    def chunks(q, k, v, S, z):
        state = torch.cat((S, z.unsqueeze(-1)), dim=-1)
        return chunked_attention(
            q, k, v, FeatureSpec(form), initial_state=state, chunk_size=2, **options_of(case)
        )

    assert torch.autograd.gradcheck(chunks, (case.q, case.k, case.v, S0, z0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 3, 5, 5]])
def test_bidirectional_chunks(form, rotary, bounds):
    case = make_case(form, 5, B=1, H=1, D=4, V=2, rotary=rotary, causal=False, bounds=bounds)

    def chunks(q, k, v):
        return chunked_attention(q, k, v, FeatureSpec(form), eps=0.1, chunk_size=2, **options_of(case))[0]

    assert torch.autograd.gradcheck(chunks, (case.q, case.k, case.v))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", ["reference", "recurrent", "torch"])
def test_public_function_with_a_state(form, backend):
    case = make_case(form, 3, B=2, H=1, D=4, V=2, rotary="phase")
    S0, z0 = case.options.pop("initial_state")

    def attend(q, k, v, S, z):
        o, final = nala_attention(q, k, v, initial_state=(S, z), backend=backend, **case.options)
        return o, *final

    assert torch.autograd.gradcheck(attend, (case.q, case.k, case.v, S0, z0))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ROTARIES)
def test_one_step(form, rotary):
    case = make_case(form, 1, B=2, H=1, D=4, V=2, rotary=rotary)
    S0, z0 = case.options["initial_state"]
    options = {name: case.options[name] for name in ("rotary", "rotary_layout")}

    def step(q, k, v, S, z):
        state = torch.cat((S, z.unsqueeze(-1)), dim=-1)
        return step_attention(q, k, v, state, FeatureSpec(form), **options)

    assert torch.autograd.gradcheck(step, (case.q, case.k, case.v, S0, z0))


def test_a_second_derivative_is_refused():
    case = make_case("cosine", 3)
    o, _ = nala_attention(case.q, case.k, case.v)
    (grad,) = torch.autograd.grad(o.square().sum(), case.q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
