"""What the checkpoints of the vision models say of themselves, and the preprocessing that they carry."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from transformers.utils.constants import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from .hub_nala import Head, HubFamily

# Up to this size images are resized to size / 0.875 before the crop, above it to the size itself.
CROP_FRACTION, LARGEST_CROPPED = 0.875, 224
BICUBIC = 3  # PIL.Image.Resampling.BICUBIC; Pillow may be missing here


def preprocessor(config: Any) -> dict[str, Any]:
    """The published evaluation transform, as `preprocessor_config.json`.

    Resize the shorter side (bicubic; to 256 for a size of 224, above that to the size itself), centre crop,
    ImageNet mean and standard deviation. Other channel counts than 3 are scaled to [-1, 1].
    """
    size, is_rgb = config.image_size, config.num_channels == 3
    shortest = round(size / CROP_FRACTION) if size <= LARGEST_CROPPED else size
    return {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": is_rgb,
        "do_resize": True,
        "size": {"shortest_edge": shortest},
        "resample": BICUBIC,
        "do_center_crop": True,
        "crop_size": {"height": size, "width": size},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": list(IMAGENET_DEFAULT_MEAN) if is_rgb else [0.5] * config.num_channels,
        "image_std": list(IMAGENET_DEFAULT_STD) if is_rgb else [0.5] * config.num_channels,
    }


def write_preprocessor(config: Any, folder: Path) -> None:
    """Writes `preprocessor_config.json`, unless there is one."""
    file = folder / "preprocessor_config.json"
    if not file.exists():
        file.write_text(json.dumps(preprocessor(config), indent=2) + "\n", encoding="utf-8")


def _summary(model: Any) -> dict[str, Any]:
    """The model in a few lines."""
    config = model.config
    return {
        "parameters": f"{model.num_parameters():,} in {str(model.dtype).removeprefix('torch.')}",
        "stages": f"widths {_list(config.hidden_sizes)}; blocks {_list(config.depths)}; heads "
        f"{_list(config.num_attention_heads)}",
        "mixers": _list(config.mixers),
        "features": config.feature_form,
        "image": f"{config.num_channels} channels, preprocessed to {config.image_size}×{config.image_size}; "
        "any size runs",
    }


def _list(values: list) -> str:
    return ", ".join(str(value) for value in values)


def _limits(config: Any) -> list[str]:
    """What a reader should not expect."""
    limits = [
        "Nothing is claimed but what stands under Training: no other quality, bias or safety was measured."
    ]
    if "softmax" in config.mixers:
        limits.append("Time grows with the square of the number of tokens in softmax stages.")
    return limits


VISION_FAMILY = HubFamily(
    config="configuration_nala_vision.NaLaVisionConfig",
    modeling_module="modeling_nala_vision",
    heads={
        "AutoModel": Head("NaLaVisionModel", "image-feature-extraction"),
        "AutoBackbone": Head("NaLaBackbone", "image-feature-extraction"),
        "AutoModelForImageClassification": Head("NaLaForImageClassification", "image-classification"),
    },
    tags=("nala", "nalaformer", "linear-attention", "vision"),
    summary=_summary,
    limits=_limits,
)
