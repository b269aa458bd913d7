"""torch.compile: the same tokens and gradients, one graph for all decode steps."""

import pytest
import torch
from tiny_models import FEW, HYBRIDS, error, random_ids, tiny_model
from torch._dynamo.utils import counters
from transformers import CompileConfig

# Dynamo's part alone, without a C++ compiler: does it trace, break the graph, or compile again?
TRACE_ONLY = "eager"
SLOW = pytest.mark.slow


@pytest.fixture(autouse=True)
def _fresh_dynamo():
    torch.compiler.reset()
    counters.clear()


def num_graphs() -> int:
    return counters["stats"]["unique_graphs"]


def small_model(name):
    """One layer where that is enough: tracing takes seconds a layer."""
    return tiny_model(name) if name in HYBRIDS else tiny_model(name, num_hidden_layers=1)


def generate(model, ids, length=20, **options):
    return model.generate(ids, max_new_tokens=length, do_sample=False, **options)


@pytest.mark.parametrize("name", ["linear", *(pytest.param(name, marks=SLOW) for name in FEW[1:])])
def test_decoding_traces_once(name):
    model, ids = small_model(name), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :3] = 0
    expected = [generate(model, ids), generate(model, ids, attention_mask=mask)]
    model.forward = torch.compile(model.forward, backend=TRACE_ONLY)
    assert torch.equal(generate(model, ids), expected[0])
    prefill_and_step = num_graphs()
    # Softmax attention's keys grow: their length becomes dynamic at the second step.
    assert prefill_and_step == (3 if name == "linear-rotary-hybrid" else 2)
    assert torch.equal(generate(model, ids), expected[0])
    assert num_graphs() == prefill_and_step
    assert torch.equal(generate(model, ids, attention_mask=mask), expected[1])
    assert not counters["graph_break"]


@pytest.mark.parametrize("name", ["gated_delta", *(pytest.param(name, marks=SLOW) for name in FEW[:3])])
def test_static_decoding_is_one_graph(name):
    model, config = small_model(name), CompileConfig(backend=TRACE_ONLY, fullgraph=True, mode=None)
    config._compile_all_devices = True
    for length, prompt in ((20, 9), (12, 11)):
        ids = random_ids(2, prompt)
        static = generate(model, ids, length, cache_implementation="static", compile_config=config)
        assert torch.equal(static, generate(model, ids, length))
        assert num_graphs() == 1


@pytest.mark.needs_compiler
@pytest.mark.parametrize("name", ["linear", *(pytest.param(name, marks=SLOW) for name in FEW[1:])])
def test_compiled_decoding(name):
    model, ids = small_model(name), random_ids(2, 9)
    config = CompileConfig(fullgraph=True, mode="default")
    config._compile_all_devices = True
    compiled = generate(model, ids, 40, cache_implementation="static", compile_config=config)
    assert torch.equal(compiled, generate(model, ids, 40))
    assert num_graphs() == 1


def training_gradients(model, forward, **arguments):
    model.zero_grad()
    forward(**arguments, use_cache=False).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters()}


def check_compiled_training(model, backend, **extra):
    ids = random_ids(1, 70)
    arguments = {"input_ids": ids, "labels": ids, **extra}
    expected = training_gradients(model, model, **arguments)
    compiled = training_gradients(model, torch.compile(model, backend=backend), **arguments)
    assert {key: e for key in expected if (e := error(compiled[key], expected[key])) > 5e-5} == {}


@pytest.mark.parametrize("name", ["linear", *(pytest.param(name, marks=SLOW) for name in FEW[1:])])
def test_traced_training_step_is_one_graph(name):
    check_compiled_training(small_model(name).train(), TRACE_ONLY)
    assert num_graphs() == 1
    assert not counters["graph_break"]


@pytest.mark.slow
@pytest.mark.parametrize("name", FEW)
def test_traced_training_step_of_padded_and_packed_rows(name):
    model = tiny_model(name).train()
    check_compiled_training(model, TRACE_ONLY, attention_mask=(torch.arange(70) > 5).long()[None])
    packed = torch.cat([torch.arange(30), torch.arange(40)])[None]
    check_compiled_training(model, TRACE_ONLY, position_ids=packed)


@pytest.mark.slow
@pytest.mark.needs_compiler
@pytest.mark.parametrize("name", FEW)
def test_compiled_training_step(name):
    check_compiled_training(small_model(name).train(), "inductor")
