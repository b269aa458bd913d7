"""The table beside the published rows: right columns, and marks where a score is not comparable."""

import json

import pytest

from nalaformer_hf.eval.comparison import COLUMNS, draw, published_rows, read_results, to_markdown
from nalaformer_hf.training.errors import ConfigError

SCORES = {"Wiki": 30.0, "LMB": 40.0, "PIQA": 0.6, "Hella": 0.3, "Wino": 0.5, "ARC-e": 0.4, "ARC-c": 0.2}


def results(**changes) -> dict:
    """A result file as lm-eval writes it, of a full run of a model of 374M parameters."""
    content = {
        "model_name": "mine",
        "results": {c.task: {c.metric: SCORES[c.name]} for c in COLUMNS},
        "n-samples": {c.task: {"original": c.num_items, "effective": c.num_items} for c in COLUMNS},
        "n-shot": {c.task: 0 for c in COLUMNS},
        "config": {"model": "nala", "model_args": {"max_length": 2048}, "model_num_parameters": 374e6},
    }
    return {**content, **changes}


def read(tmp_path, content):
    path = tmp_path / "results_1.json"
    path.write_text(json.dumps(content))
    return read_results(path)


def test_published_means_are_those_of_their_rows():
    means = [round(row.mean + 1e-9, 1) for row in published_rows()]
    assert means == [43.3, 44.1, 43.7, 43.6, 44.1, 44.3, 44.3, 44.8]


def test_a_full_run_is_comparable(tmp_path):
    row = read(tmp_path, results())
    assert row.scores == pytest.approx(
        {"Wiki": 30, "LMB": 40, "PIQA": 60, "Hella": 30, "Wino": 50, "ARC-e": 40, "ARC-c": 20}
    )
    table = to_markdown([row])
    assert "| **mine** | 30.00 | 40.00 | 60.0 | 30.0 | 50.0 | 40.0 | 20.0 | 40.0 |" in table
    assert "<sup>" not in table
    assert "No result file says how a model was trained" in table


@pytest.mark.parametrize(
    ("changes", "marked", "note"),
    [
        ({"n-shot": {"piqa": 5}}, {"PIQA": "b"}, "<sup>b</sup> with examples in the prompt"),
        (
            {"config": {"model": "nala", "model_args": {}, "model_num_parameters": 374e6}},
            {"Wiki": "d"},
            "<sup>d</sup> of whole documents",
        ),
        (
            {"config": {"model": "hf", "model_args": {"max_length": 512}, "model_num_parameters": 374e6}},
            {"Wiki": "d"},
            "or other windows",
        ),
        (
            {"config": {"model": "nala", "model_args": "max_length=512", "model_num_parameters": 374e6}},
            {"Wiki": "d"},
            "or other windows",
        ),
        ({"config": {"model": "hf", "model_args": None, "model_num_parameters": 374e6}}, {}, ""),
        (
            {"config": {"model": "hf", "model_args": {}, "model_num_parameters": 8e6}},
            dict.fromkeys(SCORES, "c"),
            "<sup>c</sup> of a model of another size",
        ),
        (
            {"n-samples": {c.task: {"original": c.num_items, "effective": 4} for c in COLUMNS}},
            dict.fromkeys(SCORES, "a"),
            "<sup>a</sup> on a part of the items",
        ),
    ],
)
def test_what_is_not_comparable_is_marked(tmp_path, changes, marked, note):
    row = read(tmp_path, results(**changes))
    assert {name: marks for name, marks in row.marks.items() if marks} == marked
    assert note in to_markdown([row])


def test_missing_tasks_leave_gaps_and_no_mean(tmp_path):
    row = read(tmp_path, results(results={"piqa": {"acc,none": 0.6}}))
    assert "| **mine** |  |  | 60.0 |  |  |  |  |  |" in to_markdown([row])


def test_the_picture_is_drawn(tmp_path):
    draw([read(tmp_path, results())], tmp_path / "table.png")
    assert (tmp_path / "table.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no json", "must be a result file of lm-eval"),
        (json.dumps(results(results=[])), "must be a result file of lm-eval: .* must be objects"),
        (json.dumps({"results": {}, "config": {}}), "must be a result file of lm-eval: KeyError"),
        ("{}", "must be a result file of lm-eval"),
        (json.dumps(results(results={"mmlu": {}})), "has no score of the tasks wikitext, lambada_openai"),
    ],
)
def test_other_files_are_refused(tmp_path, text, message):
    (tmp_path / "a.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_results(tmp_path / "a.json")
