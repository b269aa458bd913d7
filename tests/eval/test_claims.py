"""The analyses of the paper's claims, on weights worked out by hand and on models that are known to obey."""

import csv
import math

import pytest
import torch
from eval_models import make_tokenizer, tiny_model
from transformers import AutoImageProcessor

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig, cli
from nalaformer_hf.console import EXTRAS
from nalaformer_hf.eval.attention_weights import (
    GAINS,
    nala_weights,
    polarity_limit,
    relative_entropy,
    rotary_weights,
    softmax_weights,
)
from nalaformer_hf.eval.norm_analysis import entropy_rows
from nalaformer_hf.eval.queries import LayerQueries, choose_images, read_image_queries
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.ops import nala_attention, nala_feature_maps
from nalaformer_hf.training.image_batches import PreparedImages, make_processor


def normal(seed: int, length: int = 24, head_dim: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, length, 2, head_dim, generator=generator, dtype=torch.float64)


def test_relative_entropy_by_hand():
    weights = torch.tensor([[1.0, 0, 0], [0.5, 0.5, 0], [0, 1, 0]], dtype=torch.float64)
    assert relative_entropy(weights[None, None])[0, 0].tolist() == pytest.approx([0, 1, 0])
    skewed = torch.tensor([[1.0, 0], [0.25, 0.75]], dtype=torch.float64)
    expected = -(0.25 * math.log2(0.25) + 0.75 * math.log2(0.75))
    assert relative_entropy(skewed[None, None])[0, 0, 1].item() == pytest.approx(expected)


