"""The delta rule: by hand, then token by token, in chunks and in steps, against each other and peers."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize
from torch.utils.checkpoint import checkpoint
from transformers.models.qwen3_next import modeling_qwen3_next

from nalaformer_hf.modeling.delta_rule_nala import chunked_delta_rule, step_delta_rule
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec, unit_features
from nalaformer_hf.ops.reference_delta import recurrent_delta_rule

# (form, dtype) -> (output, gradient), relative to the largest entry; compared with the float64 recurrence.
TOLERANCES = {
    ("delta", torch.float64): (1e-12, 1e-12),
    ("delta", torch.float32): (3e-6, 5e-6),
    # The peers' own loss: they take decays as differences of sums over a chunk.
    ("delta_peer", torch.float32): (1e-5, 1e-5),
}
C = 16
LENGTHS = [1, C - 1, C, C + 1, 3 * C + 7]


class Inputs(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    beta: Tensor
    log_decay: Tensor | None
    initial_state: Tensor


def make(
    num_tokens: int,
    *,
    gated: bool = True,
    batch: int = 2,
    heads: int = 2,
    key_dim: int = 8,
    value_dim: int = 5,
    decay: float = 1.0,
    num_states: int | None = None,
    dtype: torch.dtype = torch.float64,
) -> Inputs:
    """Random inputs; q and k are unit rows without a negative entry, as NaLa's features are."""
    shape = (batch, num_tokens, heads)
    q, k = (normalize(torch.rand(*shape, key_dim, dtype=torch.float64), dim=-1) for _ in "qk")
    v = torch.randn(*shape, value_dim, dtype=torch.float64)
    beta = torch.rand(shape, dtype=torch.float64)
    log_decay = -decay * torch.rand(shape, dtype=torch.float64) if gated else None
    state = torch.randn(num_states or batch, heads, key_dim, value_dim, dtype=torch.float64)
    return Inputs(*(x if x is None else x.to(dtype) for x in (q, k, v, beta, log_decay, state)))


def call(form, x: Inputs, **options) -> tuple[Tensor, Tensor]:
    return form(*x[:5], initial_state=x.initial_state, **options)


def chunked(x: Inputs, **options) -> tuple[Tensor, Tensor]:
    return call(chunked_delta_rule, x, **{"chunk_size": C, **options})


def recurrent(x: Inputs, **options) -> tuple[Tensor, Tensor]:
    return call(recurrent_delta_rule, x, **options)


def stepped(x: Inputs) -> tuple[Tensor, Tensor]:
    state, outputs = x.initial_state, []
    for t in range(x.q.shape[1]):
        token = [y if y is None else y[:, t : t + 1] for y in x[:5]]
        o, state = step_delta_rule(*token, state)
        outputs.append(o)
    return torch.cat(outputs, dim=1), state


def with_gradients(run, x: Inputs, **options) -> tuple[list[Tensor], list[Tensor]]:
    """Output and final state, and the gradient of every input from both."""
    leaves = Inputs(*(y if y is None else y.detach().clone().requires_grad_() for y in x))
    o, state = run(leaves, **options)
    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in (o, state)]
    torch.autograd.backward([o, state], weights)
    return [o.detach(), state.detach()], [y.grad for y in leaves if y is not None]


