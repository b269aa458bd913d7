"""The chain of trust: reference quadratic = reference recurrent = chunks, outputs and every gradient."""

import pytest
import torch
from op_cases import BACKENDS, FORMS, ROTARIES, make_case, qkv, tables
from tolerances import EXACT, TOLERANCES, assert_close_rows

from nalaformer_hf.modeling import linear_attention_nala
from nalaformer_hf.ops import nala_attention, nala_feature_maps, resolve_backend
from nalaformer_hf.ops.reference import rotate_phase

C = 64
PACKED = [0, 0, 3, 70, 70, 150, 150]


def assert_equal_forms(case, backend: str, tolerances=(EXACT, EXACT)) -> None:
    """`backend` gives the reference's outputs and gradients."""
    expected = case.double().run("reference")
    actual = case.run(backend)
    for wanted, came, tolerance in zip(expected, actual, tolerances, strict=True):
        assert wanted.keys() == came.keys()
        for name in wanted:
            assert_close_rows(came[name], wanted[name], tolerance, name)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 7, 7, 12, 12]])
def test_recurrent_is_the_reference(form, rotary, bounds):
    assert_equal_forms(make_case(form, 12, rotary=rotary, bounds=bounds), "recurrent")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ROTARIES)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", [None, PACKED])
def test_chunks_are_the_reference(form, rotary, causal, bounds):
    assert_equal_forms(make_case(form, 150, rotary=rotary, causal=causal, bounds=bounds), "torch")


@pytest.mark.parametrize("T", [1, C - 1, C, C + 1, 3 * C + 7])
@pytest.mark.parametrize("causal", [True, False])
def test_any_number_of_tokens(T, causal):
    case = make_case("cosine", T, causal=causal, rotary="phase")
    case.options["eps"] = 0.1  # else one bidirectional token has no gradient but the rounding of ε = 1e-6
    assert_equal_forms(case, "torch")


@pytest.mark.parametrize(("D", "V"), [(2, 7), (3, 1), (7, 2), (64, 32)])
@pytest.mark.parametrize("causal", [True, False])
def test_any_widths(D, V, causal):
    assert_equal_forms(make_case("cosine", 70, D=D, V=V, causal=causal), "torch")


def test_one_dimension():
    # A direction in one dimension is a sign: the query's gradient is rounding only.
    case = make_case("cosine", 70, D=1, V=1)
    (expected, _), (outputs, gradients) = case.run("reference"), case.run("torch")
    assert_close_rows(outputs["o"], expected["o"], EXACT)
    assert gradients["q"].abs().max() < EXACT


@pytest.mark.parametrize("causal", [True, False])
def test_many_rows_go_through_in_pieces(causal, monkeypatch):
    # Groups of two batch rows, eight chunks at a time: the last group and the last run of chunks are shorter.
    monkeypatch.setitem(linear_attention_nala.SEGMENT_SIZE, "cpu", 2 * 8 * C * 16)
    assert_equal_forms(make_case("polarity", 9 * C + 5, B=5, causal=causal, rotary="phase"), "torch")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", [None, "phase"])
@pytest.mark.parametrize(("backend", "causal"), [("recurrent", True), ("torch", True), ("torch", False)])
def test_lower_precision(dtype, form, rotary, causal, backend):
    case = make_case(form, 3 * C + 7, D=16, V=8, dtype=dtype, rotary=rotary, causal=causal)
    assert_equal_forms(case, backend, TOLERANCES[form, dtype])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("backend", BACKENDS)
def test_dtypes_that_come_out(dtype, backend):
    case = make_case("cosine", 5, dtype=dtype)
    outputs, gradients = case.run(backend)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    assert {name: x.dtype for name, x in outputs.items()} == {"o": dtype, "S": wide, "z": wide}
    assert {x.dtype for name, x in gradients.items() if name in "qkv"} == {dtype}


def test_auto_can_be_asked_what_it_picks():
    case = make_case("cosine", 20, dtype=torch.float32)
    assert resolve_backend("auto") == "torch"
    assert torch.equal(case.run("auto")[0]["o"], case.run(resolve_backend("auto"))[0]["o"])


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_state_is_a_sum_of_feature_maps(form, backend):
    """S sums φ̃(k) vᵀ and z sums φ(k), in the basis that `nala_feature_maps` returns."""
    q, k, v = qkv(2, 70, 2, 8, 5)
    cos, sin = tables("phase", form, 70, 8)
    _, state = nala_attention(q, k, v, form=form, rotary=(cos, sin), output_final_state=True, backend=backend)
    assert state is not None
    phi = nala_feature_maps(q, k, form=form)[1]
    turned = rotate_phase(phi, cos.unsqueeze(1), sin.unsqueeze(1))
    assert_close_rows(state[0], torch.einsum("bthf,bthv->bhfv", turned, v), EXACT)
    assert_close_rows(state[1], phi.sum(1), EXACT)
