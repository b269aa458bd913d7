"""Whole runs of `train_image`: exact evaluation, interruption and resume, what they leave behind."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from image_runs import ALL_ON, CLASSES, configure, write_images
from PIL import Image
from safetensors.torch import load_file
from transformers import AutoImageProcessor, AutoModelForImageClassification
from transformers.trainer import TRAINER_STATE_NAME

from nalaformer_hf.eval.images import eval_images, match_classes
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image import train_image
from nalaformer_hf.training.image_config import load_image_config
from nalaformer_hf.training.image_data import load_images
from nalaformer_hf.training.image_models import make_image_model
from nalaformer_hf.training.image_trainer import EMA_FILE, ImageTrainer
from nalaformer_hf.training.sections import ModelSection

PERSISTENT_WORKER = ("train.dataloader_num_workers=1", "train.dataloader_persistent_workers=true")


@pytest.fixture
def images(tmp_path, monkeypatch) -> Path:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    return write_images(tmp_path / "images")


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int) -> None:
    """Let SIGINT come while the given step is computed, once."""
    training_step = ImageTrainer.training_step
    pending = [signal.SIGINT]

    def signalled(self, *args, **kwargs):
        if self.state.global_step == step and pending:
            signal.raise_signal(pending.pop())
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(ImageTrainer, "training_step", signalled)


def history(checkpoint: str) -> list[dict[str, float]]:
    logged = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())["log_history"]
    timed = ("runtime", "per_second")
    return [{name: value for name, value in row.items() if not name.endswith(timed)} for row in logged]


@pytest.mark.parametrize("workers", [(), PERSISTENT_WORKER], ids=["no workers", "persistent worker"])
def test_interrupted_and_resumed_is_uninterrupted(images, tmp_path, monkeypatch, workers):
    """With all augmentation on, over several epochs, and stops within and at the end of one."""
    straight = train_image(configure(images, tmp_path / "straight", *ALL_ON, *workers))
    config = configure(images, tmp_path / "run", *ALL_ON, *workers)
    for step in (0, 3, 5):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step)
            stopped = train_image(config, resume=step > 0)
        assert not stopped.finished
        assert stopped.checkpoint == str(tmp_path / "run" / f"checkpoint-{step + 1}")
    resumed = train_image(config, resume=True)
    assert resumed.finished
    assert history(resumed.checkpoint) == history(straight.checkpoint)
    assert history(resumed.checkpoint)[-1]["epoch"] > 1
    for file in ("model/model.safetensors", f"checkpoint-7/{EMA_FILE}", "checkpoint-7/model.safetensors"):
        expected = load_file(tmp_path / "straight" / file)
        for name, weight in load_file(tmp_path / "run" / file).items():
            assert torch.equal(weight, expected[name]), name
    assert train_image(config, resume=True) == resumed  # there is nothing left to do


def test_evaluation_is_what_the_saved_model_scores(images, tmp_path):
    """The Trainer's figures, those of `eval_images`, and a plain loop over the held-out images agree."""
    config = configure(images, tmp_path / "run", "ema.decay=0.5")
    result = train_image(config)
    model = AutoModelForImageClassification.from_pretrained(result.model_dir).eval()
    processor = AutoImageProcessor.from_pretrained(result.model_dir)
    assert model.config.id2label == dict(enumerate(CLASSES))
    heldout = load_images(config.data).heldout
    nats, right = [], 0
    for row in heldout:
        with torch.no_grad():
            logits = model(**processor(images=row["image"], return_tensors="pt")).logits[0]
        nats.append(-logits.log_softmax(-1)[row["label"]].item())
        right += int(logits.argmax() == row["label"])
    assert len(nats) == 12
    assert result.top1 == right / 12
    assert result.top5 == 1.0
    assert result.loss == pytest.approx(sum(nats) / 12, rel=1e-5)
    for kind in CLASSES:
        (tmp_path / "heldout" / "test" / kind).mkdir(parents=True)
    for number, row in enumerate(heldout):
        row["image"].save(tmp_path / "heldout" / "test" / CLASSES[row["label"]] / f"{number}.png")
    for batch_size in (1, 5):
        scores = eval_images(result.model_dir, str(tmp_path / "heldout"), batch_size=batch_size)
        assert (scores.num_images, scores.top1) == (12, result.top1)
        assert scores.loss == pytest.approx(result.loss, rel=1e-5)
    averaged = load_file(Path(result.checkpoint) / EMA_FILE)
    for name, weight in model.state_dict().items():
        assert torch.equal(weight, averaged[name]), name


