"""The analyses of the paper's claims, on weights worked out by hand and on models that are known to obey."""

import csv
import math

import pytest
import torch
from eval_models import make_tokenizer, tiny_model

from nalaformer_hf import cli
from nalaformer_hf.eval.attention_weights import (
    GAINS,
    nala_weights,
    polarity_limit,
    relative_entropy,
    rotary_weights,
    softmax_weights,
)
from nalaformer_hf.ops import nala_attention, nala_feature_maps


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


@pytest.mark.parametrize("claim", ["limit", "rotary"])
def test_weight_commands_print_tables(claim, capsys, monkeypatch):
    monkeypatch.setattr("nalaformer_hf.eval.attention_weights.HEAD_DIMS", (8,))
    assert cli.main(["analyze", claim]) == 0
    assert capsys.readouterr().out.startswith("| head_dim |")


def test_short_texts_and_other_models_are_refused(checkpoint, tmp_path, capsys):
    (tmp_path / "text.txt").write_text("red")
    command = ["analyze", "norm", "--model", str(checkpoint), "--text", str(tmp_path / "text.txt")]
    assert cli.main([*command, "--output", str(tmp_path)]) == 1
    assert "--text must have more than 16 tokens, got" in capsys.readouterr().err
