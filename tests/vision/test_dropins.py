"""NaLa attention inside timm's DeiT-T and Swin-T."""

from pathlib import Path

import pytest
import timm
import torch
from timm.layers.attention import Attention
from torch import nn
from torch.testing import assert_close
from transformers import AutoModelForImageClassification

from nalaformer_hf.dropins import (
    ARCHITECTURES,
    ROWS,
    NaLaDropInAttention,
    NaLaDropInConfig,
    NaLaDropInForImageClassification,
    replace_attention,
)
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image import train_image
from nalaformer_hf.training.image_config import load_image_config


@pytest.fixture
def deit_layer() -> nn.Module:
    return Attention(32, num_heads=2, qkv_bias=True).double()


def written_out(layer: NaLaDropInAttention, x: torch.Tensor, row: str) -> torch.Tensor:
    """Each row's similarity, dimension by dimension, token pair by token pair: no feature map, no sums."""
    q, k, v = layer.qkv(x).unflatten(-1, (3, 2, 16)).permute(2, 0, 3, 1, 4)  # (B, H, N, D)
    if row == "relu":
        weights = torch.einsum("bhnd,bhmd->bhnm", q.relu() ** 3, k.relu() ** 3)
    else:
        norms = q.norm(dim=-1, keepdim=True), k.norm(dim=-1, keepdim=True)
        power = 3 * (0.5 + torch.tanh(norms[0])) if row == "norm_aware" else 3.0
        dq, dk = (q / norms[0]).unsqueeze(-2), (k / norms[1]).unsqueeze(-3)
        angle = torch.pi / 4 * (torch.tanh(20 * dq) - torch.tanh(20 * dk))
        amplitudes = ((q / norms[0]).abs() ** power).unsqueeze(-2) * (k.abs() ** 3).unsqueeze(-3)
        weights = (amplitudes * angle.cos()).sum(-1)
    num_tokens = x.shape[1]
    o = weights @ v / num_tokens / (weights.sum(-1, keepdim=True) / num_tokens + 1e-6)
    return layer.proj(o.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("row", ROWS)
def test_rows_are_what_their_formulas_say(deit_layer, row):
    layer = NaLaDropInAttention(deit_layer, ROWS[row]).double()
    x = torch.randn(2, 9, 32, dtype=torch.float64, requires_grad=True)
    other = x.detach().clone().requires_grad_()
    actual, expected = layer(x), written_out(layer, other, row)
    assert_close(actual, expected, rtol=1e-9, atol=1e-9)
    weight = torch.randn_like(actual)
    (actual * weight).sum().backward()
    gradients = {name: parameter.grad.clone() for name, parameter in layer.named_parameters()}
    layer.zero_grad()
    (expected * weight).sum().backward()
    assert_close(x.grad, other.grad, rtol=1e-8, atol=1e-9)
    for name, parameter in layer.named_parameters():
        assert_close(gradients[name], parameter.grad, rtol=1e-8, atol=1e-9)


def test_only_the_last_row_sees_the_norm_of_the_query(deit_layer):
    x = torch.randn(1, 9, 32, dtype=torch.float64)
    changes = {}
    for row, spec in ROWS.items():
        layer = NaLaDropInAttention(deit_layer, spec)
        with torch.no_grad():
            before = layer(x)
            layer.qkv.weight[:32] *= 1.5
            layer.qkv.bias[:32] *= 1.5
            changes[row] = (layer(x) - before).abs().max().item()
            layer.qkv.weight[:32] /= 1.5
            layer.qkv.bias[:32] /= 1.5
    assert changes["cosine"] < 1e-9
    assert changes["relu"] < 1e-3  # ε
    assert changes["norm_aware"] > 1e-3


@pytest.mark.parametrize(
    ("architecture", "expected"),
    # Swin's stages 1 and 2 lose their tables of the relative position bias: 2 · 169 · 3 + 2 · 169 · 6.
    [("deit_tiny", (5_717_416, 5_717_416)), ("swin_tiny", (28_288_354, 28_288_354 - 3_042))],
)
def test_parameter_counts(architecture, expected):
    with torch.device("meta"):
        plain = timm.create_model(ARCHITECTURES[architecture])
        assert sum(parameter.numel() for parameter in plain.parameters()) == expected[0]
        for attention in ("softmax", *ROWS):
            config = NaLaDropInConfig(architecture=architecture, attention=attention, num_labels=1000)
            count = NaLaDropInForImageClassification(config).num_parameters()
            assert count == expected[attention != "softmax"]


def test_swin_is_linear_in_two_stages_with_whole_windows():
    with torch.device("meta"):
        network = NaLaDropInForImageClassification(NaLaDropInConfig(architecture="swin_tiny")).network
    for number, stage in enumerate(network.layers):
        for block in stage.blocks:
            assert isinstance(block.attn, NaLaDropInAttention) == (number < 2)
    windows = [[block.window_size for block in stage.blocks][-1] for stage in network.layers]
    assert windows == [(56, 56), (28, 28), (7, 7), (7, 7)]
    assert [network.layers[0].blocks[i].shift_size for i in range(2)] == [(0, 0), (0, 0)]
    assert network.layers[2].blocks[1].shift_size == (3, 3)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_forward_backward_and_reload(architecture, tmp_path):
    config = NaLaDropInConfig(architecture=architecture, image_size=64, num_labels=3)
    model = AutoModelForImageClassification.from_config(config)
    images = torch.randn(2, 3, 64, 64)
    model(images, labels=torch.tensor([0, 2])).loss.backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any() or "qkv.bias" in name, name
    model.eval().save_pretrained(tmp_path)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(images).logits, model(images).logits)


