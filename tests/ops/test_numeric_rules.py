"""The numeric rules: zero and huge rows, exact zeros under a power, low precision, long sequences."""

import pytest
import torch
from op_cases import BACKENDS, BACKENDS_AND_DIRECTIONS, FORMS, make_case, qkv, tables
from tolerances import EXACT, TOLERANCES, assert_close_rows

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec, map_features
from nalaformer_hf.ops import nala_attention, nala_feature_maps
from nalaformer_hf.ops.reference import rotate_phase

POWER_FORMS = ("cosine", "polarity")


def attend_and_differentiate(q, k, v, **options) -> list[torch.Tensor]:
    """o and the gradients of its squares."""
    o, _ = nala_attention(q, k, v, **options)
    return [o, *torch.autograd.grad(o.square().sum(), (q, k, v))]


def changed(x: torch.Tensor, change) -> torch.Tensor:
    x = x.detach().clone()
    change(x)
    return x.requires_grad_()


def assert_right(results, q, k, v, form, **options) -> None:
    """Finite, and what float64 gives for the same numbers."""
    output, gradient = TOLERANCES[form, torch.float32]
    exact = attend_and_differentiate(
        *(x.detach().double().requires_grad_() for x in (q, k, v)), form=form, **options
    )
    for name, came, wanted in zip(("o", "q", "k", "v"), results, exact, strict=True):
        if name == "o":
            assert_close_rows(came, wanted, output, name)
        else:  # the gradient of a row with few keys is a difference that cancels, down to nothing for one key
            assert_close_rows(came, wanted, gradient, name, row_floor=1.0)


# Zero rows


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
@pytest.mark.parametrize("which", ["query", "key", "both", "all"])
def test_zero_rows(form, backend, causal, which):
    """The published code returns NaN for every gradient here. A black image is all zero rows."""
    q, k, v = qkv(2, 70, 2, 16, 5, dtype=torch.float32)
    rows = slice(None) if which == "all" else slice(0, 70, 3)

    def zero(x):
        x[:, rows] = 0

    q = changed(q, zero) if which != "key" else q
    k = changed(k, zero) if which != "query" else k
    options = {"form": form, "causal": causal, "backend": backend}
    results = attend_and_differentiate(q, k, v, **options)
    if which == "all":
        for x in results:
            assert (x == 0).all()
        return
    assert_right(results, q, k, v, **options)
    if which != "key":
        o, grad_q = results[0], results[1]
        assert (o[:, rows] == 0).all()
        assert (grad_q[:, rows] == 0).all()


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
@pytest.mark.parametrize("small", ["q", "k"])
def test_rows_whose_norm_underflows_stay_finite(form, backend, causal, small):
    """In fp32 squares below 1e-45 are zero, and so are cubes of keys; 1 / z² overflows long before."""
    q, k, v = (x.detach() for x in qkv(1, 40, 2, 64, 16, dtype=torch.float32))
    for exponent in range(-45, -4):
        tiny = 10.0**exponent
        leaves = [x.clone().requires_grad_() for x in (q * tiny, k, v * 10)]
        if small == "k":
            leaves[:2] = [x.clone().requires_grad_() for x in (q, k * tiny)]
        for x in attend_and_differentiate(*leaves, form=form, causal=causal, backend=backend):
            assert x.isfinite().all(), exponent


def test_features_are_those_of_the_published_code_bit_for_bit():
    """Wherever that code is finite: only a zero norm is replaced, and nothing is added to the others."""
    q, k, _ = (x.detach() for x in qkv(2, 50, 2, 64, 1, dtype=torch.float32))
    q[0, :10] *= 1e-3
    q[0, 3] = 0
    norm = q.norm(dim=-1, keepdim=True)
    power = 3 * (0.5 + torch.tanh(norm))
    published = torch.cat((torch.relu(-q / norm), torch.relu(q / norm)), dim=-1) ** power
    finite = published.isfinite().all(-1)
    assert finite.sum() == finite.numel() - 2
    for phi in (nala_feature_maps(q, k, form="polarity")[0], map_features(q, FeatureSpec("polarity"), True)):
        assert torch.equal(phi[finite], published[finite])
        assert (phi[~finite] == 0).all()


