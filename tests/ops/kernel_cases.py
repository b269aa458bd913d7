"""What runs in the interpreting process: a kernel's case against the float64 reference."""

import weakref
from contextlib import AbstractContextManager
from itertools import product
from unittest import mock

import numpy as np
import torch
from op_cases import Case, make_case, qkv
from rounded_products import absolute_operands, numerators_alone, rounded_products
from tolerances import TOLERANCES, assert_close_kernel, assert_close_rows
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.linear_attention_nala import chunked_attention
from nalaformer_hf.ops import nala_attention
from nalaformer_hf.ops.triton import attention
from nalaformer_hf.ops.triton.attention import fused_attention
from nalaformer_hf.ops.triton.decode import fused_step
from nalaformer_hf.ops.triton.plan import Device, device_facts, make_plan
from nalaformer_hf.ops.triton.sequences import cut_sequences
from nalaformer_hf.ops.triton.sequential import is_sequential

GUARD = 1024


def guarded(x: torch.Tensor) -> torch.Tensor:
    """The same numbers with NaN in memory on both sides."""
    memory = torch.full((x.numel() + 2 * GUARD,), torch.nan, dtype=x.dtype)
    inside = memory[GUARD:-GUARD].view(x.shape)
    inside.copy_(x.detach())
    return inside.requires_grad_(x.requires_grad)


def guard(case: Case) -> Case:
    """A case whose inputs all stand between NaN."""
    options = dict(case.options)
    for name in ("rotary", "initial_state"):
        if options.get(name) is not None:
            options[name] = tuple(guarded(x) for x in options[name])
    return Case(guarded(case.q), guarded(case.k), guarded(case.v), options)


def tensor_cores() -> AbstractContextManager:
    """Inside, products read operands as a GPU does in tf32: without what stands behind ten bits."""

    def cut(x: TensorHandle) -> TensorHandle:
        return TensorHandle((x.data.view(np.int32) & -0x2000).view(np.float32), x.dtype)

    def dot(self, a: TensorHandle, b: TensorHandle, *args):
        return exact(self, cut(a), cut(b), *args)

    exact = InterpreterBuilder.create_dot
    return mock.patch.object(InterpreterBuilder, "create_dot", dot)


def check_kernels(form: str, T: int, has_state: bool = True, sequential: bool = False, **options) -> None:
    """Outputs, states and every gradient of backend "triton" are those of the reference."""
    case = make_case(form, T, **options)
    if not has_state:
        case.options |= {"initial_state": None, "output_final_state": False}
    case.options["eps"] = 0.1  # else a bidirectional row of one token has no gradient but rounding
    expected = case.double().run("reference")
    with rounded_products(case.q.dtype):
        rounded = case.run("reference")
    with absolute_operands():
        terms, _ = case.double().run("reference")
    with numerators_alone():
        _, gradient_terms = case.double().run("reference")
    with mock.patch.object(attention, "is_sequential", return_value=sequential) as choice, tensor_cores():
        actual = guard(case).run("triton")
    choice.assert_called_once()
    results = zip(expected, actual, rounded, (terms, gradient_terms), strict=True)
    for is_gradient, (wanted, came, attainable, sizes) in enumerate(results):
        assert wanted.keys() == came.keys()
        for name, x in wanted.items():
            options = name, bool(is_gradient), attainable[name], sizes[name]
            assert_close_kernel(came[name], x, form, case.q.dtype, *options)


def check_step(form: str, rotary: str | None, dtype: torch.dtype, D: int, V: int, in_place: bool) -> None:
    """A prefill in kernels, then tokens one by one in the decode kernel, are one pass of the torch form."""
    case = make_case(form, 5, D=D, V=V, dtype=dtype, rotary=rotary)
    q, k, v = (x.detach() for x in (case.q, case.k, case.v))
    spec = FeatureSpec(form)
    options = {"rotary_layout": rotary or "phase"}
    tables = case.options["rotary"]

    def cut(start: int, stop: int):
        rotary = None if tables is None else tuple(guarded(x[start:stop]) for x in tables)
        return *(guarded(x[:, start:stop]) for x in (q, k, v)), rotary

    wanted, wanted_state = chunked_attention(q, k, v, spec, rotary=tables, **options)
    *qkv, rotary = cut(0, 3)
    _, state = fused_attention(*qkv, spec, rotary=rotary, **options)
    outputs = []
    for t in (3, 4):
        *qkv, rotary = cut(t, t + 1)
        state = guarded(state)
        before = state.clone()
        o, new_state = fused_step(*qkv, state, spec, rotary=rotary, in_place=in_place, **options)
        assert (new_state is state) == in_place
        assert in_place or torch.equal(state, before)
        outputs.append(o)
        state = new_state
    assert o.dtype == dtype
    case.options["initial_state"] = None
    with rounded_products(dtype):  # as the prefill rounds what it leaves in the state
        rounded = case.run("reference")[0]["o"][:, 3:]
    assert_close_kernel(torch.cat(outputs, 1), wanted[:, 3:], form, dtype, "o", False, rounded)
    assert_close_kernel(state, wanted_state, form, dtype, "state", False)