def test_run_leaves_what_it_promises(images, tmp_path):
    result = train_image(configure(images, tmp_path / "run"))
    assert load_image_config(tmp_path / "run" / "config.yaml") == configure(images, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["top1"] == result.top1
    card = (Path(result.model_dir) / "README.md").read_text(encoding="utf-8")
    assert "- images: a folder\n- optimizer steps: 7\n- images a step: 4\n" in card
    assert str(images) not in card
    with pytest.raises(ConfigError, match="holds a run: resume it"):
        train_image(configure(images, tmp_path / "run"))
    with pytest.raises(
        ConfigError, match=r"keeps its model, data, augment and ema, but augment\.mixup changed"
    ):
        train_image(configure(images, tmp_path / "run", "augment.mixup=0.1"), resume=True)


def test_best_checkpoint_brings_its_average(images, tmp_path):
    """Here it is the first one: of three classes the right one is always among five."""
    overrides = ["ema.decay=0.5", "train.load_best_model_at_end=true", "train.save_steps=4"]
    overrides += ["train.metric_for_best_model=eval_top5", "train.greater_is_better=true"]
    result = train_image(configure(images, tmp_path / "run", *overrides))
    best = json.loads((Path(result.checkpoint) / TRAINER_STATE_NAME).read_text())["best_model_checkpoint"]
    assert best.endswith("checkpoint-4")
    averaged = load_file(Path(best) / EMA_FILE)
    for name, weight in load_file(Path(result.model_dir) / "model.safetensors").items():
        assert torch.equal(weight, averaged[name]), name


def test_pretrained_model_gets_a_new_head(images, tmp_path):
    config = configure(images, tmp_path / "run")
    classes = ["a", "b", "c"]
    make_image_model(config.model, config.data, classes).network.save_pretrained(tmp_path / "three")
    old = AutoModelForImageClassification.from_pretrained(tmp_path / "three").state_dict()
    section = ModelSection(pretrained=str(tmp_path / "three"))
    for number, changed in ((3, set()), (4, {"head.weight", "head.bias"})):
        made = make_image_model(section, config.data, [str(n) for n in range(number)])
        new = made.network.state_dict()
        assert {name for name in old if not old[name].equal(new[name])} == changed
        assert made.processor.crop_size["height"] == made.image_size == 16
        assert len(made.network.config.id2label) == number


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["model.config.hidden_sise=3"], r"unknown key model\.config\.hidden_sise; .*hidden_size"),
        (["model.config.num_channels=2"], r"num_channels of the model must be 1 or 3 for PIL images, got 2"),
        (
            ["model.config.num_channels=1", "augment.auto_augment=rand-m9"],
            r"augment\.auto_augment needs images with 3 channels, the model takes 1",
        ),
        (["augment.auto_augment=mand-m9"], r"augment\.auto_augment must be one of timm's.*got 'mand-m9'"),
        (["data.split=trian"], r"data\.source .*Unknown split .*trian"),
        (["data.image_column=img"], r"data\.image_column must be a column of type Image, got 'img'"),
        (["data.label_column=image"], r"data\.label_column must be a column of type ClassLabel"),
    ],
)
def test_what_does_not_fit_is_refused(images, tmp_path, overrides, message):
    with pytest.raises(ConfigError, match=message):
        train_image(configure(images, tmp_path / "run", *overrides))