# Exact zeros under a power, and the exponent's own gradient


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
@pytest.mark.parametrize("tau", [0.5, 1 / 3])
def test_one_hot_rows(form, backend, causal, tau):
    """All but one feature are exactly zero, also where λτ = 1; half of the pairs have opposite signs."""
    gen = torch.Generator().manual_seed(0)
    place = torch.randint(8, (2, 2, 70, 2), generator=gen)
    sign = torch.randint(2, (2, 2, 70, 2), generator=gen) * 2 - 1
    q, k = torch.nn.functional.one_hot(place, 8) * sign.unsqueeze(-1) * 1.5
    q, k = (x.float().requires_grad_() for x in (q, k))
    v = qkv(2, 70, 2, 8, 5, dtype=torch.float32)[2]
    options = {"form": form, "causal": causal, "backend": backend, "tau": tau}
    o, grad_q, grad_k, grad_v = attend_and_differentiate(q, k, v, **options)
    exact = attend_and_differentiate(*(x.detach().double().requires_grad_() for x in (q, k, v)), **options)
    output, gradient = TOLERANCES[form, torch.float32]
    assert_close_rows(o, exact[0], output)
    assert_close_rows(grad_v, exact[3], gradient)
    # The direction is at a corner and the power of 1 is 1: a query has no gradient but rounding.
    assert_close_rows(grad_k, exact[2], gradient, row_floor=1.0)
    assert grad_q.abs().max() < 1e-9


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_gradient_flows_through_the_norm(form, backend):
    """Along q itself the direction does not change, so this part of the gradient is the norm's."""
    q, k, v = (x.detach().mul(0.3).requires_grad_() for x in qkv(1, 40, 2, 8, 5))

    def radial(norm_scale: float) -> float:
        grad_q = attend_and_differentiate(q, k, v, form=form, backend=backend, norm_scale=norm_scale)[1]
        return float((grad_q * q.detach()).sum(-1).abs().max())

    assert radial(1.0) > 1e-3
    assert radial(0.0) < EXACT


# Huge values and low precision


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
def test_huge_norms(form, backend, causal):
    q, k, v = (x.detach().mul(1e4).requires_grad_() for x in qkv(1, 70, 2, 16, 5, dtype=torch.float32))
    if form == "elu":
        q, k = (x.detach().abs().requires_grad_() for x in (q, k))  # e^-1e4 is zero, and so are whole rows
    options = {"form": form, "causal": causal, "backend": backend}
    assert_right(attend_and_differentiate(q, k, v, **options), q, k, v, **options)


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_half_precision_keys_whose_cube_overflows(form, backend):
    """40.3³ is the largest fp16 number, and a tenth of the query features is below its smallest."""
    q, k, v = qkv(1, 70, 2, 64, 5, dtype=torch.float16)
    k = changed(k, lambda x: x.mul_(100))
    o, _ = nala_attention(q, k, v, form=form, backend=backend)
    exact, _ = nala_attention(q.double(), k.double(), v.double(), form=form, backend="reference")
    assert_close_rows(o, exact, TOLERANCES[form, torch.float16][0])


@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_changes_no_bit(backend, causal, dtype):
    case = make_case("cosine", 70, dtype=torch.float32, causal=causal, rotary="phase")
    outputs, gradients = case.run(backend)
    with torch.autocast("cpu", dtype=dtype):
        cast_outputs, cast_gradients = case.run(backend)
    for name, x in outputs.items():
        assert torch.equal(cast_outputs[name], x), name
    if backend == "torch":  # autograd's own products run under the autocast of whoever calls backward
        for name, x in gradients.items():
            assert torch.equal(cast_gradients[name], x), name


