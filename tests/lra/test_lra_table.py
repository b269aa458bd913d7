"""The table of runs: published rows, spread over seeds, marks, and runs that do not belong together."""

import json

import pytest
from omegaconf import OmegaConf

from nalaformer_hf import cli
from nalaformer_hf.eval.lra_table import published_rows, read_run, to_markdown
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_tasks import LRA_TASKS


@pytest.fixture
def write_run(tmp_path):
    """Writes the files of a finished run, of the published size unless told otherwise; returns its folder."""

    def write(task, attention, seed, accuracy, steps=100, max_depth=None, **changes):
        published = LRA_TASKS[task]
        folder = tmp_path / f"{task}-{attention}-{seed}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        result = {"task": task, "attention": attention, "seed": seed, "accuracy": accuracy, "steps": steps}
        result |= {"num_parameters": 1234, "max_length": published.max_length, "sizes": published.sizes}
        (folder / "result.json").write_text(json.dumps(result | changes))
        config = {
            "model": {"attention": attention},
            "data": {"max_depth": max_depth},
            "train": {"seed": seed, "output_dir": str(folder), "max_steps": steps},
        }
        OmegaConf.save(OmegaConf.create(config), folder / "config.yaml")
        return folder

    return write


def test_published_means():
    """The means over the five tasks are those that the paper prints."""
    means = {name: round(sum(row.values()) / 5, 2) for name, row in published_rows().items()}
    assert means == {
        "Transformer": 54.39,
        "Local Attention": 46.06,
        "Sparse Transformer": 51.24,
        "Longformer": 53.46,
        "Linformer": 51.36,
        "Reformer": 50.67,
        "Synthesizer": 52.88,
        "BigBird": 55.01,
        "Linear Transformer": 50.55,
        "Performer": 51.41,
    }


def test_mean_and_spread_over_seeds(write_run):
    folders = [write_run("text", "nala", seed, share) for seed, share in enumerate((0.60, 0.62, 0.67))]
    folders += [write_run("text", "elu", 0, 0.5)]
    table = to_markdown([read_run(folder) for folder in reversed(folders)])
    assert "| Linear Transformer | 16.13 | 65.90 | 53.09 | 42.34 | 75.30 | 50.55 |" in table
    assert "| **NaLa** |  | 63.00 ± 3.61 |  |  |  |  |" in table
    assert "| **1 + ELU** |  | 50.00 |  |  |  |  |" in table
    assert "**softmax**" not in table
    assert "| Text | NaLa | 1,234 | 4,096 | 25,000 / 0 / 25,000 | 100 | 2, 1, 0 | 63.00 ± 3.61 |" in table


def test_marks_say_what_is_not_comparable(write_run):
    folders = [write_run(task, "softmax", 0, 0.5) for task in LRA_TASKS if task != "image"]
    folders.append(write_run("image", "softmax", 0, 0.4, sizes=[10, 5, 5]))
    table = to_markdown([read_run(folder) for folder in folders])
    assert (
        "| **softmax** | 50.00<sup>a</sup> | 50.00 | 50.00 | 40.00<sup>b</sup> | 50.00<sup>a</sup>" in table
    )
    assert " | 48.00<sup>ab</sup> |\n" in table
    assert "<sup>a</sup> on items of our own generator" in table
    assert "<sup>b</sup> with another length" in table
    shallow = write_run("listops", "nala", 0, 0.5, max_depth=3)
    table = to_markdown([read_run(shallow)])
    assert "| **NaLa** | 50.00<sup>ab</sup> |" in table
    assert "| ListOps | NaLa | 1,234 | 2,000, depth 3 |" in table


def test_runs_that_differ_in_more_than_their_seed_are_refused(write_run):
    first, other = write_run("text", "nala", 0, 0.6), write_run("text", "nala", 1, 0.6, steps=200)
    with pytest.raises(ConfigError, match=r"in their seeds only, not in train\.max_steps$"):
        to_markdown([read_run(first), read_run(other)])
    again = write_run("text", "nala", 0, 0.7)
    with pytest.raises(ConfigError, match="must have different seeds"):
        to_markdown([read_run(first), read_run(again)])


def test_runs_from_before_max_depth_belong_to_those_without_one(write_run):
    folders = [write_run("text", "nala", seed, 0.6) for seed in range(2)]
    config = OmegaConf.load(folders[0] / "config.yaml")
    del config.data["max_depth"]
    OmegaConf.save(config, folders[0] / "config.yaml")
    assert "| **NaLa** |  | 60.00 ± 0.00 |" in to_markdown([read_run(folder) for folder in folders])


@pytest.mark.parametrize(("text", "message"), [('{"task": "te', "is no JSON"), ("[]", "must hold a run of")])
def test_broken_results_are_refused(tmp_path, text, message):
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_run(tmp_path)


@pytest.mark.parametrize(
    ("name", "value"), [("accuracy", None), ("accuracy", "high"), ("attention", "other"), ("sizes", 3)]
)
def test_results_without_what_the_table_needs_are_refused(write_run, name, value):
    folder = write_run("text", "nala", 0, 0.6)
    result = json.loads((folder / "result.json").read_text())
    (folder / "result.json").write_text(json.dumps(result | {name: value}))
    with pytest.raises(ConfigError, match=rf"result\.json must have .*{name}"):
        read_run(folder)


@pytest.mark.parametrize("content", [b"a: [", b"- 1", b"", b"\xff\xfe"])
def test_damaged_configurations_are_refused(write_run, content):
    folder = write_run("text", "nala", 0, 0.6)
    (folder / "config.yaml").write_bytes(content)
    with pytest.raises(ConfigError, match=r"config\.yaml is no configuration of a run"):
        read_run(folder)
    (folder / "config.yaml").unlink()
    with pytest.raises(ConfigError, match=r"must hold a run: it has no config\.yaml"):
        read_run(folder)


def test_command_prints_the_table(write_run, tmp_path, capsys):
    assert cli.main(["eval", "lra"]) == 0
    assert "| Performer | 18.01 |" in capsys.readouterr().out
    assert cli.main(["eval", "lra", str(write_run("listops", "nala", 0, 0.35))]) == 0
    assert "| **NaLa** | 35.00<sup>a</sup> |" in capsys.readouterr().out
    assert cli.main(["eval", "lra", str(tmp_path / "nothing")]) == 1
    assert "must hold a finished run: it has no result.json" in capsys.readouterr().err
    (tmp_path / "result.json").write_text('{"heldout_loss": 1.0}')
    assert cli.main(["eval", "lra", str(tmp_path)]) == 1
    assert "must hold a run of train lra" in capsys.readouterr().err
