"""The vision models: sizes, inputs, precision, training, checkpoints."""

import json

import numpy as np
import pytest
import torch
from PIL import Image
from published import TINY, TINY_SEED, VARIANTS, error, golden_input, published_state
from slow_reference import SlowNaLaFormer
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import (
    AutoBackbone,
    AutoConfig,
    AutoImageProcessor,
    AutoModel,
    AutoModelForImageClassification,
    pipeline,
)

from nalaformer_hf import NaLaBackbone, NaLaForImageClassification, NaLaVisionConfig, NaLaVisionModel
from nalaformer_hf.convert import from_published

SMALL = {
    "hidden_sizes": [8, 12, 16, 24],
    "num_attention_heads": [1, 1, 2, 3],
    "depths": [1, 1, 2, 1],
    "mlp_ratios": [2.0] * 4,
    "projection_dim": 20,
    "num_labels": 5,
}
# G multiply-adds of a 224×224 image by the published code; docs/vision.md states them.
PUBLISHED_MACS = {"xt": 0.645, "t": 2.857, "s": 5.035, "b": 11.740, "l": 17.680}


def small_model(model_class=NaLaForImageClassification, **fields):
    torch.manual_seed(0)
    return model_class(NaLaVisionConfig(**{**SMALL, **fields}))


def macs(model: torch.nn.Module) -> float:
    plain = sdpa_kernel(SDPBackend.MATH)
    with FlopCounterMode(display=False) as counter, torch.no_grad(), plain, torch.device("meta"):
        # transformers keeps torch.linspace on the CPU for a process whose first model came from a checkpoint.
        model.to("meta").eval()(torch.zeros(1, 3, 224, 224))
    return counter.get_total_flops() / 2e9


@pytest.mark.parametrize("name", PUBLISHED_MACS)
def test_macs(name):
    """Ours are the published ones less the normalisers' products, which we sum elementwise."""
    config = NaLaVisionConfig.from_preset(name)
    with torch.device("meta"):
        slow, ours = SlowNaLaFormer(**VARIANTS[name.upper()]), NaLaForImageClassification(config)
    assert macs(slow) == pytest.approx(PUBLISHED_MACS[name], abs=5e-4)
    tokens, widths = (56**2, 28**2), config.hidden_sizes
    normalisers = sum(n * 2 * widths[i] * config.depths[i] for i, n in enumerate(tokens)) / 1e9
    assert macs(ours) + normalisers == pytest.approx(PUBLISHED_MACS[name], abs=5e-4)


PARTS = [
    {"use_rotary": False},
    {"use_cpe": False},
    {"use_lepe": False},
    {"use_output_gate": False},
    {"layer_scale_init_values": None},
    {"stem": "patch"},
    {"projection_dim": None},
    {"mixers": ["softmax", "linear", "linear", "softmax"]},
    {"feature_form": "cosine"},
    {"feature_form": "relu"},
    {"feature_power": 4.0},
    {"feature_tau": 0.7},
    {"norm_scale": 0.0},
    {"norm_scale": "rsqrt_dim"},
    {"num_channels": 5},
]


@pytest.mark.parametrize("part", PARTS, ids=str)
def test_every_part_has_a_switch(part, tmp_path):
    """It changes the logits or the parameters, trains, and survives a checkpoint."""
    plain, changed = (small_model(initializer_range=0.5, **fields) for fields in ({}, part))
    images = torch.randn(2, part.get("num_channels", 3), 45, 38)
    changed(images, labels=torch.tensor([1, 4])).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in changed.parameters())
    state, own = plain.state_dict(), changed.state_dict()
    if {key: value.shape for key, value in state.items()} == {key: value.shape for key, value in own.items()}:
        changed.load_state_dict(state)
        with torch.no_grad():
            assert (plain.eval()(images).logits - changed.eval()(images).logits).abs().max() > 1e-5
    changed.eval().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.to_dict() | {"_name_or_path": ""} == changed.config.to_dict()
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, changed(images).logits)


