"""How images get from the data set into a batch and into the loss."""

import dataclasses
import random

import datasets
import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features
from image_runs import ALL_ON, configure
from PIL import Image

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image_batches import (
    AugmentedImages,
    DrawSampler,
    make_augmentation,
    make_processor,
    read_row,
    to_mode,
)
from nalaformer_hf.training.image_config import (
    AugmentSection,
    EmaSection,
    ImageDataSection,
    load_image_config,
)
from nalaformer_hf.training.image_data import load_images, load_split
from nalaformer_hf.training.image_models import make_image_model
from nalaformer_hf.training.image_trainer import ImageTrainer, accuracies, score
from nalaformer_hf.training.settings import recipe_names


def make_trainer(tmp_path, *overrides: str) -> ImageTrainer:
    config = configure("digits", tmp_path, *overrides)
    config.train["eval_strategy"] = "no"
    model = make_image_model(config.model, config.data, ["a", "b", "c"])
    return ImageTrainer(
        augment=config.augment,
        ema=config.ema,
        num_classes=3,
        model=model.network,
        args=config.training_arguments(),
        train_dataset=range(8),
    )


def states() -> list[str]:
    return [repr(x) for x in (random.getstate(), np.random.get_state(), torch.get_rng_state().tolist())]


def test_an_augmentation_follows_from_its_draw_alone():
    pixels = np.random.default_rng(0).integers(0, 256, (20, 24, 3), dtype=np.uint8)
    rows = [{"image": Image.fromarray(pixels), "label": 2}]
    section = AugmentSection(auto_augment="rand-m9-mstd0.5-inc1", random_erasing=1.0)
    augmentation = make_augmentation(section, 16, 3, make_processor(16, 3, None))
    images = AugmentedImages(rows, augmentation, 3, seed=5)
    first = images[0, 7]["pixel_values"]
    assert first.shape == (3, 16, 16)
    random.seed(1)
    np.random.seed(1)
    torch.manual_seed(1)
    before = states()
    assert torch.equal(images[0, 7]["pixel_values"], first)
    assert states() == before
    assert not torch.equal(images[0, 8]["pixel_values"], first)
    assert not torch.equal(AugmentedImages(rows, augmentation, 3, seed=6)[0, 7]["pixel_values"], first)


def test_every_image_is_drawn_once_or_repeatedly():
    sampler = DrawSampler(21, repeats=1, batch_size=4, seed=3)
    epochs = []
    for epoch in range(2):
        sampler.set_epoch(epoch)
        draws = list(sampler)
        assert len(draws) == len(sampler) == 20
        assert len({index for index, _ in draws}) == 20
        epochs.append(draws)
    assert [index for index, _ in epochs[0]] != [index for index, _ in epochs[1]]
    assert [number for draws in epochs for _, number in draws] == list(range(40))
    repeated = [index for index, _ in DrawSampler(21, repeats=3, batch_size=6, seed=3)]
    assert len(repeated) == 18
    assert all(repeated[i] == repeated[i + 1] == repeated[i + 2] for i in range(0, 18, 3))
    assert len(set(repeated)) == 6
    with pytest.raises(ConfigError, match="must be at most the number of images, 21, got 22"):
        DrawSampler(21, repeats=1, batch_size=22, seed=0)


def test_loss_is_against_mixed_and_smoothed_classes(tmp_path):
    """By hand: image i and image B - 1 - i in shares λ and 1 - λ, then ε / K for every class."""
    trainer = make_trainer(tmp_path, "augment.mixup=1.0", "train.label_smoothing_factor=0.1")
    images, labels = torch.rand(4, 3, 16, 16), torch.tensor([0, 1, 2, 1])
    np.random.seed(4)
    np.random.rand()
    share = np.random.beta(1.0, 1.0)
    mixed = images * share + images.flip(0) * (1 - share)
    one_hot = torch.eye(3)[labels]
    targets = (one_hot * share + one_hot.flip(0) * (1 - share)) * 0.9 + 0.1 / 3
    model = trainer.unwrapped_model.eval()
    expected = -(targets * model(mixed).logits.log_softmax(-1)).sum(-1).mean()
    np.random.seed(4)
    loss = trainer.compute_loss(model, {"pixel_values": images.clone(), "labels": labels})
    torch.testing.assert_close(loss, expected)


