"""Whole runs of `train_lra` and its command: exact figures, interruption and resume, refusals."""

import json
import random
import signal
from pathlib import Path

import pytest
import torch
from lra_runs import LISTOPS, TINY, configure
from omegaconf import OmegaConf
from safetensors.torch import load_file

from nalaformer_hf import NaLaForSequenceClassification, cli
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra import train_lra
from nalaformer_hf.training.lra_config import LRAModelSection, load_lra_config
from nalaformer_hf.training.lra_data import SequenceCollator, load_splits
from nalaformer_hf.training.lra_models import DocumentPairClassifier, make_lra_model
from nalaformer_hf.training.lra_tasks import LRA_TASKS
from nalaformer_hf.training.run_trainer import RunTrainer
from nalaformer_hf.training.settings import recipe_names


def write_letters(folder: Path, *, columns=("text",), count=200) -> str:
    """Random letters, in all columns; the label tells whether there are more a than b in the first one."""
    folder.mkdir()
    rng = random.Random(0)
    for name, size in (("train", count), ("test", count // 4)):
        rows = []
        for i in range(size):
            letters = ["a" if rng.random() < (0.8 if i % 2 else 0.2) else "b" for _ in range(15)]
            row = {column: "".join(letters) for column in columns}
            rows.append(row | {"label": int(letters.count("a") > 7)})
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def accuracy(model, config) -> float:
    """Share of the test items, one by one, without padding."""
    model.eval()
    collate, right = SequenceCollator(config.data), []
    for row in load_splits(config.data).test:
        batch = collate([row])
        labels = batch.pop("labels")
        with torch.no_grad():
            right += (model(**batch).logits.argmax(-1) == labels).tolist()
    return sum(right) / len(right)


def test_interrupted_and_resumed_is_uninterrupted(tmp_path, monkeypatch):
    overrides = ("train.eval_strategy=steps", "train.eval_steps=3")
    straight = train_lra(configure(tmp_path / "straight", *overrides))
    config = configure(tmp_path / "run", *overrides)
    training_step = RunTrainer.training_step

    def signalled(self, *args, **kwargs):
        if self.state.global_step == 3:
            signal.raise_signal(signal.SIGINT)
        return training_step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(RunTrainer, "training_step", signalled)
        stopped = train_lra(config)
    assert (stopped.finished, stopped.steps, stopped.accuracy) == (False, 4, None)
    resumed = train_lra(config, resume=True)
    for figure in ("loss", "accuracy", "validation_accuracy", "steps", "num_parameters"):
        assert getattr(resumed, figure) == getattr(straight, figure)
    expected = load_file(tmp_path / "straight" / "model" / "model.safetensors")
    for name, weight in load_file(tmp_path / "run" / "model" / "model.safetensors").items():
        assert torch.equal(weight, expected[name]), name
    with pytest.raises(ConfigError, match=r"keeps its model and data, but data\.seed changed"):
        train_lra(configure(tmp_path / "run", "data.seed=1"), resume=True)
    noted = OmegaConf.load(tmp_path / "run" / "config.yaml")
    del noted.data["max_depth"]  # as of a version that did not have it yet
    OmegaConf.save(noted, tmp_path / "run" / "config.yaml")
    assert train_lra(config, resume=True).finished


@pytest.mark.parametrize("attention", ["nala", "elu", "softmax"])
def test_training_learns_and_the_saved_model_scores_the_same(tmp_path, attention):
    source = write_letters(tmp_path / "letters")
    config = configure(
        tmp_path / "run", f"model.attention={attention}", "train.max_steps=30", task="text", source=source
    )
    result = train_lra(config)
    assert (result.task, result.attention, result.sizes) == ("text", attention, (200, 0, 50))
    assert result.validation_accuracy is None
    assert result.accuracy > 0.9
    model = NaLaForSequenceClassification.from_pretrained(result.model_dir)
    assert result.accuracy == accuracy(model, config)
    card = (Path(result.model_dir) / "README.md").read_text(encoding="utf-8")
    assert "- task: Text of Long Range Arena, sequences of up to 4096\n" in card
    assert "- items: a folder\n- optimizer steps: 30\n" in card
    assert source not in card


def test_pairs_are_trained_and_scored(tmp_path):
    source = write_letters(tmp_path / "pairs", columns=("text1", "text2"), count=30)
    config = configure(tmp_path / "run", task="retrieval", source=source)
    result = train_lra(config)
    assert result.accuracy == accuracy(DocumentPairClassifier.from_pretrained(result.model_dir), config)
    written = json.loads((tmp_path / "run" / "result.json").read_text())
    assert written["sizes"] == list(result.sizes)
    assert sum(result.sizes) == 37
    assert written["accuracy"] == result.accuracy


@pytest.mark.parametrize("task", ["pathfinder", "listops"])
def test_command_trains_and_says_the_score(tmp_path, capsys, task):
    command = ["train", "lra", "--task", task, f"train.output_dir={tmp_path / 'run'}", "train.max_steps=1"]
    command += ["data.num_train=2", "data.num_validation=1", "data.num_test=4", "data.sequences_per_step=2"]
    command += [f"model.overrides.{name}={value}" for name, value in TINY.items()]
    command += ["train.per_device_train_batch_size=2", "train.use_cpu=true", "train.report_to=none"]
    command += ["data.max_length=64"] if task == "listops" else []
    assert cli.main(command) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert f"model: {result['accuracy']:.2%} of the test items right" in capsys.readouterr().err
    assert (result["task"], result["sizes"]) == (task, [2, 1, 4])
    assert cli.main(command) == 1
    assert "holds a run: resume it" in capsys.readouterr().err


@pytest.mark.parametrize("name", recipe_names("lra"))
def test_recipes_have_the_published_lengths(name):
    source = ["data.source=documents"] if name == "retrieval" else []
    config = load_lra_config(name, source)
    task = name.removesuffix("-small")
    assert config.data.task == task
    assert config.data.length == (64 if name == "listops-small" else LRA_TASKS[task].max_length)
    folder = "lra-small" if name == "listops-small" else "lra"
    assert config.train["output_dir"] == f"runs/{folder}/{task}-nala-0"
    changes = ["model.attention=elu", "train.seed=3"]
    again = load_lra_config(name, [*changes, *source])
    assert again.train["output_dir"] == f"runs/{folder}/{task}-elu-3"
    with torch.device("meta"):
        nala, softmax = (
            make_lra_model(
                LRAModelSection(attention=attention, overrides=config.model.overrides), config.data
            )
            for attention in ("nala", "softmax")
        )
    assert softmax.num_parameters() == pytest.approx(nala.num_parameters(), rel=0.02)


@pytest.mark.parametrize(
    ("task", "override", "message"),
    [
        ("listops", "data.task=null", "data.task must be one of listops, text, retrieval, image, pathfinder"),
        ("listops", "data.task=lists", "data.task.*listops.*lists"),
        ("listops", "data.source=here", "data.source must not be set: the items of listops are generated"),
        ("retrieval", "data.num_train=5", "data.source must name the documents of retrieval"),
        ("image", "data.max_length=1000", "data.max_length must be a square for image, got 1000"),
        ("pathfinder", "data.max_length=256", "data.max_length must be 1024 for pathfinder, got 256"),
        ("text", "data.max_depth=3", "data.max_depth belongs to listops, not to text"),
        ("listops", "data.max_depth=2", "data.max_depth must be at least 3, got 2"),
        ("listops", "data.max_length=15", "data.max_length must be at least 16, got 15"),
        ("text", "data.num_test=0", "data.num_test must be at least 1, got 0"),
        ("text", "model.attention=linear", "model.attention.*nala.*linear"),
        ("text", "train.dataloader_drop_last=true", "must be false: the evaluation would leave items out"),
        ("text", "train.remove_unused_columns=true", "must be false: the sequences are such a column"),
        ("text", "modle.attention=elu", "unknown key modle"),
    ],
)
def test_configurations_that_do_not_fit_are_refused(tmp_path, task, override, message):
    data = {} if task == "listops" else {"num_validation": 1}
    with pytest.raises(ConfigError, match=message):
        configure(tmp_path / "run", override, task=task, **data)


def test_evaluation_without_validation_items_is_refused(tmp_path):
    numbers = LISTOPS | {"num_validation": 0}
    with pytest.raises(ConfigError, match=r"train\.eval_strategy must be no: there are no validation items"):
        train_lra(configure(tmp_path / "run", "train.eval_strategy=steps", **numbers))


def test_command_without_a_task_says_which_there_are(capsys):
    assert cli.main(["train", "lra", "train.output_dir=out"]) == 1
    assert "data.task must be one of listops, text" in capsys.readouterr().err
    assert cli.main(["train", "lra", "--task", "listop"]) == 1
    assert "listop is neither a file nor one of the recipes image, listops" in capsys.readouterr().err
