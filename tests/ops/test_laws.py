"""What must hold for any input: causality, pieces equal the whole, nothing but the row's own past counts."""

from itertools import pairwise

import pytest
import torch
from op_cases import BACKENDS, BACKENDS_AND_DIRECTIONS, FORMS, make_case, qkv, tables
from tolerances import EXACT, assert_close_rows

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.linear_attention_nala import chunked_attention, step_attention
from nalaformer_hf.ops import nala_attention


def slice_tables(rotary, start, end):
    return rotary and tuple(x[..., start:end, :] for x in rotary)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", [None, "phase"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("changed", [0, 1, 63, 64, 100])
def test_a_later_token_changes_no_earlier_bit(form, rotary, backend, changed):
    q, k, v = (x.detach() for x in qkv(2, 130, 2, 8, 5, dtype=torch.float32))
    options = {"form": form, "rotary": tables(rotary, form, 130, 8), "backend": backend}
    before, _ = nala_attention(q, k, v, **options)
    for x in (q, k, v):
        x[:, changed] += 1
    after, _ = nala_attention(q, k, v, **options)
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("t", [1, 40, 63, 64, 129])
def test_no_gradient_comes_from_a_later_token(backend, t):
    q, k, v = qkv(1, 130, 2, 8, 5)
    o, _ = nala_attention(q, k, v, backend=backend)
    grad_q, grad_k, grad_v = torch.autograd.grad(o[:, t].square().sum(), (q, k, v))
    assert (grad_q[:, t] != 0).any()
    assert (grad_q[:, :t] == 0).all()
    assert (grad_q[:, t + 1 :] == 0).all()
    for grad in (grad_k, grad_v):
        assert (grad[:, : t + 1] != 0).any(-1).all()
        assert (grad[:, t + 1 :] == 0).all()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", ["phase", "axial", None])
def test_prefill_and_steps_are_one_pass(form, rotary):
    case = make_case(form, 90, rotary=rotary)
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    options = {"form": form, "rotary_layout": case.options["rotary_layout"], "output_final_state": True}
    rotary = case.options["rotary"]
    whole, (S, z) = nala_attention(q, k, v, rotary=rotary, **options)
    o, state = nala_attention(q[:, :70], k[:, :70], v[:, :70], rotary=slice_tables(rotary, 0, 70), **options)
    pieces = [o]
    for t in range(70, 90):
        q_t, k_t, v_t = (x[:, t : t + 1] for x in (q, k, v))
        o, state = nala_attention(
            q_t, k_t, v_t, rotary=slice_tables(rotary, t, t + 1), initial_state=state, **options
        )
        pieces.append(o)
    assert_close_rows(torch.cat(pieces, dim=1), whole, EXACT)
    assert_close_rows(state[0], S, EXACT)
    assert_close_rows(state[1], z, EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rotary", [None, "phase", "axial"])
def test_one_step_is_one_token_of_the_chunks(form, rotary):
    case = make_case(form, 1, rotary=rotary)
    S, z = case.options["initial_state"]
    state = torch.cat((S, z.unsqueeze(-1)), dim=-1)
    options = {name: case.options[name] for name in ("rotary", "rotary_layout")}
    spec = FeatureSpec(form)
    stepped = step_attention(case.q, case.k, case.v, state, spec, **options)
    chunked = chunked_attention(case.q, case.k, case.v, spec, initial_state=state, **options)
    for one, other in zip(stepped, chunked, strict=True):
        assert_close_rows(one, other, EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("cuts", [[1], [64], [63, 65], [10, 11, 12, 100]])
def test_split_and_resume_is_one_call(form, cuts):
    """Outputs and every gradient, through the states that pass from call to call."""
    case = make_case(form, 130, rotary="phase")
    outputs, gradients = case.run("torch")

    rotary, state = case.options["rotary"], case.options["initial_state"]
    pieces, bounds = [], [0, *cuts, 130]
    for start, end in pairwise(bounds):
        o, state = nala_attention(
            *(x[:, start:end] for x in (case.q, case.k, case.v)),
            form=form,
            rotary=slice_tables(rotary, start, end),
            initial_state=state,
            output_final_state=True,
        )
        pieces.append(o)
    came = {"o": torch.cat(pieces, dim=1), "S": state[0], "z": state[1]}
    gen = torch.Generator().manual_seed(2)
    loss = sum((x * torch.randn(x.shape, generator=gen, dtype=x.dtype)).sum() for x in came.values())
    for name, wanted in outputs.items():
        assert_close_rows(came[name], wanted, EXACT, name)
    came_gradients = torch.autograd.grad(loss, list(case.leaves.values()))
    for (name, wanted), grad in zip(gradients.items(), came_gradients, strict=True):
        assert_close_rows(grad, wanted, EXACT, name)


@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
def test_packed_sequences_are_separate_sequences(backend, causal):
    bounds = [0, 0, 3, 70, 70, 150, 150]
    case = make_case("cosine", 150, rotary="phase", causal=causal, bounds=bounds)
    o, final = nala_attention(case.q, case.k, case.v, backend=backend, **case.options)
    for i, (start, end) in enumerate(pairwise(bounds)):
        state = tuple(x[i : i + 1] for x in case.options["initial_state"]) if causal else None
        if start == end:  # an empty sequence hands its state on
            if causal:
                torch.testing.assert_close([x[i : i + 1] for x in final], list(state), rtol=0, atol=EXACT)
            continue
        alone, alone_final = nala_attention(
            *(x[:, start:end] for x in (case.q, case.k, case.v)),
            rotary=slice_tables(case.options["rotary"], start, end),
            causal=causal,
            initial_state=state,
            output_final_state=causal,
            backend=backend,
        )
        assert_close_rows(o[:, start:end], alone, EXACT)
        for packed, single in zip(final or (), alone_final or (), strict=True):
            assert_close_rows(packed[i : i + 1], single, EXACT)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ["left", "right", "inside"])
@pytest.mark.parametrize("causal", [True, False])
def test_null_keys_are_padding(form, place, causal):
    """A token whose key has no features changes no other row, whatever its query and value are."""
    q, k, v = (x.detach() for x in qkv(2, 100, 2, 8, 5))
    real = torch.ones(100, dtype=torch.bool)
    real[{"left": slice(0, 30), "right": slice(70, 100), "inside": slice(20, 50)}[place]] = False
    padded = k.clone()
    padded[:, ~real] = FeatureSpec(form).null_key
    options = {"form": form, "causal": causal, "eps": 0.0, "output_final_state": causal}
    o, final = nala_attention(q, padded, v, **options)
    alone, alone_final = nala_attention(q[:, real], k[:, real], v[:, real], **options)
    assert_close_rows(o[:, real], alone, EXACT)
    for x, y in zip(final or (), alone_final or (), strict=True):
        assert_close_rows(x, y, EXACT)


@pytest.mark.parametrize("causal", [True, False])
def test_a_row_does_not_see_the_batch(causal):
    """Order and size of the batch change nothing: no statistic is taken over it."""
    case = make_case("cosine", 600, B=5, H=4, D=32, V=8, causal=causal, rotary="phase", dtype=torch.float32)
    case.options |= {"initial_state": None}
    o, _ = nala_attention(case.q, case.k, case.v, **case.options)
    order = torch.tensor([3, 0, 4, 2, 1])
    shuffled, _ = nala_attention(case.q[order], case.k[order], case.v[order], **case.options)
    assert_close_rows(shuffled, o[order], 1e-6)
    for b in range(5):
        alone, _ = nala_attention(*(x[b : b + 1] for x in (case.q, case.k, case.v)), **case.options)
        assert_close_rows(alone, o[b : b + 1], 1e-6)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("bounds", [None, [0, 0, 3, 70, 70, 150]])
def test_chunk_size_changes_nothing(form, causal, bounds):
    case = make_case(form, 150, causal=causal, bounds=bounds)
    names = ("causal", "cu_seqlens", "rotary")
    options = {name: case.options[name] for name in names if name in case.options}
    results = []
    for chunk_size in (1, 7, 64, 150, 1000):
        o, _ = chunked_attention(
            case.q, case.k, case.v, FeatureSpec(form), eps=1e-6, chunk_size=chunk_size, **options
        )
        results.append((o, *torch.autograd.grad(o.square().sum(), (case.q, case.k, case.v))))
    for other in results[1:]:
        for one, x in zip(results[0], other, strict=True):
            assert_close_rows(x, one, EXACT)


@pytest.mark.parametrize("form", ["cosine", "polarity", "relu"])
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [2.0**-12, 2.0**12])
def test_scaling_the_keys_of_a_head_changes_nothing(form, backend, scale):
    """Not one bit: the causal ratio has no ε."""
    q, k, v = (x.detach() for x in qkv(2, 100, 2, 8, 5, dtype=torch.float32))
    scaled = k * torch.tensor([1.0, scale]).view(1, 1, 2, 1)
    assert torch.equal(
        nala_attention(q, scaled, v, form=form, backend=backend)[0],
        nala_attention(q, k, v, form=form, backend=backend)[0],
    )