@pytest.mark.parametrize("form", ["cosine", "polarity", "elu"])
def test_nala_weights_are_those_of_the_attention(form):
    q, k, v = normal(0), normal(1), normal(2)
    weights = nala_weights(q, k, form=form)
    o = torch.einsum("bhts,bshv->bthv", weights, v)
    assert torch.allclose(o, nala_attention(q, k, v, form=form, backend="reference")[0], rtol=1e-10)
    phi_q, phi_k = nala_feature_maps(q, k, form=form)
    products = torch.einsum("bthf,bshf->bhts", phi_q, phi_k).tril()
    assert torch.allclose(weights, products / products.sum(-1, keepdim=True), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize("form", ["cosine", "polarity", "elu"])
def test_bidirectional_weights_are_those_of_the_attention(form):
    q, k, v = normal(0), normal(1), normal(2)
    weights = nala_weights(q, k, form=form, causal=False)
    o = torch.einsum("bhts,bshv->bthv", weights, v)
    expected, _ = nala_attention(q, k, v, form=form, causal=False, backend="torch")
    assert torch.allclose(o, expected, rtol=1e-10)


def test_bidirectional_rows_see_all_keys():
    q, k = normal(0), normal(1)
    weights = softmax_weights(q, k, causal=False)
    assert torch.allclose(weights, (torch.einsum("bthd,bshd->bhts", q, k) * 8**-0.5).softmax(-1))
    assert torch.allclose(softmax_weights(q, k)[:, :, -1], weights[:, :, -1])
    equal = torch.full((1, 1, 4, 4), 0.25, dtype=torch.float64)
    assert relative_entropy(equal, causal=False).flatten().tolist() == pytest.approx([1, 1, 1, 1])
    assert relative_entropy(equal)[0, 0, 0] > 1


def test_softmax_weights_sharpen_with_the_query_norm():
    q, k = normal(0), normal(1)
    weights = softmax_weights(q, k)
    assert torch.allclose(weights.sum(-1), torch.ones(1, 2, 24, dtype=torch.float64))
    assert weights.triu(1).abs().max() == 0
    assert (relative_entropy(softmax_weights(3 * q, k)) <= relative_entropy(weights) + 1e-12).all()


def test_the_cosine_form_tends_to_the_polarity_form():
    rows = list(polarity_limit(length=24))
    assert len(rows) == 3 * 3 * len(GAINS)
    for first in range(0, len(rows), len(GAINS)):
        distances = [row["total_variation"] for row in rows[first : first + len(GAINS)]]
        assert distances == sorted(distances, reverse=True)
        assert distances[0] > 0.1
        assert distances[-1] < 1e-7


def test_rotary_in_the_numerator_leaves_signs_and_sums_free():
    for row in rotary_weights(length=48):
        if row["rotary"] == "none":
            assert row["negative_share"] == 0
            assert row["mean_row_sum"] == pytest.approx(1)
        else:
            assert row["negative_share"] > 0.05
            assert row["mean_row_sum"] < 0.95
            assert row["largest_absolute_sum"] > 1


@pytest.fixture(params=["linear", "delta"])
def checkpoint(request, tmp_path):
    model = tiny_model(request.param)
    model.save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    (tmp_path / "text.txt").write_text("the red stone walks over a blue river " * 30)
    return tmp_path / "model"


def test_entropy_command_writes_its_figures(checkpoint, tmp_path, capsys):
    command = ["analyze", "entropy", "--model", str(checkpoint), "--text", str(tmp_path / "text.txt")]
    assert cli.main([*command, "--tokens", "64", "--output", str(tmp_path / "out")]) == 0
    with (tmp_path / "out" / "entropy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 5  # layers, heads, forms
    for row in rows:
        assert -1 <= float(row["correlation_with_query_norm"]) <= 1
        assert 0 < float(row["mean_entropy"]) <= 1
    assert (tmp_path / "out" / "entropy.png").read_bytes().startswith(b"\x89PNG")
    assert "| NaLa, polarity |" in capsys.readouterr().out


def test_norm_command_compares_checkpoints_and_scales(checkpoint, tmp_path, capsys):
    command = ["analyze", "norm", "--model", str(checkpoint), str(checkpoint)]
    command += ["--text", str(tmp_path / "text.txt"), "--output", str(tmp_path / "out")]
    assert cli.main(command) == 0
    with (tmp_path / "out" / "norm.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 2 * 2  # checkpoints, layers, scales
    for row in rows:
        scale = 1 if row["norm_scale"] == "1" else 16**-0.5
        assert float(row["tanh_0.5"]) == pytest.approx(math.tanh(scale * float(row["norm_0.5"])), rel=1e-3)
        assert row["is_the_models"] == str(row["norm_scale"] == "rsqrt_dim")
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


@pytest.fixture
def vision_checkpoint(tmp_path):
    torch.manual_seed(0)
    config = NaLaVisionConfig(
        num_channels=1,
        image_size=32,
        hidden_sizes=[16, 32],
        depths=[2, 1],
        num_attention_heads=[1, 2],
        mlp_ratios=[2.0, 2.0],
        mixers=["linear", "softmax"],
        layer_scale_init_values=None,
        num_labels=10,
    )
    NaLaForImageClassification(config).save_pretrained(tmp_path / "vision")
    make_processor(32, 1, 1.0).save_pretrained(tmp_path / "vision")
    return str(tmp_path / "vision")


def test_queries_of_images_are_those_of_the_layers(vision_checkpoint):
    images = choose_images("digits", "test", 3)
    layers = read_image_queries(vision_checkpoint, images)
    assert [(layer.layer, layer.causal, layer.q.shape) for layer in layers] == [
        (0, False, (3, 64, 1, 16)),
        (1, False, (3, 64, 1, 16)),
    ]
    model = NaLaForImageClassification.from_pretrained(vision_checkpoint).eval()
    attention = next(module for module in model.modules() if isinstance(module, NaLaVisionAttention))
    seen = []
    attention.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    prepared = PreparedImages(images, AutoImageProcessor.from_pretrained(vision_checkpoint), 1)
    with torch.no_grad():
        model(pixel_values=torch.stack([prepared[i]["pixel_values"] for i in range(3)]))
        q, k = attention.qkvg(seen[0]).flatten(1, 2).split(16, dim=-1)[:2]
    assert torch.equal(layers[0].q[:, :, 0], q)
    assert torch.equal(layers[0].k[:, :, 0], k)


@pytest.mark.parametrize("causal", [True, False])
def test_entropy_rows_find_a_planted_correlation(causal):
    """Queries of one direction that differ in length only: softmax sharpens with it, 1 + ELU hardly."""
    k = normal(1, length=64).float()
    q = torch.linspace(0.1, 9, 64)[torch.randperm(64)].view(1, 64, 1, 1) * normal(0, length=1).float()
    layer = LayerQueries(0, FeatureSpec(), causal, q, k)
    rows, points = entropy_rows([layer])
    of_softmax = [row["correlation_with_query_norm"] for row in rows if row["form"] == "softmax"]
    assert max(of_softmax) < (-0.5 if causal else -0.9)
    assert len(points["softmax"][0]) == 2 * (48 if causal else 64)
    key_norms = [row["correlation_with_key_norm"] for row in rows]
    assert all(math.isfinite(value) for value in key_norms) == causal  # one image has one key norm


def test_image_commands_write_their_figures(vision_checkpoint, tmp_path, capsys):
    options = ["--images", "digits", "--num-images", "4", "--output", str(tmp_path / "out")]
    assert cli.main(["analyze", "entropy", "--model", vision_checkpoint, *options]) == 0
    with (tmp_path / "out" / "entropy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 1 * 5  # linear layers, heads, forms
    for row in rows:
        assert -1 <= float(row["correlation_with_key_norm"]) <= 1
        assert 0 < float(row["mean_entropy"]) <= 1
    assert (tmp_path / "out" / "entropy.png").exists()
    capsys.readouterr()
    assert cli.main(["analyze", "norm", "--model", vision_checkpoint, vision_checkpoint, *options]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 * 2 * 2  # checkpoints, layers, scales


def test_models_of_the_other_kind_are_refused(vision_checkpoint, checkpoint, tmp_path, capsys):
    output = ["--output", str(tmp_path / "out")]
    assert cli.main(["analyze", "norm", "--model", vision_checkpoint, *output]) == 1
    assert f"language model cannot be loaded from '{vision_checkpoint}': Unrec" in capsys.readouterr().err
    assert cli.main(["analyze", "norm", "--model", str(checkpoint), "--images", "digits", *output]) == 1
    assert f"classifier cannot be loaded from '{checkpoint}': Unrec" in capsys.readouterr().err
    (checkpoint / "tokenizer.json").unlink()
    assert cli.main(["analyze", "norm", "--model", str(checkpoint), *output]) == 1
    assert f"a tokenizer cannot be loaded from '{checkpoint}'" in capsys.readouterr().err
    command = ["analyze", "norm", "--model", vision_checkpoint, "--images", "digits", "--num-images", "0"]
    assert cli.main([*command, *output]) == 1
    assert "--num-images must be at least 1, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("claim", ["limit", "rotary"])
def test_weight_commands_print_tables(claim, capsys, monkeypatch):
    monkeypatch.setattr("nalaformer_hf.eval.attention_weights.HEAD_DIMS", (8,))
    assert cli.main(["analyze", claim]) == 0
    assert capsys.readouterr().out.startswith("| head_dim |")
    monkeypatch.setitem(EXTRAS, "train", ("no_such_module",))
    assert cli.main(["analyze", claim]) == 1
    assert "pip install 'nalaformer-hf[train]'" in capsys.readouterr().err


def test_short_texts_and_other_models_are_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("red")
    command = ["analyze", "norm", "--model", str(checkpoint), "--text", str(tmp_path / "text.txt")]
    assert cli.main([*command, "--output", str(tmp_path)]) == 1
    assert "--text must have at least 32 tokens, got" in capsys.readouterr().err