@torch.no_grad()
@pytest.mark.parametrize("stem", ["conv", "patch"])
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (33, 64), (31, 97), (64, 64)])
def test_strides_of_the_stages_at_any_size(stem, size):
    backbone = small_model(
        NaLaBackbone, stem=stem, out_features=["stage1", "stage2", "stage3", "stage4"]
    ).eval()
    maps = backbone(torch.randn(2, 3, *size)).feature_maps
    for i, (features, stride) in enumerate(zip(maps, (4, 8, 16, 32), strict=True)):
        assert features.shape == (2, SMALL["hidden_sizes"][i], -(-size[0] // stride), -(-size[1] // stride))


@torch.no_grad()
def test_backbone_takes_the_weights_of_a_classifier(tmp_path):
    classifier = small_model().eval()
    classifier.save_pretrained(tmp_path)
    images = torch.randn(2, 3, 40, 50)
    backbone = NaLaBackbone.from_pretrained(tmp_path, out_features=["stem", "stage2", "stage4"])
    outputs = backbone(images, output_hidden_states=True)
    expected = classifier(images, output_hidden_states=True).hidden_states
    assert all(torch.equal(x, y) for x, y in zip(outputs.hidden_states, expected, strict=True))
    assert len(outputs.feature_maps) == 3
    assert backbone.channels == [8, 12, 24]
    norm = torch.nn.functional.layer_norm(expected[2].permute(0, 2, 3, 1), (12,), eps=1e-6)
    torch.testing.assert_close(outputs.feature_maps[1], norm.permute(0, 3, 1, 2))
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is NaLaVisionModel
    assert torch.equal(base(images).last_hidden_state, expected[-1])
    torch.testing.assert_close(base(images).pooler_output, expected[-1].mean((2, 3)))
    assert type(AutoBackbone.from_config(classifier.config)) is NaLaBackbone
    assert type(AutoConfig.from_pretrained(tmp_path)) is NaLaVisionConfig


@torch.no_grad()
def test_checkpoint_carries_its_preprocessing(tmp_path):
    model = small_model(image_size=64).eval()
    model.save_pretrained(tmp_path)
    names = {file.name for file in tmp_path.iterdir()}
    assert {"preprocessor_config.json", "README.md", "modeling_nala_vision.py"} <= names
    assert not names & {"modeling_nala.py", "cache_nala.py"}
    image = Image.fromarray((np.random.default_rng(0).random((80, 120, 3)) * 255).astype("uint8"))
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    pixels = processor(image, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 64, 64)
    resized = image.resize((73 * 120 // 80, 73), Image.Resampling.BICUBIC)
    left, top = (resized.width - 64) // 2, (73 - 64) // 2
    cropped = np.asarray(resized.crop((left, top, left + 64, top + 64))) / 255
    expected = (cropped - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    assert np.abs(pixels[0].permute(1, 2, 0).numpy() - expected).mean() < 0.02
    best = pipeline("image-classification", model=str(tmp_path))(image)[0]
    scores = model(pixels).logits.softmax(-1)[0]
    assert best["score"] == pytest.approx(float(scores.max()), abs=1e-5)
    own = {"image_processor_type": "ViTImageProcessor", "size": {"height": 8, "width": 8}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(own))
    model.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text()) == own


def test_preprocessing_above_224_crops_nothing_away(tmp_path):
    small_model(image_size=384).save_pretrained(tmp_path)
    saved = json.loads((tmp_path / "preprocessor_config.json").read_text())
    assert (saved["size"], saved["crop_size"]) == ({"shortest_edge": 384}, {"height": 384, "width": 384})
    small_model().save_pretrained(tmp_path / "224")
    saved = json.loads((tmp_path / "224" / "preprocessor_config.json").read_text())
    assert (saved["size"], saved["crop_size"]) == ({"shortest_edge": 256}, {"height": 224, "width": 224})


def test_weights_are_made_as_published():
    model = small_model(hidden_sizes=[64, 64, 64, 48], projection_dim=256, num_labels=100)
    for name, parameter in model.named_parameters():
        weight = parameter.detach()
        if (
            "lepe" in name
            or "cpe" in name
            or "dwconv" in name
            or "reduction" in name
            or name.startswith("head")
        ):
            wanted = 0 if name.endswith("bias") else 0.02
            assert float(weight.std()) == pytest.approx(wanted, rel=0.25), name
        elif "qkvg" in name or "fc1" in name:
            assert float(weight.std()) == pytest.approx((3 * 64) ** -0.5, rel=0.25), name
        elif "norm" in name or "ln" in name:
            assert (weight == (0 if name.endswith("bias") else 1)).all(), name


def test_black_images_are_finite():
    """With zero biases all queries are zero, where the published code gives NaN for all weights."""
    model = small_model()
    for module in model.modules():
        if getattr(module, "bias", None) is not None:
            torch.nn.init.zeros_(module.bias)
    images = torch.randn(2, 3, 64, 64)
    images[0], images[1, :, :32] = 0, 0
    model(images, labels=torch.tensor([0, 1])).loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(dtype):
    model, images = golden_model(), golden_input("2x3x64x48")
    exact = model(images).logits
    with torch.autocast("cpu", dtype):
        logits = model(images, labels=torch.tensor([0, 1])).logits
        loss = model(images, labels=torch.tensor([0, 1])).loss
    assert error(logits.float(), exact.detach()) < (5e-2 if dtype == torch.bfloat16 else 5e-3)
    loss.backward()
    assert all(weight.grad.isfinite().all() for weight in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_cast_models(dtype, tmp_path):
    model, images = golden_model(), golden_input("2x3x64x48")
    exact = model(images).logits
    model.save_pretrained(tmp_path)
    loaded = NaLaForImageClassification.from_pretrained(tmp_path, dtype=dtype)
    logits = loaded(images).logits
    assert logits.dtype == dtype
    assert torch.equal(logits, model.to(dtype)(images).logits)
    assert error(logits.float(), exact) < (0.1 if dtype == torch.bfloat16 else 2e-2)


def golden_model() -> NaLaForImageClassification:
    return from_published(published_state(SlowNaLaFormer(**TINY), TINY_SEED))


@torch.no_grad()
def test_channels_last_images_and_weights():
    model, images = golden_model(), golden_input("2x3x64x48")
    expected = model(images).logits
    strided = images.contiguous(memory_format=torch.channels_last)
    assert error(model(strided).logits, expected) < 1e-6
    model = model.to(memory_format=torch.channels_last)
    assert error(model(strided).logits, expected) < 1e-6


def test_gradient_checkpointing_changes_nothing():
    model, images = small_model(drop_path_rate=0.0), torch.randn(2, 3, 40, 40)
    labels = torch.tensor([0, 3])
    model(images, labels=labels).loss.backward()
    expected = {name: weight.grad for name, weight in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    model.activation_checkpointing_enable()
    model(images, labels=labels).loss.backward()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight.grad, expected[name], rtol=1e-4, atol=1e-6)


def test_drop_path_skips_whole_images():
    block = small_model(drop_path_rate=0.6).model.layers[3].blocks[-1].train()
    assert block.drop_path_rate == 0.6
    x, branch = torch.zeros(4000, 1, 1, 24), torch.ones(4000, 1, 1, 24)
    added = block._add(x, branch, torch.full((24,), 3.0))
    kept = added[:, 0, 0, 0] != 0
    assert float(kept.float().mean()) == pytest.approx(0.4, abs=0.05)
    torch.testing.assert_close(added[kept], torch.full_like(added[kept], 3 / 0.4))
    assert torch.equal(block.eval()._add(x, branch, None), branch)


@pytest.mark.parametrize(
    ("images", "error_class", "message"),
    [
        (torch.zeros(1, 4, 32, 32), ValueError, r"must be \(batch, 3, height, width\), got \(1, 4, 32, 32\)"),
        (torch.zeros(3, 32, 32), ValueError, r"must be \(batch, 3, height, width\), got \(3, 32, 32\)"),
        (torch.zeros(0, 3, 32, 32), ValueError, r"at least one image .* got \(0, 3, 32, 32\)"),
        (torch.zeros(1, 3, 0, 32), ValueError, r"at least one pixel, got \(1, 3, 0, 32\)"),
        (torch.zeros(1, 3, 8, 8, dtype=torch.uint8), TypeError, "floating-point tensor, got torch.uint8"),
        ([[0.0]], TypeError, "floating-point tensor, got list"),
    ],
)
def test_images_that_are_none(images, error_class, message):
    with pytest.raises(error_class, match=f"pixel_values.*{message}"):
        small_model()(images)


def test_pixels_that_are_not_finite_are_named_when_asked_for():
    images = torch.zeros(3, 3, 16, 20)
    images[1, 2, 3, 4] = torch.nan
    for model_class in (NaLaVisionModel, NaLaBackbone, NaLaForImageClassification):
        with pytest.raises(ValueError, match="got nan in image 1, channel 2, row 3, column 4"):
            small_model(model_class)(images, check_finite=True)


def test_one_image_that_batch_norm_cannot_take():
    model, image = small_model(), torch.randn(1, 3, 32, 32)
    with pytest.raises(ValueError, match="training mode BatchNorm needs more than one value a channel"):
        model.train()(image)
    assert model.eval()(image).logits.shape == (1, 5)
    assert model.train()(torch.randn(1, 3, 33, 32)).logits.shape == (1, 5)


def test_keywords():
    model, images = small_model().eval(), torch.zeros(1, 3, 32, 32)
    with pytest.raises(TypeError, match="unexpected keyword 'bool_masked_pos'"):
        model(images, bool_masked_pos=None)
    with pytest.raises(ValueError, match="output_attentions"):
        model(images, output_attentions=True)
    assert isinstance(model(images, return_dict=False), tuple)