@pytest.mark.parametrize("backend", ["recurrent", "torch"])
def test_state_stays_fp32_over_a_long_decode(backend):
    """With v = 1 every output is 1. A bf16 z stalls: 1.125 after 1,152 tokens."""
    gen = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, 4096, 1, 16, generator=gen).bfloat16()
    v = torch.ones(1, 1, 1, 2, dtype=torch.bfloat16)
    state, worst = None, 0.0
    for t in range(4096):
        q_t, k_t = q[:, t : t + 1], k[:, t : t + 1]
        o, state = nala_attention(q_t, k_t, v, initial_state=state, output_final_state=True, backend=backend)
        worst = max(worst, float((o - 1).abs().max()))
    assert state[1].dtype == torch.float32
    assert worst < 0.01


# Long and early rows


@pytest.mark.parametrize("form", POWER_FORMS)
@pytest.mark.parametrize("causal", [True, False])
def test_fifty_thousand_tokens_in_bf16(form, causal):
    """Rows here and there against their own sum over all keys in float64."""
    T, picked = 50_000, torch.tensor([0, 1, 63, 64, 25_000, 49_999])
    q, k, v = (x.detach() for x in qkv(1, T, 1, 16, 8, dtype=torch.bfloat16))
    rotary = tables("phase", form, T, 16)
    o, _ = nala_attention(q, k, v, form=form, causal=causal, rotary=rotary)

    plain_q, plain_k = (x[0, :, 0] for x in nala_feature_maps(q.double(), k.double(), form=form))
    turned_q, turned_k = (rotate_phase(x, *rotary) for x in (plain_q, plain_k))
    seen = (torch.arange(T) <= picked.unsqueeze(-1)) | (not causal)
    num = (turned_q[picked] @ turned_k.mT * seen) @ v[0, :, 0].double()
    den = (plain_q[picked] @ plain_k.mT * seen).sum(-1, keepdim=True)
    expected = num / (den if causal else den + 1e-6 * T)
    assert_close_rows(o[0, picked, 0], expected, TOLERANCES[form, torch.bfloat16][0])


@pytest.mark.parametrize(("D", "largest"), [(16, 60.0), (64, 10.0), (128, 7.0)])
def test_early_causal_rows_are_bounded(D, largest):
    """Σ_s |∂o_t/∂v_s| for t ≤ 4: with few keys the rotated numerator may be far above the denominator."""
    q, k, _ = qkv(64, 5, 16, D, 1)
    v = torch.eye(5, dtype=torch.float64).view(1, 5, 1, 5).expand(64, 5, 16, 5)  # o is the row of weights
    weights, _ = nala_attention(q, k, v, rotary=tables("phase", "cosine", 5, D))
    mass = weights.abs().sum(-1)
    assert mass[:, 0].max() < 1 + EXACT  # one key: weight 1
    assert 1.0 < mass.max() < largest


@pytest.mark.parametrize("backend", BACKENDS)
def test_early_causal_gradients_are_bounded(backend):
    q, k, v = qkv(32, 5, 8, 64, 16)
    o, _ = nala_attention(q, k, v, rotary=tables("phase", "cosine", 5, 64), backend=backend)
    grad_o = torch.randn(o.shape, generator=torch.Generator().manual_seed(0), dtype=o.dtype)
    largest = torch.linalg.vector_norm(grad_o, dim=-1).max()
    for x in torch.autograd.grad(o, (q, k, v), grad_o):
        assert torch.linalg.vector_norm(x, dim=-1).max() < 15 * largest


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("form", POWER_FORMS)
def test_rows_without_rotary_are_averages(backend, form):
    """The weights are positive and sum to 1."""
    q, k, _ = qkv(2, 80, 2, 16, 1)
    v = torch.eye(80, dtype=torch.float64).view(1, 80, 1, 80).expand(2, 80, 2, 80)
    weights, _ = nala_attention(q, k, v, form=form, backend=backend)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 80, 2, dtype=weights.dtype), rtol=0, atol=EXACT)
