"""The slow reference equals the published code, so that it can stand in for it."""

import hashlib

import pytest
import torch
from published import (
    GATES,
    TINY,
    TINY_SEED,
    TINY_SIZES,
    TINY_VARIANTS,
    VARIANTS,
    error,
    golden_input,
    golden_part,
    official_keys,
    published_state,
    tiny_golden,
    variant_golden,
    weight_hashes,
)
from slow_reference import SlowNaLaFormer


def slow_model(arguments: dict, seed: int, dtype: torch.dtype = torch.float32) -> SlowNaLaFormer:
    model = SlowNaLaFormer(**arguments)
    model.load_state_dict(published_state(model, seed))
    return model.to(dtype).eval()


def test_recipe_gives_the_weights_and_inputs_of_the_golden_files():
    model = slow_model(TINY, TINY_SEED)
    stored = golden_part("state/")
    assert model.state_dict().keys() == stored.keys()
    assert all(torch.equal(value, stored[key]) for key, value in model.state_dict().items())
    for size in ("2x3x32x32", "1x3x5x7"):
        assert torch.equal(golden_input(size), tiny_golden()[f"input/{size}"])
    for key, expected in weight_hashes()["XT/11"].items():
        weight = published_state(SlowNaLaFormer(**VARIANTS["XT"]), 11)[key]
        assert hashlib.sha256(weight.numpy().tobytes()).hexdigest()[:16] == expected


@pytest.mark.parametrize("name", VARIANTS)
def test_keys_and_shapes_of_the_published_variants(name):
    with torch.device("meta"):
        state = SlowNaLaFormer(**VARIANTS[name]).state_dict()
    assert [[key, list(value.shape)] for key, value in state.items()] == [
        entry[:2] for entry in official_keys()[name]["keys"]
    ]


@torch.no_grad()
@pytest.mark.parametrize("size", TINY_SIZES)
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_logits(size, dtype):
    model = slow_model(TINY, TINY_SEED, dtype)
    logits = model(golden_input(size).to(dtype))
    assert error(logits, tiny_golden()[f"logits/{size}.f64"]) <= GATES[dtype][0]


@torch.no_grad()
@pytest.mark.parametrize("name", TINY_VARIANTS)
def test_logits_of_other_parts(name):
    changes, seed = TINY_VARIANTS[name]
    model = slow_model(TINY | changes, seed, torch.float64)
    logits = model(golden_input("2x3x64x48").double())
    assert error(logits, tiny_golden()[f"logits_{name}/2x3x64x48.f64"]) <= GATES[torch.float64][0]


@torch.no_grad()
def test_logits_of_the_published_xt():
    model = slow_model(VARIANTS["XT"], 11, torch.float64)
    size = "1x3x192x256"
    expected = variant_golden()[f"XT/seed11/{size}/logits.f64"]
    assert error(model(golden_input(size, 11).double()), expected) <= GATES[torch.float64][0]


@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_gradients(dtype):
    model = slow_model(TINY, TINY_SEED, dtype)
    case = golden_part("grad/2x3x64x48/")
    images = golden_input("2x3x64x48").to(dtype).requires_grad_()
    (model(images) * case["projection"].to(dtype)).sum().backward()
    gradients = {"input": images.grad} | {name: weight.grad for name, weight in model.named_parameters()}
    names = [name.removesuffix(".f64") for name in case if name.endswith(".f64")]
    assert len(names) == 18
    for name in names:
        assert error(gradients[name], case[f"{name}.f64"]) <= GATES[dtype][1], name


@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_training_mode(dtype):
    model = slow_model(TINY, TINY_SEED, dtype).train()
    case = golden_part("train/4x3x64x64/")
    logits = model(golden_input("4x3x64x64").to(dtype))
    assert error(logits, case["logits.f64"]) <= GATES[dtype][0]
    (logits * case["projection"].to(dtype)).sum().backward()
    gradients = {name: weight.grad for name, weight in model.named_parameters()}
    for name in (key for key in case if key.startswith("grad/") and key.endswith(".f64")):
        key = name.removeprefix("grad/").removesuffix(".f64")
        assert error(gradients[key], case[name]) <= GATES[dtype][1], key
    state = model.state_dict()
    for name in (key for key in case if key.startswith("after/") and key.endswith(".f64")):
        key = name.removeprefix("after/").removesuffix(".f64")
        assert error(state[key], case[name]) <= GATES[dtype][0], key