def test_grey_images_and_a_split_of_its_own(images, tmp_path):
    """A folder with sub-folders for the splits; the model takes one channel."""
    for split in ("train", "validation"):
        write_images(tmp_path / "split" / split, 4 if split == "train" else 3)
    overrides = ["data.eval_split=validation", "train.max_steps=2"]
    overrides += ["model.config.num_channels=1", "data.crop_fraction=1.0"]
    config = configure(tmp_path / "split", tmp_path / "run", *overrides)
    assert len(load_images(config.data).heldout) == 9
    result = train_image(config)
    processor = AutoImageProcessor.from_pretrained(result.model_dir)
    pixels = processor(images=Image.new("L", (30, 40)), return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 1, 16, 16)
    assert dict(processor.size) == {"shortest_edge": 16}


def test_classes_are_matched_by_name(images, tmp_path):
    config = configure(images, tmp_path / "run")
    heldout = load_images(config.data).heldout
    for names, expected in ((("green", "blue", "red"), [1, 0, 2]), (("x", "y", "z"), [0, 1, 2])):
        network = make_image_model(config.model, config.data, names).network
        assert match_classes(network, heldout).tolist() == expected
    with pytest.raises(ValueError, match="must have the 2 classes of the model, got 3: blue, green, red"):
        match_classes(make_image_model(config.model, config.data, ["x", "y"]).network, heldout)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["imagenet-300", "imagenet-320"])
def test_imagenet_recipe_runs_and_resumes(recipe, tmp_path, monkeypatch):
    """A few steps on a small folder with all that the recipe switches on, bf16 too; stopped and resumed."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split in ("train", "validation"):
        write_images(tmp_path / "images" / split, 8)
    overrides = [f"data.source={tmp_path / 'images'}", "data.image_size=32", "data.images_per_step=8"]
    overrides += ["train.per_device_train_batch_size=4", "train.per_device_eval_batch_size=5"]
    overrides += [
        "train.use_cpu=true",
        "train.dataloader_num_workers=2",
        "train.dataloader_persistent_workers=false",
        "train.max_steps=4",
    ]
    overrides += ["train.logging_steps=1", "train.report_to=none"]
    straight, config = (
        load_image_config(recipe, [*overrides, f"train.output_dir={tmp_path / name}"])
        for name in ("straight", "run")
    )
    assert config.training_arguments().bf16
    expected = train_image(straight)
    with monkeypatch.context() as patch:
        interrupt_at(patch, 1)
        assert not train_image(config).finished
    resumed = train_image(config, resume=True)
    steps, wanted = (
        [row for row in history(result.checkpoint) if "loss" in row] for result in (resumed, expected)
    )
    assert len(steps) == 4
    assert steps[:3] == wanted[:3]  # in the next epoch, workers that were started anew have drawn once more


@pytest.mark.slow
def test_two_processes_evaluate_every_image_once(images, tmp_path):
    """12 held-out images in batches of 5 over two processes: the last ones are not counted twice."""
    config = tmp_path / "run.json"
    values = configure(images, tmp_path / "two", *ALL_ON).to_dict()
    config.write_text(json.dumps(values))
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += ["--num_machines", "1", "--mixed_precision", "no", "--dynamo_backend", "no"]
    command += ["--main_process_port", "0", "-m", "nalaformer_hf.cli", "train", "image"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_DATASETS_CACHE": str(tmp_path / "cache")}
    assert subprocess.run([*command, "--config", str(config)], env=environment).returncode == 0
    result = json.loads((tmp_path / "two" / "result.json").read_text())
    heldout = load_images(load_image_config(values).data).heldout
    model = AutoModelForImageClassification.from_pretrained(result["model_dir"]).eval()
    processor = AutoImageProcessor.from_pretrained(result["model_dir"])
    with torch.no_grad():
        logits = model(**processor(images=heldout["image"][:], return_tensors="pt")).logits
    loss = torch.nn.functional.cross_entropy(logits, torch.tensor(heldout["label"][:])).item()
    assert result["loss"] == pytest.approx(loss, rel=1e-5)