def test_softmax_is_timms_own_model():
    config = NaLaDropInConfig(attention="softmax", image_size=32, num_labels=3)
    model = NaLaDropInForImageClassification(config).eval()
    plain = timm.create_model("deit_tiny_patch16_224", img_size=32, num_classes=3).eval()
    plain.load_state_dict(model.network.state_dict())
    images = torch.randn(1, 3, 32, 32)
    with torch.no_grad():
        assert torch.equal(model(images).logits, plain(images))


def test_trains_from_the_command_lines_configuration(tmp_path):
    values = {
        "model": {"config": {"model_type": "nala_dropin", "attention": "cosine", "image_size": 32}},
        "data": {"source": "digits", "eval_split": "test"},
        "train": {"output_dir": str(tmp_path), "use_cpu": True, "max_steps": 1, "save_strategy": "no"},
    }
    result = train_image(load_image_config(values, ["train.disable_tqdm=true", "train.report_to=none"]))
    loaded = AutoModelForImageClassification.from_pretrained(Path(result.model_dir))
    assert isinstance(loaded, NaLaDropInForImageClassification)
    assert loaded.config.attention == "cosine"
    assert loaded.num_parameters() == result.num_parameters
    with pytest.raises(ConfigError, match=r"attention: got 'cosin'; did you mean 'cosine'"):
        train_image(
            load_image_config(
                values, ["model.config.attention=cosin", f"train.output_dir={tmp_path / 'refused'}"]
            )
        )


def test_refusals(deit_layer):
    with pytest.raises(ValueError, match="takes no mask, got one"):
        NaLaDropInAttention(deit_layer, ROWS["relu"])(torch.zeros(1, 3, 32), is_causal=True)
    with pytest.raises(ValueError, match="attention must be one of relu, cosine, norm_aware, got 'softmax'"):
        replace_attention(nn.Module(), "softmax")
    with pytest.raises(ValueError, match="image_size must be a multiple of 32 for swin_tiny, got 48"):
        NaLaDropInConfig(architecture="swin_tiny", image_size=48)
    with pytest.raises(ValueError, match="drop_path_rate"):
        NaLaDropInConfig(drop_path_rate=1.0)
    model = NaLaDropInForImageClassification(NaLaDropInConfig(image_size=32, num_labels=2))
    with pytest.raises(ValueError, match=r"pixel_values must be images of 32x32, got \(1, 3, 48, 48\)"):
        model(torch.zeros(1, 3, 48, 48))
    with pytest.raises(TypeError):
        model(torch.zeros(1, 3, 32, 32), no_such=1)