def test_average_by_hand(tmp_path):
    """decay(step) = min(0.5, 1 - step^(-2/3)), from the second step on; the first one copies the weights."""
    trainer = make_trainer(tmp_path, "ema.decay=0.5")
    weight = trainer.unwrapped_model.head.bias
    average = None
    for step in range(1, 6):
        with torch.no_grad():
            weight.copy_(torch.randn(3))
        trainer.state.global_step = step
        trainer.callback_handler.on_step_end(trainer.args, trainer.state, trainer.control)
        decay = min(0.5, 1 - step ** (-2 / 3)) if step > 1 else 0.0
        average = weight.detach() if average is None else decay * average + (1 - decay) * weight.detach()
        average = average.clone()
    torch.testing.assert_close(trainer.ema.module.head.bias, average)
    assert not torch.allclose(weight, average)
    trainer.take_average()
    torch.testing.assert_close(weight.detach(), average)


def test_weight_decay_spares_what_has_one_dimension(tmp_path):
    trainer = make_trainer(tmp_path)
    names = trainer.get_decay_parameter_names(trainer.unwrapped_model)
    assert "head.weight" in names
    assert "model.patch_embed.proj.0.weight" in names
    spared = ("bias", "norm.weight", "ln.weight", "layer_scale1", "proj.1.weight")
    assert not [name for name in names if name.endswith(spared)]


def test_accuracies_by_hand():
    logits = torch.tensor([[9.0, 8, 7, 6, 5, 4, 3], [1.0, 2, 3, 4, 5, 6, 7], [0.0, 1, 0, 0, 0, 0, 0]])
    nats, top = score(logits, torch.tensor([0, 2, 0]))
    figures = accuracies(nats.numpy(), top.numpy(), np.array([0, 1, 1]))
    assert (figures["top1"], figures["top5"]) == (2 / 3, 2 / 3)
    assert nats[2].item() == pytest.approx(np.log(np.e + 6))
    assert figures["loss"] == pytest.approx(nats.mean().item())