def assert_near(actual: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    """Each entry near the largest one's scale, and each row near its own and the mean row's."""
    for i, (a, e) in enumerate(zip(actual, expected, strict=True)):
        a, e = a.double().cpu(), e.double().cpu()
        assert a.shape == e.shape
        error = a - e
        assert error.abs().max() <= tolerance * e.abs().max(), i
        row_error, row = torch.linalg.vector_norm(error, dim=-1), torch.linalg.vector_norm(e, dim=-1)
        assert (row_error <= tolerance * (row + row.mean())).all(), i


def assert_same_with_gradients(run, x: Inputs, expected, form: str = "delta", **options) -> None:
    outputs, grads = with_gradients(run, x, **options)
    output_tolerance, grad_tolerance = TOLERANCES[form, x.q.dtype]
    assert_near(outputs, expected[0], output_tolerance)
    assert_near(grads, expected[1], grad_tolerance)


@pytest.mark.parametrize("run", [recurrent, chunked, stepped])
@pytest.mark.parametrize(
    ("alpha", "o", "state"),
    [
        # S1 = k1 (v1 / 2)ᵀ = [[1, 2], [0, 0]], o1 = S1ᵀ (1, 1).
        # α = 1: S1ᵀ k2 = (0.6, 1.2), u2 = ((1, 0) - (0.6, 1.2)) / 2 = (0.2, -0.6), S2 = S1 + k2 u2ᵀ
        (1.0, [[1.0, 2.0], [1.12, 1.64]], [[1.12, 1.64], [0.16, -0.48]]),
        # α = 1/2: S1ᵀ k2 / 2 = (0.3, 0.6), u2 = (0.35, -0.3), S2 = S1 / 2 + k2 u2ᵀ
        (0.5, [[1.0, 2.0], [0.71, 0.82]], [[0.71, 0.82], [0.28, -0.24]]),
    ],
)
def test_two_tokens_by_hand(run, alpha, o, state):
    def tensor(values: list) -> Tensor:
        return torch.tensor(values, dtype=torch.float64).view(1, 2, 1, -1)

    x = Inputs(
        q=tensor([[1.0, 1.0], [1.0, 0.0]]),
        k=tensor([[1.0, 0.0], [0.6, 0.8]]),
        v=tensor([[2.0, 4.0], [1.0, 0.0]]),
        beta=tensor([0.5, 0.5])[..., 0],
        log_decay=None if alpha == 1 else tensor([0.0, math.log(alpha)])[..., 0],
        initial_state=torch.zeros(1, 1, 2, 2, dtype=torch.float64),
    )
    actual_o, actual_state = run(x)
    torch.testing.assert_close(actual_o[0, :, 0], torch.tensor(o, dtype=torch.float64))
    torch.testing.assert_close(actual_state[0, 0], torch.tensor(state, dtype=torch.float64))


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("run", [chunked, stepped])
@pytest.mark.parametrize("num_tokens", LENGTHS)
def test_chunks_and_steps_equal_the_recurrence(num_tokens, run, gated):
    x = make(num_tokens, gated=gated)
    assert_same_with_gradients(run, x, with_gradients(recurrent, x))


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("decay", [None, 0.01, 1.0, 200.0])
def test_fp32_equals_the_float64_recurrence(decay, device):
    """Sums of log decays reach -6,000 in a chunk; small ones stand between large ones."""
    x = make(150, gated=decay is not None, decay=decay or 0, batch=1, key_dim=64, value_dim=32)
    if decay is not None:
        x.log_decay[:, ::3] *= 1e-3
    expected = with_gradients(recurrent, x)
    in_fp32 = Inputs(*(y if y is None else y.to(device, torch.float32) for y in x))
    assert_same_with_gradients(chunked, in_fp32, expected, chunk_size=64)
    assert_same_with_gradients(stepped, in_fp32, expected)


def test_fp32_at_50_000_tokens_with_bf16_values():
    x = make(50_000, batch=1, heads=1, decay=0.1)
    x = x._replace(v=x.v.bfloat16())
    in_fp32 = Inputs(*(y if y.dtype == torch.bfloat16 else y.float() for y in x))
    with torch.no_grad():
        assert_near(
            chunked(in_fp32, chunk_size=64), chunked(x, chunk_size=64), TOLERANCES["delta", torch.float32][0]
        )


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("peer", ["chunk", "recurrent"])
def test_equals_transformers(peer, gated):
    peer = {
        "chunk": modeling_qwen3_next.torch_chunk_gated_delta_rule,
        "recurrent": modeling_qwen3_next.torch_recurrent_gated_delta_rule,
    }[peer].__wrapped__

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        decay = torch.zeros_like(x.beta) if x.log_decay is None else x.log_decay
        scaled = x.q * x.q.shape[-1] ** 0.5
        return peer(scaled, x.k, x.v, decay, x.beta, initial_state=x.initial_state, output_final_state=True)

    x = make(100, gated=gated, key_dim=32, value_dim=16, dtype=torch.float32)
    assert_same_with_gradients(chunked, x, with_gradients(run, x), form="delta_peer")


@pytest.mark.filterwarnings("ignore:Triton is not supported")
@pytest.mark.parametrize("gated", [False, True])
def test_equals_flash_linear_attention(gated):
    module = "gated_delta_rule" if gated else "delta_rule"
    naive = pytest.importorskip(f"fla.ops.{module}.naive", exc_type=ImportError)
    x = make(100, gated=gated, key_dim=32, value_dim=16, dtype=torch.float32)
    if gated:
        arguments = {"scale": 1.0, "initial_state": x.initial_state, "output_final_state": True}
        expected = naive.naive_recurrent_gated_delta_rule(*x[:5], **arguments)
    else:
        # Layout (B, H, T, D), scale K^-½.
        q, k, v, beta = (y.transpose(1, 2) for y in x[:4])
        o, state = naive.delta_rule_recurrence(q * q.shape[-1] ** 0.5, k, v, beta, x.initial_state)
        expected = o.transpose(1, 2), state
    assert_near(chunked(x), expected, TOLERANCES["delta_peer", torch.float32][0])


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("form", [chunked, recurrent, stepped])
def test_gradcheck(form, gated):
    x = make(7, gated=gated, batch=1, heads=1, key_dim=3, value_dim=2)
    leaves = [y.requires_grad_() for y in x if y is not None]
    options = {"chunk_size": 3} if form is chunked else {}

    def run(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return form(Inputs(*tensors) if gated else Inputs(*tensors[:4], None, tensors[4]), **options)

    assert torch.autograd.gradcheck(run, leaves)


@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("rows", [32, 1 << 12])
@pytest.mark.parametrize("lengths", [[5, 0, 3 * C + 7, C, 1], [0, 2 * C + 1, 0], [4]])
def test_packed_equals_separate(lengths, rows, gated, monkeypatch):
    """Empty sequences keep their state; `rows` small: one chunk a segment, so that states cross segments."""
    monkeypatch.setattr("nalaformer_hf.modeling.delta_rule_nala.SEGMENT_ROWS", {"cpu": rows})
    x = make(sum(lengths), gated=gated, batch=1, num_states=len(lengths))

    def separately(x: Inputs) -> tuple[Tensor, Tensor]:
        pieces = [y if y is None else y.split(lengths, dim=1) for y in x[:5]]
        outputs, states = [], []
        for i, length in enumerate(lengths):
            state = x.initial_state[i : i + 1]
            if length:
                piece = Inputs(*(y if y is None else y[i] for y in pieces), state)
                o, state = recurrent(piece)
                outputs.append(o)
            states.append(state)
        return torch.cat(outputs, dim=1), torch.cat(states)

    bounds = torch.tensor([0, *lengths]).cumsum(0)
    expected = with_gradients(separately, x)
    assert_same_with_gradients(chunked, x, expected, cu_seqlens=bounds)
    assert_same_with_gradients(recurrent, x, expected, cu_seqlens=bounds)


def test_no_initial_state_is_zeros():
    x = make(2 * C + 3)
    zeros = x._replace(initial_state=torch.zeros_like(x.initial_state))
    for form in (chunked_delta_rule, recurrent_delta_rule):
        for actual, expected in zip(form(*x[:5]), call(form, zeros), strict=True):
            torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    packed = make(2 * C, batch=1, num_states=3)
    bounds = torch.tensor([0, C, C, 2 * C])
    o, state = chunked_delta_rule(*packed[:5], cu_seqlens=bounds)
    assert (o.shape, state.shape) == ((1, 2 * C, 2, 5), (3, 2, 8, 5))
    assert not state[1].any()


@pytest.mark.parametrize("split", [1, C, 2 * C + 5])
def test_split_and_resume_equals_one_call(split):
    x = make(3 * C + 7)

    def in_two(x: Inputs) -> tuple[Tensor, Tensor]:
        first = Inputs(*(y[:, :split] for y in x[:5]), x.initial_state)
        o, state = chunked(first)
        rest, state = chunked(Inputs(*(y[:, split:] for y in x[:5]), state))
        return torch.cat((o, rest), dim=1), state

    assert_same_with_gradients(in_two, x, with_gradients(chunked, x))


@pytest.mark.parametrize("chunk_size", [1, 7, 64, 1000])
def test_chunk_size_changes_nothing(chunk_size):
    x = make(100)
    assert_same_with_gradients(chunked, x, with_gradients(chunked, x), chunk_size=chunk_size)


@pytest.mark.parametrize("gated", [False, True])
def test_strictly_causal(gated):
    x, past = make(3 * C, gated=gated), C + 5
    other = make(3 * C, gated=gated)._replace(initial_state=x.initial_state)
    for y, z in zip(x[:5], other[:5], strict=True):
        if y is not None:
            z[:, :past] = y[:, :past]
    assert torch.equal(chunked(x)[0][:, :past], chunked(other)[0][:, :past])
    leaves = [y.requires_grad_() for y in x[:5] if y is not None]
    grads = torch.autograd.grad(chunked(x)[0][:, :past].sum(), leaves)
    assert all(grad[:, :past].any() and not grad[:, past:].any() for grad in grads)


def test_batch_order_changes_nothing():
    x, order = make(3 * C + 7, batch=3), torch.tensor([2, 0, 1])
    permuted = Inputs(*(y[order] for y in x))
    assert_near(chunked(permuted), [y[order] for y in chunked(x)], TOLERANCES["delta", torch.float64][0])


@pytest.mark.parametrize("gated", [False, True])
def test_padding_leaves_the_state_as_it_is(gated):
    """A token with k = 0 and log decay 0, whatever its q, v and β."""
    x = make(3 * C + 7, gated=gated)
    pads = x._replace(
        k=torch.zeros_like(x.k), v=100 * x.v, log_decay=torch.zeros_like(x.log_decay) if gated else None
    )
    for run in (chunked, recurrent, stepped):
        assert torch.equal(run(pads)[1], x.initial_state)


@pytest.mark.parametrize("gated", [False, True])
def test_padding_anywhere(gated):
    x = make(2 * C + 9, gated=gated)
    real = torch.rand(x.q.shape[1]) < 0.6
    masked = x._replace(k=x.k.clone(), log_decay=x.log_decay.clone() if gated else None)
    masked.k[:, ~real] = 0
    if gated:
        masked.log_decay[:, ~real] = 0
    o, state = chunked(masked)
    expected = chunked(Inputs(*(y if y is None else y[:, real] for y in x[:5]), x.initial_state))
    assert_near([o[:, real], state], expected, TOLERANCES["delta", torch.float64][0])


def test_not_contiguous():
    x = make(3 * C + 7)
    strided = Inputs(*(torch.stack((y, -y), dim=-1)[..., 0] for y in x))
    assert not any(y.is_contiguous() for y in strided)
    assert_same_with_gradients(chunked, strided, with_gradients(chunked, x))
    assert_near(stepped(strided), stepped(x), TOLERANCES["delta", torch.float64][0])


@pytest.mark.parametrize("run", [chunked, recurrent, stepped])
def test_low_precision_inputs_are_computed_in_fp32(run):
    x = make(C + 5, dtype=torch.float32)
    low = Inputs(x.q, x.k, x.v.bfloat16(), x.beta.bfloat16(), x.log_decay.bfloat16(), x.initial_state)
    same = Inputs(*(y.float() for y in low))
    outputs, grads = with_gradients(run, low)
    expected_outputs, expected_grads = with_gradients(run, same)
    for actual, expected in zip(outputs, expected_outputs, strict=True):
        torch.testing.assert_close(actual, expected, rtol=0, atol=0)
    for actual, expected, leaf in zip(grads, expected_grads, low, strict=True):
        torch.testing.assert_close(actual, expected.to(leaf.dtype), rtol=0, atol=0)


@pytest.mark.parametrize("run", [chunked, recurrent, stepped])
def test_a_forgotten_past_is_forgotten(run):
    """α = 0 (log decay -inf) starts anew, with a finite gradient."""
    x = make(2 * C + 3)
    x.log_decay[:, C + 2] = -math.inf
    fresh = Inputs(*(y[:, C + 2 :] for y in x[:5]), torch.zeros_like(x.initial_state))
    outputs, grads = with_gradients(run, x)
    assert_near([outputs[0][:, C + 2 :], outputs[1]], recurrent(fresh), TOLERANCES["delta", torch.float64][0])
    assert all(grad.isfinite().all() for grad in grads)


@pytest.mark.parametrize("run", [chunked, stepped])
def test_a_written_value_is_read_back(run):
    """β = 1: reading at the key just written gives the value, also where all keys are one."""
    x = make(100, batch=1, key_dim=32, dtype=torch.float32, decay=0.1)
    x.k[:] = x.k[:, :1].clone()
    x = x._replace(q=x.k, beta=torch.ones_like(x.beta))
    options = {"chunk_size": 64} if run is chunked else {}
    assert_near([run(x, **options)[0]], [x.v], TOLERANCES["delta", torch.float32][0])


@pytest.mark.parametrize("form", ["cosine", "polarity"])
@pytest.mark.parametrize("gated", [False, True])
def test_with_nala_features(gated, form):
    """NaLa+DN and NaLa+GDN of the paper: gradients through the features, finite at zero rows."""
    spec = FeatureSpec(form=form)
    x = make(2 * C + 3, gated=gated, key_dim=16)
    q, k = torch.randn(2, *x.q.shape[:-1], 8, dtype=torch.float64)
    q[:, 3], k[:, 5] = 0, 0
    x = x._replace(q=q, k=k)

    def mapped(run):
        return lambda x: run(x._replace(q=unit_features(x.q, spec, True), k=unit_features(x.k, spec, False)))

    expected = with_gradients(mapped(recurrent), x)
    assert all(grad.isfinite().all() for grad in expected[1])
    assert_same_with_gradients(mapped(chunked), x, expected)


def test_backward_keeps_no_intermediates():
    """Until the backward: the inputs and one state a segment, not products, systems or a state a chunk."""
    x = make(1024, batch=1, key_dim=64, value_dim=32, dtype=torch.float32)
    leaves = Inputs(*(y.requires_grad_() for y in x))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        o, _ = chunked(leaves, chunk_size=64)
    assert sum(kept.values()) <= sum(y.nbytes for y in (*x[:5], o))


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_inside_gradient_checkpointing(use_reentrant):
    x = make(3 * C + 7)

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        return checkpoint(lambda *y: chunked(Inputs(*y)), *x, use_reentrant=use_reentrant)

    outputs, grads = with_gradients(run, x)
    expected = with_gradients(chunked, x)
    for actual, wanted in zip(outputs + grads, expected[0] + expected[1], strict=True):
        assert torch.equal(actual, wanted)


def test_recomputation_keeps_autocast_off():
    x = make(3 * C + 7, dtype=torch.float32)

    def run(x: Inputs) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=torch.bfloat16), torch.autocast("cpu", enabled=False):
            return chunked(x)

    outputs, grads = with_gradients(run, x)
    expected = with_gradients(chunked, x)
    for actual, wanted in zip(outputs + grads, expected[0] + expected[1], strict=True):
        assert torch.equal(actual, wanted)


@pytest.mark.parametrize("gated", [False, True])
def test_step_compiles_without_a_graph_break(gated):
    x = make(1, gated=gated, dtype=torch.float32)
    step = torch.compile(step_delta_rule, fullgraph=True, backend="aot_eager")
    assert_near(step(*x), step_delta_rule(*x), TOLERANCES["delta", torch.float32][0])


def test_chunks_compile_without_a_graph_break():
    x = make(C + 7, dtype=torch.float32)
    compiled = torch.compile(chunked, fullgraph=True, backend="aot_eager")
    assert_same_with_gradients(compiled, x, with_gradients(chunked, x))