def check_zero_rows(form: str) -> None:
    """Zero queries and keys: finite, and what the reference gives; all zero: zero."""
    case = make_case(form, 70, D=16, V=8, H=1, dtype=torch.float32)
    case.options |= {"initial_state": None, "output_final_state": False}
    with torch.no_grad():
        case.q[:, ::3] = 0
        case.k[:, ::5] = 0
    expected, actual = case.double().run("reference"), case.run("triton")
    output, gradient = TOLERANCES[form, torch.float32]
    assert_close_rows(actual[0]["o"], expected[0]["o"], output, "o")
    for name, wanted in expected[
        1
    ].items():  # the gradient of a row with few keys cancels, as in the torch form
        assert_close_rows(actual[1][name], wanted, gradient, name, row_floor=1.0)
    assert (actual[1]["q"][:, ::3] == 0).all()
    with torch.no_grad():
        case.q.zero_()
        case.k.zero_()
    for results in case.run("triton"):
        for x in results.values():
            assert (x == 0).all()


def check_extremes(form: str) -> None:
    """Norms that underflow, and fp16 keys whose cubes overflow fp16: everything stays finite."""
    for dtype, scale_q, scale_k in (
        (torch.float32, 1e-30, 1.0),
        (torch.float32, 1.0, 1e-12),
        (torch.float32, 1e-44, 1e-44),
        (torch.float16, 100.0, 100.0),
    ):
        q, k, v = (x.detach() for x in qkv(1, 40, 1, 16, 8, dtype=torch.float32))
        leaves = [x.to(dtype).requires_grad_() for x in (q * scale_q, k * scale_k, v)]
        o, _ = nala_attention(*leaves, form=form, backend="triton")
        for x in (o, *torch.autograd.grad(o.float().square().sum(), leaves)):
            assert x.isfinite().all(), (dtype, scale_q, scale_k)


def check_nan(form: str) -> None:
    """A row that reads NaN gives NaN, as in the torch form, also where NaN has the bits that GPUs give it."""
    gpu_nan = torch.tensor(0x7FFFFFFF, dtype=torch.int32).view(torch.float32)
    for dtype, place, causal in product((torch.float32, torch.bfloat16), range(3), (True, False)):
        inputs = [x.detach() for x in qkv(1, 40, 1, 16, 8, dtype=dtype)]
        inputs[place][0, 20, 0, 3] = gpu_nan
        options = {"form": form, "causal": causal}
        wanted, came = (nala_attention(*inputs, **options, backend=b)[0] for b in ("torch", "triton"))
        rows = slice(20, 21) if place == 0 else slice(20 if causal else 0, None)
        wanted, came = wanted[:, rows].isnan(), came[:, rows].isnan()
        assert wanted.any()
        assert torch.equal(came, wanted), (dtype, place, causal)


def check_saved_memory() -> None:
    """Between forward and backward: q, k, v, o and one number a token and head, each once."""
    storages = {}

    def pack(x: torch.Tensor) -> torch.Tensor:
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    B, T, H, D, V = 2, 130, 2, 24, 40
    q, k, v = qkv(B, T, H, D, V, dtype=torch.float32)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        nala_attention(q, k, v, backend="triton")
    assert sum(storages.values()) == 4 * B * T * H * (2 * D + 2 * V + 1)


def check_what_hooks_put_away() -> None:
    """Tensors that hooks put away until the backward (offloading, checkpoints) are kept by nothing else."""
    rotary = tuple(torch.rand(130, 24) for _ in range(2))
    for tables in (None, rotary):
        inputs = [x + 0 for x in qkv(1, 130, 1, 24, 40, dtype=torch.float32)]
        tables = tables and tuple(x + 0 for x in tables)
        owners = [weakref.ref(x) for x in (*inputs, *(tables or ()))]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: None, lambda x: x):
            o, _ = nala_attention(*inputs, rotary=tables, backend="triton")
        del inputs, tables
        assert o.requires_grad
        assert [owner() for owner in owners] == [None] * len(owners)


def check_one_candidate() -> None:
    """Nothing is timed in the interpreter, which has one configuration of each kernel."""
    device = device_facts(torch.device("cpu"))
    for D in (16, 64, 256):
        plan = make_plan(FeatureSpec(), D, D, torch.bfloat16, device)
        assert len(plan.sums) == len(plan.outputs) == len(plan.gradients) == 1
        assert len(plan.sequential) == (D <= 64)


def check_when_sequential() -> None:
    """Where sequences and heads keep the processors busy, or no sequence has a second chunk."""
    few, many = (Device(is_hip=False, shared=99 << 10, processors=n) for n in (4, 5))
    for device, T, heads, bounds, expected in (
        (many, 128, 1, None, True),  # one chunk
        (many, 129, 1, None, False),
        (few, 1000, 2, None, True),  # 2 rows, 2 heads, one block of values
        (many, 1000, 2, None, False),
        (few, 1000, 4, [0, 900, 1000], True),
        (many, 1000, 4, [0, 900, 1000], False),  # the long sequence takes longer than its share
    ):
        plan = make_plan(FeatureSpec(), 16, 16, torch.bfloat16, device)
        batch = 2 if bounds is None else 1
        bounds = None if bounds is None else torch.tensor(bounds)
        sequences = cut_sequences(batch, T, plan.chunk_size, bounds, torch.device("cpu"))
        assert is_sequential(plan, sequences, batch * T, heads) == expected
        bidirectional = make_plan(FeatureSpec(), 16, 16, torch.bfloat16, device, causal=False)
        assert not is_sequential(bidirectional, sequences, batch * T, heads)
