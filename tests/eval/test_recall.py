"""Recall tasks, checked by an independent reader of their sequences, and the runs that use them."""

import json

import pytest
import torch

from nalaformer_hf import cli
from nalaformer_hf.eval.recall import MODELS, model_config, run_recall, settings_of, to_markdown
from nalaformer_hf.eval.recall_tasks import IGNORED, MARK, RECALL_TASKS, SEPARATOR
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.models import count_parameters

VOCAB = 32


def answer_mqar(ids):
    """Each key's second successor is its first one; keys are below half the vocabulary, 0 fills."""
    seen, answers = {}, {}
    for place, key in enumerate(ids[:-1]):
        if 0 < key < VOCAB // 2:
            if key in seen:
                answers[place + 1] = seen[key]
            seen.setdefault(key, ids[place + 1])
    return answers


def answer_needle(ids):
    first, second = [i for i, token in enumerate(ids) if token == MARK]
    assert second == len(ids) - 4
    return {second + i: ids[first + i] for i in (1, 2, 3)}


def answer_induction(ids):
    asked = ids[-2]
    (first,) = [i for i, token in enumerate(ids[:-2]) if token == asked]
    return {len(ids) - 1: ids[first + 1]}


def answer_copy(ids):
    middle = ids.index(SEPARATOR)
    return {middle + 1 + i: token for i, token in enumerate(ids[:middle])}


ANSWERS = {"mqar": answer_mqar, "needle": answer_needle, "induction": answer_induction, "copy": answer_copy}


@pytest.mark.parametrize("extra", [0, 1, 30])
@pytest.mark.parametrize("task", RECALL_TASKS)
def test_the_past_of_each_sequence_has_its_answers(task, extra):
    length = RECALL_TASKS[task].min_length + extra
    ids, labels = RECALL_TASKS[task].make(50, length, VOCAB, torch.Generator().manual_seed(0))
    assert ids.shape == labels.shape == (50, length)
    for row, wanted in zip(ids.tolist(), labels.tolist(), strict=True):
        answers = ANSWERS[task](row)
        assert answers
        assert {i: label for i, label in enumerate(wanted) if label != IGNORED} == answers


@pytest.mark.parametrize("task", RECALL_TASKS)
def test_sequences_follow_the_seed_and_differ(task):
    first, again, other = (
        RECALL_TASKS[task].make(20, 40, VOCAB, torch.Generator().manual_seed(seed))[0] for seed in (1, 1, 2)
    )
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert len(first.unique(dim=0)) == 20


def test_models_are_of_one_size():
    sizes = {name: count_parameters(model_config(name, settings_of("mqar"))) for name in MODELS}
    assert sizes["linear"] == sizes["1 + ELU"]
    assert sizes["softmax"] == pytest.approx(sizes["linear"], rel=0.03)
    assert sizes["gated_delta"] == pytest.approx(sizes["linear"], rel=0.03)


def test_runs_are_kept_continued_and_tabulated(tmp_path):
    overrides = {"num_steps": 2, "batch_size": 4, "vocab_size": 32, "factors": (1, 2), "num_asked": 8}
    chosen = {"tasks": ["induction"], "models": ["linear", "softmax"], "overrides": overrides}
    runs = run_recall(tmp_path, seeds=[0], **chosen)
    more = run_recall(tmp_path, seeds=[0, 1], **chosen)
    assert more[:2] == runs
    assert [(run["model"], run["seed"]) for run in more] == [
        ("linear", 0),
        ("softmax", 0),
        ("linear", 1),
        ("softmax", 1),
    ]
    assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 4
    assert all(set(run["accuracy"]) == {"24", "48"} for run in more)
    lines = to_markdown(more).splitlines()
    assert lines[0] == "| induction, tokens | parameters | seeds | 24 | 48 |"
    assert lines[2].startswith("| linear | 94,272 | 2 | ")
    with pytest.raises(ConfigError, match="has runs with other settings"):
        run_recall(tmp_path, seeds=[0], **(chosen | {"overrides": None}))


def test_each_run_is_done_once_whatever_is_given_twice(tmp_path):
    overrides = {"num_steps": 1, "batch_size": 2, "vocab_size": 32, "factors": (1,), "num_asked": 2}
    chosen = {"tasks": ["copy", "copy"], "models": ["linear", "linear"], "overrides": overrides}
    runs = run_recall(tmp_path, seeds=[0, 0], **chosen)
    assert len(runs) == 1
    results = tmp_path / "results.jsonl"
    results.write_text(results.read_text() + '{"task": "co')
    assert run_recall(tmp_path, seeds=[0], **chosen) == runs
    results.write_text('{"power": 3.0, "seed": 0, "settings": {}}\n')
    with pytest.raises(ConfigError, match="has runs of another kind"):
        run_recall(tmp_path, seeds=[0], **chosen)


def test_training_learns(tmp_path):
    """Induction over four letters is learnt in seconds, well above the quarter of guessing."""
    sizes = {"num_steps": 80, "batch_size": 32, "length": 12, "factors": (1,), "vocab_size": 7}
    overrides = sizes | {"learning_rate": 5e-3}
    (run,) = run_recall(tmp_path, tasks=["induction"], models=["linear"], seeds=[0], overrides=overrides)
    assert run["accuracy"]["12"] > 0.5


@pytest.mark.parametrize(
    ("change", "message"),
    [({"tasks": ["mqr"]}, "unknown task mqr"), ({"models": ["soft"]}, "unknown model soft")],
)
def test_unknown_names_are_refused(tmp_path, change, message):
    with pytest.raises(ConfigError, match=message):
        run_recall(tmp_path, **change)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="num_steps must be positive, got 0"):
        settings_of("copy", num_steps=0)
    with pytest.raises(TypeError, match="unexpected keyword argument 'steps'"):
        settings_of("copy", steps=3)


def test_the_command_prints_the_table(tmp_path, capsys):
    command = ["eval", "recall", "--output", str(tmp_path), "--tasks", "copy", "--models", "linear"]
    assert cli.main([*command, "--seeds", "0", "--steps", "1"]) == 0
    assert capsys.readouterr().out.startswith("| copy, tokens | parameters | seeds | 24 | 48 | 96 |")
    assert json.loads((tmp_path / "results.jsonl").read_text())["settings"]["num_steps"] == 1