def test_digits_are_split_alike_and_apart():
    images = load_images(ImageDataSection(source="digits", eval_split="test"))
    assert (len(images.train), len(images.heldout)) == (1437, 360)
    assert images.classes == list("0123456789")
    counts = np.bincount(images.heldout["label"][:])
    assert counts.min() >= 34
    pixels = [{image.tobytes() for image in part["image"][:]} for part in (images.train, images.heldout)]
    assert not pixels[0] & pixels[1]
    held = load_images(ImageDataSection(source="digits", heldout_fraction=0.25))
    assert len(held.train) + len(held.heldout) == 1437


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("augment.mixupp=1", r"unknown key augment\.mixupp; .*augment\.mixup"),
        ("augment.scale=[0.5,3.0]", r"augment\.scale must be shares of the image, at most 1, got"),
        ("train.label_smoothing_factor=2", r"train\.label_smoothing_factor must be from 0 to 1, got 2"),
        ("train.data_seed=-1", r"train\.data_seed must be at least 0, got -1"),
        ("augment.scale=[0.5]", r"augment\.scale must be two positive numbers in order, got \[0\.5\]"),
        ("augment.horizontal_flip=2.0", r"augment\.horizontal_flip must be from 0 to 1, got 2\.0"),
        ("augment.mixup=-1.0", r"augment\.mixup must be at least 0"),
        ("augment.repeats=0", r"augment\.repeats must be at least 1"),
        ("ema.decay=1.0", r"ema\.decay must lie between 0 and 1"),
        ("data.source=null", r"data\.source must name the images"),
        ("data.crop_fraction=1.5", r"data\.crop_fraction must be above 0 and at most 1, got 1\.5"),
        ("train.dataloader_drop_last=true", r"train\.dataloader_drop_last must be false"),
        ("train.remove_unused_columns=true", r"train\.remove_unused_columns must be false"),
    ],
)
def test_refusals(tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        configure("digits", tmp_path, override)


def test_mixing_needs_pairs_and_color_jitter_excludes_auto_augment(tmp_path):
    with pytest.raises(ConfigError, match=r"per_device_train_batch_size must be even.*got 3"):
        configure("digits", tmp_path, *ALL_ON, "train.per_device_train_batch_size=3")
    with pytest.raises(ConfigError, match=r"augment\.color_jitter must be 0 where augment\.auto_augment"):
        configure("digits", tmp_path, *ALL_ON, "augment.color_jitter=0.3")


def test_recipes(tmp_path):
    assert recipe_names("image") == ["digits", "imagenet-300", "imagenet-320"]
    overrides = [f"train.output_dir={tmp_path}", "train.use_cpu=true"]
    assert load_image_config("digits", overrides).training_arguments().num_train_epochs <= 20
    for epochs in (300, 320):
        config = load_image_config(f"imagenet-{epochs}", [*overrides, "train.bf16=false"])
        arguments = config.training_arguments()
        assert arguments.num_train_epochs == epochs
        assert arguments.train_batch_size * arguments.gradient_accumulation_steps == 1024
        assert (config.augment.repeats, config.ema) == (3, EmaSection(decay=0.9999))
        assert config.augment.mixes
        make_augmentation(config.augment, 224, 3, make_processor(224, 3, None))


def test_a_data_set_as_the_hub_keeps_it(tmp_path, monkeypatch):
    """Parquet shards and a card with configurations, read by `datasets` as a repository is."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    features = Features({"picture": datasets.Image(), "fine": ClassLabel(names=["cat", "dog"])})
    for split, count in (("train", 4), ("validation", 2)):
        pictures = [Image.fromarray(np.full((6, 5, 3), 40 * n, np.uint8)) for n in range(count)]
        rows = {"picture": pictures, "fine": [n % 2 for n in range(count)]}
        shard = tmp_path / "repository" / "small" / f"{split}-00000-of-00001.parquet"
        shard.parent.mkdir(parents=True, exist_ok=True)
        Dataset.from_dict(rows, features=features).to_parquet(shard)
    card = "---\nconfigs:\n- config_name: small\n  data_files:\n"
    card += "".join(f"  - {{split: {s}, path: small/{s}-*}}\n" for s in ("train", "validation")) + "---\n"
    (tmp_path / "repository" / "README.md").write_text(card)
    section = ImageDataSection(
        source=str(tmp_path / "repository"),
        config="small",
        eval_split="validation",
        image_column="picture",
        label_column="fine",
    )
    images = load_images(section)
    assert images.classes == ["cat", "dog"]
    assert (len(images.train), len(images.heldout)) == (4, 2)
    assert images.train[3]["image"].getpixel((0, 0)) == (120, 120, 120)
    assert images.train["label"][:] == [0, 1, 0, 1]
    with pytest.raises(ConfigError, match=r"data\.image_column must be a column of type Image, got 'image'"):
        load_images(dataclasses.replace(section, image_column="image"))
    with pytest.raises(ConfigError, match="test"):
        load_images(dataclasses.replace(section, eval_split="test"))


@pytest.mark.parametrize(
    ("column", "values", "message"),
    [
        ("label", [0, -1, 1], "1 of 3 images have no class from 0 to 1"),
        ("label", [None, None, 1], "2 of 3 images have no class"),
        ("image", [None, 0, 0], "1 rows have no image"),
    ],
)
def test_rows_without_image_or_class_are_refused(tmp_path, monkeypatch, column, values, message):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    picture = Image.fromarray(np.zeros((6, 5, 3), np.uint8))
    rows = {"image": [picture] * 3, "label": [0, 1, 1]}
    rows[column] = values if column == "label" else [None if v is None else picture for v in values]
    features = Features({"image": datasets.Image(), "label": ClassLabel(names=["cat", "dog"])})
    (tmp_path / "data").mkdir()
    Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "data" / "train.parquet")
    with pytest.raises(ConfigError, match=message):
        load_images(ImageDataSection(source=str(tmp_path / "data")))


def test_grey_of_16_bits_keeps_its_shades():
    shades = np.array([[0, 32768, 65535]], dtype=np.uint16)
    for mode in ("L", "RGB"):
        image = to_mode(Image.fromarray(shades), mode)
        assert image.mode == mode
        assert np.asarray(image).reshape(3, -1)[:, 0].tolist() == [0, 128, 255]
    with pytest.raises(ConfigError, match="8 or 16 bits a channel, got PIL's mode F"):
        to_mode(Image.fromarray(shades.astype(np.float32)), "L")


@pytest.mark.parametrize("broken", [b"no image", None])
def test_a_broken_image_is_named(tmp_path, broken):
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        Image.fromarray(np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(
            tmp_path / name / "1.png"
        )
    path = tmp_path / "b" / "1.png"
    path.write_bytes(path.read_bytes()[:1500] if broken is None else broken)
    images = load_split(str(tmp_path), "train")
    with pytest.raises(ConfigError, match=f"{path} cannot be read: .*(truncated|identify)"):
        read_row(images, 1, "RGB")
