"""Published vision checkpoints to `NaLaForImageClassification` and back: names, shapes and nothing else."""

from __future__ import annotations

import argparse
import math
import pickle
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from .files import whole_file
from .modeling import NaLaForImageClassification, NaLaVisionConfig
from .modeling.config_base_nala import NaLaBaseConfig
from .modeling.vision_rotary_nala import NaLaVisionRotary

# The published name of one of ours.
_RENAMES = (
    (r"^model\.", ""),
    (r"(blocks\.\d+\.norm[12])\.", r"\1.norm."),
    (r"\.layer_scale([12])$", r".gamma_\1"),
)


def from_published(
    state_dict: Mapping[str, Tensor], config: NaLaBaseConfig | None = None
) -> NaLaForImageClassification:
    """The model of a published vision state dict, in evaluation mode.

    Widths, depths, heads (C / (2 · number of angles)), MLP ratios, LayerScale, projection and classes are
    read from the tensors.

    Args:
        state_dict: With the published names.
        config: A `NaLaVisionConfig` for what the tensors do not tell (mixers, feature maps, class names),
            of the same sizes; None: linear, linear, softmax, softmax, and the published constants.

    Raises:
        ValueError: If a weight is missing, unknown or of another shape, or an angle is not the published one;
            the message lists all of them.
    """
    sizes = _sizes(state_dict)
    if config is None:
        config = _config_of(sizes)
    _check_sizes(config, sizes)
    model = NaLaForImageClassification(config)
    own = to_published(model)
    _check_tensors(state_dict, own)
    for name, target in own.items():
        target.copy_(state_dict[name])
    return model.eval()


def to_published(model: NaLaForImageClassification) -> dict[str, Tensor]:
    """The published state dict of a model; its tensors share the model's memory.

    Raises:
        ValueError: If the model has a part that the published code has not, or lacks one that it has.
    """
    config = model.config
    published_parts = {"stem": "conv", "use_rotary": True, "use_cpe": True, "use_lepe": True}
    for field, wanted in {**published_parts, "use_output_gate": True}.items():
        if getattr(config, field) != wanted:
            raise ValueError(
                f"model: the published code has {field}={wanted!r} only, got {getattr(config, field)!r}."
            )
    if config.projection_dim is None:
        raise ValueError("model: the published code has a projection head, got projection_dim=None.")
    published = {}
    for key, value in model.state_dict().items():
        if key.endswith(("layer_scale1", "layer_scale2")):
            value = value.view(1, -1, 1, 1)
        elif key == "head.weight":
            value = value[..., None, None]
        published[_published_name(key)] = value
    for stage in range(config.num_stages):
        angles = NaLaVisionRotary(config.head_dim(stage)).angles
        published[f"layers.{stage}.RoPE.angle"] = torch.tensor(angles).repeat_interleave(2)
    return published


def read_checkpoint(path: str | Path, weights: str | None = None) -> dict[str, Tensor]:
    """The state dict in a published checkpoint; nothing in the file is executed.

    Args:
        path: A `.safetensors` file, or one that torch wrote: a state dict, or a dict that holds one as
            "model" or "model_ema".
        weights: "model" or "model_ema"; None: "model" where the file has both.

    Raises:
        ValueError: If the file holds no state dict, or not the weights asked for.
    """
    path = Path(path)
    loaded: Any
    try:
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (
        SafetensorError,
        RuntimeError,
        EOFError,
        LookupError,
        ValueError,
        pickle.UnpicklingError,
    ) as error:
        raise ValueError(f"path: {path} holds no weights that can be read safely: {error}") from error
    choices = [name for name in ("model", "model_ema") if isinstance(loaded, Mapping) and name in loaded]
    if weights is not None and weights not in choices:
        found = ", ".join(choices) or "neither model nor model_ema"
        raise ValueError(f"weights: {path} has no {weights!r}; it has {found}.")
    if choices:
        loaded = loaded[weights or choices[0]]
    if not isinstance(loaded, Mapping) or not all(
        isinstance(key, str) and isinstance(value, Tensor) for key, value in loaded.items()
    ):
        raise ValueError(f"path: {path} must hold a state dict, or one under 'model' or 'model_ema'.")
    return dict(loaded)