@pytest.mark.parametrize("form", ["cosine", "polarity"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_the_norm_of_a_query_counts(form, backend):
    """The paper's point: with a fixed power (norm_scale 0) it cancels, as in plain linear attention."""
    q, k, v = (x.detach() * 0.3 for x in qkv(2, 100, 2, 8, 5))

    def difference(**options) -> float:
        o, _ = nala_attention(q, k, v, form=form, backend=backend, **options)
        scaled, _ = nala_attention(3 * q, k, v, form=form, backend=backend, **options)
        return (scaled - o)[:, 1:].norm() / o[:, 1:].norm()

    assert difference(norm_scale=0.0) < EXACT
    assert difference(norm_scale=1.0) > 0.01


@pytest.mark.parametrize(("backend", "causal"), BACKENDS_AND_DIRECTIONS)
def test_non_contiguous_inputs(backend, causal):
    case = make_case("cosine", 70, causal=causal, rotary="phase")
    expected = case.run(backend)

    def heads_first(x):  # (B, H, T, D) in memory
        return x.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()

    def every_other(x):  # strided in the last dimension
        return torch.stack((x.detach(), x.detach()), dim=-1).flatten(-2)[..., ::2].requires_grad_()

    for spread in (heads_first, every_other):
        case.q, case.k, case.v = (spread(x) for x in (case.q, case.k, case.v))
        assert not case.q.is_contiguous()
        for wanted, came in zip(expected, case.run(backend), strict=True):
            for name in wanted:
                assert_close_rows(came[name], wanted[name], EXACT, name)


def test_inputs_and_state_are_left_alone():
    case = make_case("cosine", 70, dtype=torch.float32, rotary="phase")
    before = [x.detach().clone() for x in (*case.leaves.values(), *case.options["rotary"])]
    case.run("torch")
    for x, copy in zip((*case.leaves.values(), *case.options["rotary"]), before, strict=True):
        assert torch.equal(x, copy)
