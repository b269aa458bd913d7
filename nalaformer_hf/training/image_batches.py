"""Images on their way to the model: varied for training, prepared as published for evaluation."""

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from datasets import Image as ImageColumn
from PIL.Image import Image
from PIL.Image import fromarray as from_array
from timm.data.distributed_sampler import RepeatAugSampler
from timm.data.transforms_factory import create_transform
from torch import Tensor
from torch.utils.data import Dataset as TorchDataset
from torch.utils.data import Sampler
from transformers import BaseImageProcessor, ViTImageProcessor

from nalaformer_hf.modeling.hub_vision_nala import preprocessor
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image_config import AugmentSection

Example = dict[str, Any]
Draw = tuple[int, int]
_MODES = {1: "L", 3: "RGB"}


def make_processor(image_size: int, num_channels: int, crop_fraction: float | None) -> ViTImageProcessor:
    """The published evaluation transform.

    Args:
        image_size: Height and width that it crops to.
        num_channels: Channels of the image.
        crop_fraction: Share of the resized image that the centre crop keeps; None: as published.
    """
    values = preprocessor(SimpleNamespace(image_size=image_size, num_channels=num_channels))
    if crop_fraction is not None:
        values["size"] = {"shortest_edge": round(image_size / crop_fraction)}
    values.pop("image_processor_type")
    return ViTImageProcessor(**values)


def make_augmentation(
    section: AugmentSection, image_size: int, num_channels: int, processor: Any
) -> Callable[[Image], Tensor]:
    """timm's transform for training, to tensors (channels, height, width).

    Args:
        section: The augmentation section.
        image_size: Height and width of the tensors.
        num_channels: Their channels.
        processor: Has `image_mean` and `image_std`.

    Raises:
        ConfigError: `auto_augment` is not one of timm's, or needs colours where the images are grey.
    """
    if section.auto_augment is not None and num_channels != 3:
        raise ConfigError(
            f"augment.auto_augment needs images with 3 channels, the model takes {num_channels}"
        )
    try:
        transform = create_transform(
            (num_channels, image_size, image_size),
            is_training=True,
            scale=(section.scale[0], section.scale[1]),
            ratio=(section.ratio[0], section.ratio[1]),
            hflip=section.horizontal_flip,
            color_jitter=section.color_jitter,
            auto_augment=section.auto_augment,
            interpolation="bicubic",
            mean=tuple(processor.image_mean),
            std=tuple(processor.image_std),
            re_prob=section.random_erasing,
            re_mode="pixel",
        )
    except (AssertionError, KeyError) as error:
        raise ConfigError(
            "augment.auto_augment must be one of timm's, such as rand-m9-mstd0.5-inc1,"
            f" got {section.auto_augment!r}"
        ) from error
    return cast("Callable[[Image], Tensor]", transform)


def check_channels(num_channels: int) -> None:
    """Refuse a model that takes neither grey nor colour images, which are all that PIL reads here."""
    if num_channels not in _MODES:
        raise ConfigError(f"num_channels of the model must be 1 or 3 for PIL images, got {num_channels}")


def to_mode(image: Image, mode: str) -> Image:
    """The image with 8 bits a channel; PIL alone makes 16 bits of grey white.

    Raises:
        ConfigError: Its numbers have no known range.
    """
    if image.mode.startswith("I;16"):
        image = from_array((np.asarray(image).astype(np.uint16) >> 8).astype(np.uint8))
    if image.mode in ("I", "F"):
        raise ConfigError(f"its pixels must have 8 or 16 bits a channel, got PIL's mode {image.mode}")
    return image.convert(mode)


def read_row(images: Dataset, index: int, mode: str) -> tuple[Image, int]:
    """Read an image, in the mode, and its class.

    Args:
        images: Rows with `image` and `label`.
        index: The row.
        mode: PIL's mode, "L" or "RGB".

    Raises:
        ConfigError: The image cannot be read; the error names it.
    """
    try:
        row = images[index]
        return to_mode(row["image"], mode), row["label"]
    except (ConfigError, OSError, SyntaxError) as error:  # PIL raises the last for some broken files
        path = images.cast_column("image", ImageColumn(decode=False))[index]["image"]["path"]
        name = f"row {index}" if path is None else path
        raise ConfigError(f"data.source: {name} cannot be read: {error}") from error


