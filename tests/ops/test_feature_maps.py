"""The feature maps: what Eq. 16 prints, the two bases, the limit, and the fast forms' own copies."""

import math

import pytest
import torch
from op_cases import FORMS, qkv, tables
from tolerances import EXACT

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec, map_features, unit_features
from nalaformer_hf.ops import nala_attention, nala_feature_maps


def turn(phi: torch.Tensor) -> torch.Tensor:
    """[cos f ; sin f] to [cos(f + π/4) ; sin(f + π/4)]."""
    first, second = phi.chunk(2, dim=-1)
    return torch.cat((first - second, first + second), dim=-1) * math.sqrt(0.5)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    "options", [{}, {"power": 2.0, "tau": 1.0, "gain": 3.0, "norm_scale": 0.25}], ids=str
)
def test_fast_features_are_those_of_the_paper(form, options):
    q, k, _ = qkv(2, 30, 3, 8, 1)
    spec = FeatureSpec(form, **options)
    for paper, fast in zip(
        nala_feature_maps(q, k, form=form, **options),
        (map_features(q, spec, True), map_features(k, spec, False)),
        strict=True,
    ):
        torch.testing.assert_close(turn(paper) if form == "cosine" else paper, fast, rtol=0, atol=EXACT)


@pytest.mark.parametrize("form", FORMS)
def test_no_fast_feature_is_negative(form):
    q, k, _ = qkv(2, 200, 3, 16, 1, dtype=torch.float32)
    spec = FeatureSpec(form)
    assert (map_features(q, spec, True) >= 0).all()
    assert (map_features(k, spec, False) >= 0).all()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_features_come_in_fp32(dtype):
    q, k, _ = qkv(1, 5, 2, 4, 1, dtype=dtype)
    for phi, exact in zip(nala_feature_maps(q, k), nala_feature_maps(q.double(), k.double()), strict=True):
        assert phi.dtype == torch.float32
        assert exact.dtype == torch.float64
        torch.testing.assert_close(phi.double(), exact, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("is_query", [True, False])
@pytest.mark.parametrize("form", FORMS)
def test_gradients_of_the_fast_features(form, is_query):
    x = qkv(1, 6, 2, 5, 1)[0]
    assert torch.autograd.gradcheck(lambda x: map_features(x, FeatureSpec(form), is_query), x)


@pytest.mark.parametrize("power_tau", [(1.0, 1.0), (2.5, 0.5), (4.0, 2.0)])
def test_gradients_at_other_powers(power_tau):
    x = qkv(1, 6, 2, 5, 1)[0]
    spec = FeatureSpec("cosine", *power_tau)
    for is_query in (True, False):
        assert torch.autograd.gradcheck(lambda x, side=is_query: map_features(x, spec, side), x)


@pytest.mark.parametrize("form", ["cosine", "polarity"])
def test_unit_features_have_norm_one(form):
    # The libraries' 1e-6 under the root would leave 0.66 of a query's norm at D = 256.
    x = qkv(2, 50, 2, 256, 1, dtype=torch.float32)[0].detach()
    x[0, 3] = 0
    norms = torch.linalg.vector_norm(unit_features(x, FeatureSpec(form), True), dim=-1)
    assert (norms[0, 3] == 0).all()
    norms[0, 3] = 1
    torch.testing.assert_close(norms, torch.ones_like(norms), rtol=0, atol=1e-6)


@pytest.mark.parametrize("rotary", [None, "phase", "axial"])
@pytest.mark.parametrize("causal", [True, False])
def test_cosine_becomes_polarity_as_the_gain_grows(rotary, causal):
    """Exactly, in the three cases: no rotary, phase rotary, axial rotary in each half."""
    q, k, v = qkv(2, 40, 2, 8, 5)
    options = {
        "causal": causal,
        "rotary": tables(rotary, "cosine", 40, 8),
        "rotary_layout": rotary or "phase",
    }
    limit, _ = nala_attention(q, k, v, form="polarity", **options)
    errors = [
        (nala_attention(q, k, v, form="cosine", gain=gain, **options)[0] - limit).abs().max().item()
        for gain in (20.0, 2e2, 2e3, 2e6)
    ]
    assert errors[0] > errors[1] > errors[2]
    assert errors[3] < EXACT


@pytest.mark.parametrize(("D", "published"), [(16, 0.0003), (64, 0.003), (128, 0.007)])
def test_distance_of_the_two_forms_at_the_default_gain(D, published):
    """Total variation between their attention rows."""
    T = 64
    q, k, _ = qkv(4, T, 4, D, 1)
    v = torch.eye(T, dtype=torch.float64).view(1, T, 1, T).expand(4, T, 4, T)  # o is the row of weights
    rows = [nala_attention(q, k, v, form=form, causal=False, eps=0.0)[0] for form in ("cosine", "polarity")]
    total_variation = 0.5 * (rows[0] - rows[1]).abs().sum(-1).mean().item()
    assert published / 2 < total_variation < published * 2
