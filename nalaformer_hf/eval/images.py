"""Score an image classifier: `nalaformer eval image`."""

import json
import logging
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from datasets import Dataset
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from nalaformer_hf.dropins import register_dropins
from nalaformer_hf.files import write_whole
from nalaformer_hf.generation import check_device_and_dtype
from nalaformer_hf.loading import load_pretrained
from nalaformer_hf.training.image_batches import PreparedImages, check_channels, collate
from nalaformer_hf.training.image_data import class_names, load_split
from nalaformer_hf.training.image_trainer import accuracies, score

logger = logging.getLogger(__name__)
register_dropins()


@dataclass(frozen=True)
class ImageScores:
    """What an image classifier scores.

    Args:
        model: Folder or Hub name of the model.
        data: Where the images are from.
        split: Their split.
        num_images: How many there are.
        loss: Mean cross entropy, in nats.
        top1: Share of images whose class is the likeliest one.
        top5: Share of images whose class is among the five likeliest.
    """

    model: str
    data: str
    split: str
    num_images: int
    loss: float
    top1: float
    top5: float

    def write(self, path: Path) -> None:
        """Write the figures to a JSON file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(asdict(self), indent=2) + "\n")


def eval_images(
    model: str,
    data: str,
    *,
    split: str = "test",
    config: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    batch_size: int = 64,
    workers: int = 0,
    device: str = "cpu",
    dtype: str = "auto",
) -> ImageScores:
    """Score a model on images that its own image processor prepares, with a progress bar.

    Where model and images name the same classes in another order, they are matched by name. Where they name
    other ones, the numbers count, and a warning says so.

    Args:
        model: Folder or Hub name.
        data: "digits", a folder with a sub-folder a class, or a data set that `datasets` can load.
        split: Its split.
        config: Configuration of a data set on the Hub.
        image_column: Its column of the images.
        label_column: Its column of the classes.
        batch_size: Images at once; it changes no figure.
        workers: Processes that read and prepare images beside the one that computes.
        device: Device for the model.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's own.

    Raises:
        ValueError: An argument is out of range, or model and images have different numbers of classes.
        ConfigError: The images do not exist, or the model cannot be loaded.
    """
    check_device_and_dtype(device, dtype)
    for name, value, least in (("batch_size", batch_size, 1), ("workers", workers, 0)):
        if value < least:
            raise ValueError(f"{name} must be at least {least}, got {value}")
    columns = {"image_column": image_column, "label_column": label_column}
    images = load_split(data, split, config=config, **columns)
    loaded = load_pretrained(AutoModelForImageClassification, model, "an image classifier", dtype=dtype)
    numbers = match_classes(loaded, images)
    check_channels(loaded.config.num_channels)
    processor = load_pretrained(AutoImageProcessor, model, "an image processor")
    batches = DataLoader(
        cast("Any", PreparedImages(images, processor, loaded.config.num_channels)),
        batch_size=batch_size,
        collate_fn=collate,
        num_workers=workers,
    )
    figures = _score_batches(loaded.to(device).eval(), batches, numbers)
    return ImageScores(model, data, split, len(images), **figures)


def match_classes(model: PreTrainedModel, images: Dataset) -> torch.Tensor:
    """Return the model's number of each class of the images.

    Raises:
        ValueError: The numbers of classes differ.
    """
    names = class_names(images)
    known = {str(name): int(number) for number, name in (model.config.id2label or {}).items()}
    if len(names) != model.config.num_labels:
        raise ValueError(
            f"data must have the {model.config.num_labels} classes of the model, got {len(names)}: "
            f"{', '.join(names[:5])}, ..."
        )
    if set(names) == set(known):
        return torch.tensor([known[name] for name in names])
    logger.warning(
        "Model and images name their classes differently, so class n of one is class n of the other."
    )
    return torch.arange(len(names))


@torch.inference_mode()
def _score_batches(model: Any, batches: DataLoader, numbers: torch.Tensor) -> dict[str, float]:
    parts: list[tuple[np.ndarray, ...]] = []
    for batch in tqdm(batches, desc="images", unit="batch"):
        labels = numbers[batch["labels"]]
        logits = model(pixel_values=batch["pixel_values"].to(model.device, model.dtype)).logits
        nats, top = score(logits.cpu(), labels)
        parts.append((nats.numpy(), top.numpy(), labels.numpy()))
    return accuracies(*(np.concatenate(column) for column in zip(*parts, strict=True)))