class PreparedImages(TorchDataset):
    """Images as the checkpoint's processor prepares them.

    Args:
        images: Rows with `image` and `label`.
        processor: The image processor.
        num_channels: 1 or 3.
    """

    def __init__(self, images: Dataset, processor: BaseImageProcessor, num_channels: int) -> None:
        self.images, self.processor, self.mode = images, processor, _MODES[num_channels]

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> Example:
        image, label = read_row(self.images, index, self.mode)
        prepared = self.processor(images=image, return_tensors="pt")
        return {"pixel_values": prepared["pixel_values"][0], "labels": label}


class AugmentedImages(TorchDataset):
    """Images varied at random, each draw in its own way.

    The variation follows from the seed and the number of the draw alone, not from the state of any random
    generator: number of worker processes, accumulation and resuming change nothing.

    Args:
        images: Rows with `image` and `label`.
        augmentation: Makes a tensor of an image, with the generators of Python, NumPy and torch.
        num_channels: 1 or 3.
        seed: The seed.
    """

    def __init__(
        self, images: Dataset, augmentation: Callable[[Image], Tensor], num_channels: int, seed: int
    ) -> None:
        self.images, self.augmentation, self.mode = images, augmentation, _MODES[num_channels]
        self.seed = seed

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, draw: Draw) -> Example:
        index, number = draw
        image, label = read_row(self.images, index, self.mode)
        with _seeded(self.seed, number):
            pixel_values = self.augmentation(image)
        return {"pixel_values": pixel_values, "labels": label}


class DrawSampler(Sampler[Draw]):
    """The draws of an epoch in random order: which image, and which draw of the whole training it is.

    An epoch has as many draws as whole steps can be made of the images: BatchNorm and mixup need whole
    batches. With repeats these are draws of a part of the images.

    Args:
        num_images: Number of images.
        repeats: How often in a row each of them is drawn.
        batch_size: Images in a batch over all processes.
        seed: Seed of the order.

    Raises:
        ConfigError: There are fewer images than a batch has.
    """

    def __init__(self, num_images: int, repeats: int, batch_size: int, seed: int) -> None:
        if num_images < batch_size:
            raise ConfigError(
                "train.per_device_train_batch_size over all processes must be at most the number of images,"
                f" {num_images}, got {batch_size}"
            )
        # One sampler for all processes: accelerate deals its batches out, and repeats of an image to several.
        self._order = RepeatAugSampler(
            range(num_images), num_replicas=1, rank=0, num_repeats=repeats, selected_round=batch_size
        )
        self._seed = seed
        self.set_epoch(0)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch."""
        self._epoch = epoch
        self._order.set_epoch((self._seed << 32) + epoch)

    def __len__(self) -> int:
        return len(self._order)

    def __iter__(self) -> Iterator[Draw]:
        for position, index in enumerate(self._order):
            yield index, self._epoch * len(self) + position


def collate(examples: Sequence[Example]) -> dict[str, Tensor]:
    """Stack examples to `pixel_values` (B, channels, height, width) and `labels` (B,)."""
    return {
        "pixel_values": torch.stack([example["pixel_values"] for example in examples]),
        "labels": torch.tensor([example["labels"] for example in examples]),
    }


@contextmanager
def _seeded(*seeds: int) -> Iterator[None]:
    """Seed all three generators while the body runs, and put them back as they were."""
    before = random.getstate(), np.random.get_state(), torch.get_rng_state()
    words = np.random.SeedSequence(seeds).generate_state(3)
    random.seed(int(words[0]))
    np.random.seed(int(words[1]))
    torch.default_generator.manual_seed(int(words[2]))
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])
        torch.set_rng_state(before[2])
