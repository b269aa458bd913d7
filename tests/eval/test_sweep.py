"""The sweep over λ, τ and α: its grid, its files, and that a stopped sweep goes on."""

import csv
import json

import pytest
import torch

from nalaformer_hf import cli
from nalaformer_hf.eval import sweep
from nalaformer_hf.eval.sweep import PAPER, Point, SweepSettings, grid, run_sweep, to_markdown
from nalaformer_hf.training.errors import ConfigError

SETTINGS = SweepSettings(num_steps=2, batch_size=2, length=16)


@pytest.fixture(autouse=True)
def text(monkeypatch):
    """A short text in place of the standard library's."""
    data = torch.arange(4096, dtype=torch.uint8)
    monkeypatch.setattr(sweep, "_read_bytes", lambda: (data, data))
    monkeypatch.setattr(sweep, "NUM_WINDOWS", 4)


def test_grid_is_a_plane_and_a_line_through_the_papers_point():
    points = grid([1, 3], [0.5, 1], [1, 20])
    assert points == [PAPER, Point(1, 0.5, 20), Point(1, 1, 20), Point(3, 1, 20), Point(3, 0.5, 1)]
    assert [point for point in points if point.is_excluded] == [Point(1, 0.5, 20)]


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_constants_that_are_not_positive_are_refused(bad):
    with pytest.raises(ConfigError, match="taus must be positive and finite, got"):
        grid([3], [0.5, bad], [20])


def test_runs_are_kept_and_continued(tmp_path, monkeypatch):
    points = [PAPER, Point(4, 0.5, 20)]
    runs = run_sweep(tmp_path, points[:1], seeds=[0], settings=SETTINGS)
    trained = []
    train = sweep.train
    monkeypatch.setattr(sweep, "train", lambda *args, **kwargs: (trained.append(1), train(*args, **kwargs)))
    more = run_sweep(tmp_path, points, seeds=[0], settings=SETTINGS)
    assert more[0] == runs[0]
    assert len(trained) == 1
    assert more[0]["bits_per_byte"] != more[1]["bits_per_byte"]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 2
    with pytest.raises(ConfigError, match="has runs with other settings"):
        run_sweep(tmp_path, points, seeds=[0], settings=SweepSettings())


def test_a_half_written_last_line_costs_no_finished_run(tmp_path):
    points = [PAPER, Point(4, 0.5, 20)]
    runs = run_sweep(tmp_path, points, seeds=[0], settings=SETTINGS)
    results = tmp_path / "results.jsonl"
    whole = results.read_bytes()
    results.write_bytes(whole[:-20])
    again = run_sweep(tmp_path, points, seeds=[0], settings=SETTINGS)
    assert [run["seed"] for run in again] == [0, 0]
    assert again[0] == runs[0]
    assert results.read_bytes().splitlines()[0] == whole.splitlines()[0]
    assert [json.loads(line) for line in results.read_text().splitlines()] == again
    results.write_bytes(whole[:-1])
    assert run_sweep(tmp_path, [*points, Point(3, 1, 20)], seeds=[0], settings=SETTINGS)[:2] == runs
    for start in (whole[20:], b"[1]\n" + whole, b'{"seed": 0}\n' + whole):
        results.write_bytes(start)
        with pytest.raises(ConfigError, match="line 1 is not a run"):
            run_sweep(tmp_path, points, seeds=[0], settings=SETTINGS)


def test_a_seed_given_twice_is_one(tmp_path):
    assert len(run_sweep(tmp_path, [PAPER], seeds=[0, 0], settings=SETTINGS)) == 1
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
    with pytest.raises(ConfigError, match="seeds must be between 0 and"):
        run_sweep(tmp_path, [PAPER], seeds=[-1], settings=SETTINGS)


def test_differences_are_taken_seed_by_seed():
    other = Point(4, 0.5, 20)
    scores = {(PAPER, 0): 3.0, (PAPER, 1): 2.0, (other, 0): 3.5, (other, 1): 2.5}
    runs = [
        point._asdict() | {"seed": seed, "bits_per_byte": score} for (point, seed), score in scores.items()
    ]
    lines = to_markdown(runs, [PAPER, other, Point(1, 0.5, 20)]).splitlines()
    assert lines[2] == "| 3 | 0.5 | 20 | 2.500 ± 0.707 | +0.000 ± 0.000 | 2 |"
    assert lines[3] == "| 4 | 0.5 | 20 | 3.000 ± 0.707 | +0.500 ± 0.000 | 2 |"
    assert lines[4] == "| 1 | 0.5 | 20 | excluded: λτ = 0.5 < 1 | | |"


def test_the_command_writes_table_csv_and_picture(tmp_path, capsys):
    command = ["analyze", "sweep", "--output", str(tmp_path), "--seeds", "0", "--steps", "1"]
    assert cli.main([*command, "--powers", "1", "3", "--taus", "0.5", "--gains", "5"]) == 0
    printed = capsys.readouterr().out
    assert "| 1 | 0.5 | 20 | excluded: λτ = 0.5 < 1 | | |" in printed
    with (tmp_path / "sweep.csv").open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert [row["excluded"] for row in rows] == ["", "", "λτ = 0.5 < 1"]
    assert 0 < float(rows[0]["bits_per_byte"]) < 12
    assert (tmp_path / "sweep.png").read_bytes().startswith(b"\x89PNG")
    first = json.loads((tmp_path / "results.jsonl").read_text().splitlines()[0])
    assert first["settings"]["num_steps"] == 1


def test_the_model_learns_and_its_score_is_in_bits(tmp_path, monkeypatch):
    """Bytes that count up are learnt in seconds; guessing among 256 costs 8 bits."""
    data = torch.arange(4096, dtype=torch.uint8)
    monkeypatch.setattr(sweep, "_read_bytes", lambda: (data, data))
    settings = SweepSettings(num_steps=60, batch_size=8, length=32, learning_rate=1e-2)
    (run,) = run_sweep(tmp_path, [PAPER], seeds=[0], settings=settings)
    assert run["bits_per_byte"] < 5


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="length must be positive, got 0"):
        SweepSettings(length=0)
