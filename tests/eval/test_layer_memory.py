"""The memory of one attention layer: forms that agree, a probe that sees memory, and the extrapolation."""

import csv

import pytest
import torch
from tolerances import TOLERANCES, assert_close_rows

from nalaformer_hf import cli
from nalaformer_hf.eval import layer_memory
from nalaformer_hf.eval.layer_memory import (
    FORMS,
    LINEAR,
    LINEAR_PLAIN,
    SDPA,
    SOFTMAX,
    extrapolate,
    layer_call,
    measure_memory,
    probe_alone,
    summarise,
)
from nalaformer_hf.training.errors import ConfigError


@pytest.mark.parametrize(("form", "written_out", "grid"), [(LINEAR, LINEAR_PLAIN, 185), (SDPA, SOFTMAX, 12)])
def test_both_forms_of_an_attention_agree(form, written_out, grid):
    y, expected = (layer_call(name, grid, training=False)() for name in (form, written_out))
    assert y.shape == (1, grid, grid, 64)
    assert_close_rows(y, expected, TOLERANCES["polarity", torch.float32][0])


def test_the_two_attentions_differ():
    linear, softmax = (layer_call(form, 12, training=False)() for form in (LINEAR, SDPA))
    assert (linear - softmax).abs().max() > 1e-2


@pytest.mark.parametrize("form", [LINEAR, SDPA])
def test_training_goes_backward_through_the_layer(form):
    y = layer_call(form, 4, training=True)()
    assert y.requires_grad
    assert not layer_call(form, 4, training=False)().requires_grad


def test_a_probe_sees_the_matrix_of_weights():
    """4,096² weights are 64 MiB, in scores and weights."""
    _, written_out = probe_alone(SOFTMAX, 64, 1, "inference")
    _, linear = probe_alone(LINEAR, 64, 1, "inference")
    assert written_out > linear + 64


def rows_of_a_parabola():
    rows = [
        {"form": SOFTMAX, "tokens": n, "seconds": 1 + n**2, "MiB": 2 + 3 * n**2, "extrapolated": False}
        for n in (1, 2, 3)
    ]
    others = [(LINEAR, 10.0), (LINEAR_PLAIN, 20.0), (SDPA, 40.0)]
    training = {LINEAR: 5.0, SDPA: 10.0}
    return rows + [
        {"form": form, "tokens": 10, "seconds": size, "MiB": size, "extrapolated": False}
        | {"training MiB": training.get(form, "")}
        for form, size in others
    ]


def test_extrapolation_and_summary_by_hand():
    rows = rows_of_a_parabola()
    (row,) = extrapolate(rows, [10])
    assert row["extrapolated"]
    assert (row["seconds"], row["MiB"]) == pytest.approx((101, 302))
    assert summarise([*rows, row]) == (
        "10 tokens: the linear layer takes"
        " 50.00% of the memory and 50.00% of the time of linear, written out;"
        " 25.00% of the memory and 25.00% of the time of SDPA;"
        " 3.31% of the memory and 9.90% of the time of softmax, written out (extrapolated);"
        " 50% of SDPA's in training\n"
    )


def test_the_command_writes_table_csv_and_picture(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(layer_memory.measure_memory, "__defaults__", ((8, 16, 150),))
    monkeypatch.setattr(
        layer_memory, "probe_alone", lambda form, grid, *_: (grid**2 / 1e6, 1 + FORMS.index(form) + grid**2)
    )
    assert cli.main(["analyze", "memory", "--output", str(tmp_path), "--repeats", "1"]) == 0
    assert "22,500 tokens: the linear layer takes" in capsys.readouterr().out
    with (tmp_path / "memory.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 3 * len(FORMS)
    assert [row["tokens"] for row in rows if row["extrapolated"] == "True"] == ["22500"]
    assert (tmp_path / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_an_output_that_is_no_folder_is_refused_before_the_work(tmp_path, monkeypatch, capsys):
    (tmp_path / "file").touch()
    monkeypatch.setattr(layer_memory, "measure_memory", lambda **_: pytest.fail("it measured"))
    assert cli.main(["analyze", "memory", "--output", str(tmp_path / "file")]) == 1
    assert "File exists" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"grids": (8, 200)}, "grids must have two sizes of at most 16384 tokens"),
        ({"grids": (0, 8, 9)}, "grids must have two sizes"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
    ],
)
def test_bad_sizes_are_refused(arguments, message):
    with pytest.raises(ConfigError, match=message):
        measure_memory(**arguments)