def import_file(
    source: str | Path, folder: str | Path, weights: str | None = None, mixers: list[str] | None = None
) -> int:
    """Writes the model of a published checkpoint to a folder for `from_pretrained`.

    Args:
        source: The checkpoint, as for `read_checkpoint`.
        folder: Where `save_pretrained` writes.
        weights: "model" or "model_ema", as for `read_checkpoint`.
        mixers: Mixer of each stage; None: linear, linear, softmax, softmax.

    Returns:
        The number of parameters.

    Raises:
        ValueError: As `read_checkpoint` and `from_published`.
    """
    state_dict = read_checkpoint(source, weights)
    model = from_published(state_dict, _config_of(_sizes(state_dict), mixers))
    model.save_pretrained(folder)
    return model.num_parameters()


def export_file(folder: str | Path, destination: str | Path) -> int:
    """Writes a model's weights with the published names, as `.safetensors` or, under "model", as `.pth`.

    Returns:
        The number of parameters.

    Raises:
        ValueError: As `to_published`, or if the destination has another ending.
    """
    destination = Path(destination)
    if destination.suffix not in (".safetensors", ".pth"):
        raise ValueError(f"destination must end in .safetensors or .pth, got {destination.name!r}.")
    if not destination.parent.is_dir():
        raise ValueError(f"destination: the folder {destination.parent} must exist.")
    config = AutoConfig.from_pretrained(folder)
    if config.model_type != "nala_vision":
        raise ValueError(f"folder must hold a model of type 'nala_vision', got {config.model_type!r}.")
    model = NaLaForImageClassification.from_pretrained(folder)
    state_dict = to_published(model)
    with whole_file(destination) as partial:
        if destination.suffix == ".pth":
            torch.save({"model": state_dict}, partial)
        else:
            save_file(state_dict, partial)
    return model.num_parameters()


def _published_name(key: str) -> str:
    for pattern, replacement in _RENAMES:
        key = re.sub(pattern, replacement, key)
    return key


# Dimensions of the weights that tell sizes, where they are not a linear's two.
_TELLING_DIMS = {"patch_embed.proj.0.weight": (4,), "angle": (1,), "head.weight": (2, 4)}


