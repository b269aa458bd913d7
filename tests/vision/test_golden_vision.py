"""Our model equals the published code: outputs, stages, gradients, training mode, at all sizes on file."""

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
    published_state,
    tiny_golden,
    variant_golden,
)
from slow_reference import SlowNaLaFormer

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig
from nalaformer_hf.convert import _published_name, from_published


def our_model(arguments: dict, seed: int, dtype: torch.dtype = torch.float32) -> NaLaForImageClassification:
    """The golden weights in our model, through the converter."""
    state = published_state(SlowNaLaFormer(**arguments), seed)
    config = None
    if "mixers" in arguments:
        config = NaLaVisionConfig(
            **{**from_published(state).config.to_dict(), "mixers": list(arguments["mixers"])}
        )
    return from_published(state, config).to(dtype)


def published_gradients(model: NaLaForImageClassification) -> dict[str, torch.Tensor]:
    return {_published_name(name): weight.grad for name, weight in model.named_parameters()}


@torch.no_grad()
@pytest.mark.parametrize("size", TINY_SIZES)
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_logits(size, dtype):
    logits = our_model(TINY, TINY_SEED, dtype)(golden_input(size).to(dtype)).logits
    assert error(logits, tiny_golden()[f"logits/{size}.f64"]) <= GATES[dtype][0]


@torch.no_grad()
@pytest.mark.parametrize("name", TINY_VARIANTS)
@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_logits_of_other_parts(name, dtype):
    changes, seed = TINY_VARIANTS[name]
    logits = our_model(TINY | changes, seed, dtype)(golden_input("2x3x64x48").to(dtype)).logits
    assert error(logits, tiny_golden()[f"logits_{name}/2x3x64x48.f64"]) <= GATES[dtype][0]


@torch.no_grad()
def test_stages():
    size = "2x3x64x48"
    model = our_model(TINY, TINY_SEED)
    outputs = model(golden_input(size), output_hidden_states=True)
    names = ["patch_embed", *(f"layer{i}.last_block" for i in range(4))]
    for name, actual in zip(names, outputs.hidden_states, strict=True):
        assert error(actual, tiny_golden()[f"stage/{size}/{name}"]) <= GATES[torch.float32][0], name
    for i, stage in enumerate(model.model.layers):
        reduced = outputs.hidden_states[i + 1]
        if stage.downsample is not None:
            reduced = stage.downsample(reduced.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        assert error(reduced, tiny_golden()[f"stage/{size}/layer{i}"]) <= GATES[torch.float32][0]
    pooled = model.forward_features(model.model(golden_input(size)))
    expected = tiny_golden()[f"stage/{size}/pooled"].flatten(1)
    assert error(pooled, expected) <= GATES[torch.float32][0]


@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_gradients(dtype):
    model = our_model(TINY, TINY_SEED, dtype)
    case = golden_part("grad/2x3x64x48/")
    images = golden_input("2x3x64x48").to(dtype).requires_grad_()
    (model(images).logits * case["projection"].to(dtype)).sum().backward()
    gradients = published_gradients(model) | {"input": images.grad}
    names = [name.removesuffix(".f64") for name in case if name.endswith(".f64")]
    assert len(names) == 18
    for name in names:
        expected = case[f"{name}.f64"]
        assert error(gradients[name].view(expected.shape), expected) <= GATES[dtype][1], name


@pytest.mark.parametrize("dtype", GATES, ids=str)
def test_training_mode(dtype):
    model = our_model(TINY, TINY_SEED, dtype).train()
    for block in (block for stage in model.model.layers for block in stage.blocks):
        block.drop_path_rate = 0.0
    case = golden_part("train/4x3x64x64/")
    logits = model(golden_input("4x3x64x64").to(dtype)).logits
    assert error(logits, case["logits.f64"]) <= GATES[dtype][0]
    (logits * case["projection"].to(dtype)).sum().backward()
    gradients = published_gradients(model)
    for name in (key for key in case if key.startswith("grad/") and key.endswith(".f64")):
        gradient = gradients[name.removeprefix("grad/").removesuffix(".f64")]
        assert error(gradient.view(case[name].shape), case[name]) <= GATES[dtype][1], name
    state = {_published_name(key): value for key, value in model.state_dict().items()}
    for name in (key for key in case if key.startswith("after/")):
        value = state[name.removeprefix("after/").removesuffix(".f64").removesuffix(".f32")]
        if name.endswith("num_batches_tracked"):
            assert value == case[name] == 4
        elif name.endswith(".f64"):
            assert error(value, case[name]) <= GATES[dtype][0], name


@torch.no_grad()
@pytest.mark.parametrize(
    "case",
    [
        "XT/seed11/1x3x224x224",
        "XT/seed12/1x3x192x256",
        "XT/seed11/2x3x32x32",
        "XT/seed12/1x3x225x231",
        "XT/seed11/1x3x384x384",
        "T/seed11/1x3x224x224",
        "S/seed11/1x3x224x224",
        "B/seed11/1x3x96x128",
        "L/seed11/1x3x96x128",
    ],
)
def test_published_variants(case):
    name, seed, size = case.split("/")
    model = our_model(VARIANTS[name], int(seed.removeprefix("seed")))
    images = golden_input(size, int(seed.removeprefix("seed")))
    expected = variant_golden()[f"{case}/logits.f64"]
    assert error(model(images).logits, expected) <= GATES[torch.float32][0]
    assert error(model.double()(images.double()).logits, expected) <= GATES[torch.float64][0]
