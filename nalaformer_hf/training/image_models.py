"""The model of an image-classification run, and the processor of its images."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoImageProcessor, AutoModelForImageClassification, PreTrainedModel

from nalaformer_hf import NaLaVisionConfig
from nalaformer_hf.dropins import register_dropins
from nalaformer_hf.loading import load_pretrained
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image_batches import check_channels, make_processor
from nalaformer_hf.training.image_config import ImageDataSection
from nalaformer_hf.training.models import build_config
from nalaformer_hf.training.sections import ModelSection

register_dropins()


@dataclass(frozen=True)
class ImageModel:
    """A model, the size and channels of its images, and the processor that evaluation images go through."""

    network: PreTrainedModel
    processor: Any
    image_size: int
    num_channels: int


def make_image_model(section: ModelSection, data: ImageDataSection, classes: Sequence[str]) -> ImageModel:
    """Load the model that the section names, or make one with new weights; its classes are the images'.

    A pretrained model with another number of classes gets a new last layer.

    Args:
        section: The model section; a preset is one of `NaLaVisionConfig`.
        data: Gives the size and the crop, where it sets them.
        classes: Names of the classes.

    Raises:
        ConfigError: Unknown field or architecture, or weights that do not fit.
    """
    values: dict[str, Any] = {
        "id2label": dict(enumerate(classes)),
        "label2id": {name: number for number, name in enumerate(classes)},
    }
    if data.image_size is not None:
        values["image_size"] = data.image_size
    try:
        network = _pretrained(section.pretrained, values) if section.pretrained else _new(section, values)
    except (ValueError, TypeError) as error:
        raise ConfigError(f"model: {error}") from error
    config = network.config
    if not isinstance(getattr(config, "image_size", None), int):
        raise ConfigError(
            f"model: {config.model_type} has no image_size that is one number: set data.image_size"
        )
    check_channels(config.num_channels)
    return ImageModel(network, _processor(section, data, config), config.image_size, config.num_channels)


def _new(section: ModelSection, values: dict[str, Any]) -> PreTrainedModel:
    config = build_config(section, values | section.overrides, NaLaVisionConfig)
    return AutoModelForImageClassification.from_config(config, dtype=torch.float32)


def _pretrained(name: str, values: dict[str, Any]) -> PreTrainedModel:
    options = {"dtype": torch.float32, "ignore_mismatched_sizes": True, "output_loading_info": True}
    network, info = load_pretrained(
        AutoModelForImageClassification, name, "model.pretrained: an image classifier", **options, **values
    )
    num_classes = len(values["id2label"])
    for key, _, wanted in info["mismatched_keys"]:
        if wanted[0] != num_classes:
            raise ConfigError(f"model.pretrained: {key} has another shape than {tuple(wanted)}")
    return network


def _processor(section: ModelSection, data: ImageDataSection, config: Any) -> Any:
    """The pretrained model's own processor where nothing of it is changed, otherwise the published one."""
    made = make_processor(config.image_size, config.num_channels, data.crop_fraction)
    if section.pretrained is None:
        return made
    own = load_pretrained(AutoImageProcessor, section.pretrained, "model.pretrained: an image processor")
    if data.image_size is None and data.crop_fraction is None:
        return own
    made.image_mean, made.image_std = own.image_mean, own.image_std
    return made