def _sizes(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config fields that the tensors tell."""
    stages = sorted({int(match[1]) for key in state_dict if (match := re.match(r"layers\.(\d+)\.", key))})
    fc1 = [f"layers.{i}.blocks.0.ffn.fc1.weight" for i in stages]
    angles = [f"layers.{i}.RoPE.angle" for i in stages]
    telling = ["patch_embed.proj.0.weight", *fc1, *angles, "proj.weight", "head.weight"]
    missing = [key for key in telling if key not in state_dict]
    if missing or stages != list(range(len(stages))):
        raise ValueError(
            f"state_dict: no published vision checkpoint; it has stages {stages} and lacks "
            f"{', '.join(missing) or 'none of the weights that tell its sizes'}."
        )
    shapes = {key: tuple(state_dict[key].shape) for key in telling}
    for key, shape in shapes.items():
        dims = _TELLING_DIMS.get(key.rpartition(".")[2] if key.endswith("angle") else key, (2,))
        if len(shape) not in dims or 0 in shape:
            raise ValueError(
                f"state_dict: {key} must have {' or '.join(map(str, dims))} dimensions, none of them empty, "
                f"got {shape}."
            )
    widths = [shapes[key][1] for key in fc1]
    return {
        "num_channels": shapes["patch_embed.proj.0.weight"][1],
        "hidden_sizes": widths,
        "depths": [_count_blocks(state_dict, stage) for stage in stages],
        "num_attention_heads": [
            width // max(1, 2 * shapes[key][0]) for width, key in zip(widths, angles, strict=True)
        ],
        "inner_sizes": [shapes[key][0] for key in fc1],
        "has_layer_scale": "layers.0.blocks.0.gamma_1" in state_dict,
        "projection_dim": shapes["proj.weight"][0],
        "num_labels": shapes["head.weight"][0],
    }


def _count_blocks(state_dict: Mapping[str, Tensor], stage: int) -> int:
    pattern = re.compile(rf"layers\.{stage}\.blocks\.(\d+)\.")
    return len({match[1] for key in state_dict if (match := pattern.match(key))})


def _config_of(sizes: dict[str, Any], mixers: list[str] | None = None) -> NaLaBaseConfig:
    """A config of these sizes; where they are those of a preset, with its drop path and LayerScale."""
    fields = {key: value for key, value in sizes.items() if key not in ("inner_sizes", "has_layer_scale")}
    num_stages = len(fields["hidden_sizes"])
    if mixers is not None:
        fields["mixers"] = mixers
    elif num_stages != 4:
        raise ValueError(
            f"config: the tensors do not tell the mixers of {num_stages} stages, so a config is needed."
        )
    pairs = zip(sizes["inner_sizes"], fields["hidden_sizes"], strict=True)
    fields["mlp_ratios"] = [_ratio(inner, width) for inner, width in pairs]
    fields["layer_scale_init_values"] = [1.0] * num_stages
    telling = ("hidden_sizes", "depths", "num_attention_heads", "mlp_ratios")
    for preset in NaLaVisionConfig._presets.values():
        if all(preset[key] == fields[key] for key in telling):
            fields |= {key: preset[key] for key in ("drop_path_rate", "layer_scale_init_values")}
    if not sizes["has_layer_scale"]:
        fields["layer_scale_init_values"] = None
    return NaLaVisionConfig(**fields)


def _ratio(inner: int, width: int) -> float:
    """The MLP ratio whose product with the width, rounded down, is the inner width."""
    ratio = inner / width
    return ratio if int(ratio * width) == inner else math.nextafter(ratio, math.inf)


def _check_sizes(config: Any, sizes: dict[str, Any]) -> None:
    found = {
        **{key: getattr(config, key) for key in sizes if key not in ("inner_sizes", "has_layer_scale")},
        "inner_sizes": [config.inner_size(stage) for stage in range(config.num_stages)],
        "has_layer_scale": config.layer_scale_init_values is not None,
    }
    wrong = [f"{key} {found[key]}, tensors {value}" for key, value in sizes.items() if found[key] != value]
    if wrong:
        raise ValueError(f"config: the checkpoint is of another variant: {'; '.join(wrong)}.")


def _is_rounded(found: Tensor, wanted: Tensor) -> bool:
    """Whether both are the same but for their making and a cast of the whole checkpoint."""
    if not found.is_floating_point():
        return False
    rtol = max(1e-5, 2 * torch.finfo(found.dtype).eps)
    return torch.allclose(found.double(), wanted.to(found.dtype).double(), rtol=rtol, atol=0)


def _check_tensors(state_dict: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
    """Checks names, shapes, and the angles, which a model makes anew."""
    shared = [key for key in own if key in state_dict]
    wrong = [key for key in shared if state_dict[key].shape != own[key].shape]
    turned = [key for key in shared if key.endswith("RoPE.angle") and key not in wrong]
    problems = {
        "missing": [key for key in own if key not in state_dict],
        "unknown": [key for key in state_dict if key not in own],
        "of another shape": [
            f"{key} {tuple(state_dict[key].shape)} (wanted {tuple(own[key].shape)})" for key in wrong
        ],
        "not 10000^-linspace(0, 1, D/4), each twice": [
            key for key in turned if not _is_rounded(state_dict[key], own[key])
        ],
    }
    found = [f"{problem}: {', '.join(keys)}" for problem, keys in problems.items() if keys]
    if found:
        raise ValueError(f"state_dict: not that of a published model; {'; '.join(found)}.")
