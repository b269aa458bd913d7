"""Published vision checkpoints to `NaLaForImageClassification` and back: names, shapes and nothing else."""

from __future__ import annotations

import argparse
import pickle
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from .modeling import NaLaForImageClassification, NaLaVisionConfig
from .modeling.config_base_nala import NaLaBaseConfig
from .modeling.vision_rotary_nala import NaLaVisionRotary

# Ours from the published names, in this order.
_RENAMES = (
    (r"^(patch_embed|layers)\.", r"model.\1."),
    (r"\.(norm[12])\.norm\.", r".\1."),
    (r"\.gamma_([12])$", r".layer_scale\1"),
)
_PUBLISHED_RENAMES = (
    (r"^model\.", ""),
    (r"(blocks\.\d+\.norm[12])\.", r"\1.norm."),
    (r"\.layer_scale([12])$", r".gamma_\1"),
)
_ANGLE = re.compile(r"layers\.(\d+)\.RoPE\.angle")


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
    _check_angles(state_dict, config)
    model = NaLaForImageClassification(config)
    renamed = {_rename(key, _RENAMES): key for key in state_dict if not _ANGLE.fullmatch(key)}
    own = model.state_dict()
    _check_keys(renamed, own)
    model.load_state_dict(
        {key: state_dict[published].reshape(own[key].shape) for key, published in renamed.items()}
    )
    return model.eval()


def to_published(model: NaLaForImageClassification) -> dict[str, Tensor]:
    """The published state dict of a model, in the published order of its parts.

    Raises:
        ValueError: If the model has a part that the published code has not, or lacks one that it has.
    """
    config = model.config
    for field, wanted in {"stem": "conv", "use_rotary": True, "use_cpe": True, "use_lepe": True}.items():
        if getattr(config, field) != wanted:
            raise ValueError(
                f"model: the published code has only {field}={wanted!r}, got {getattr(config, field)!r}."
            )
    if config.projection_dim is None or not config.use_output_gate:
        raise ValueError("model: the published code always has the projection head and the output gate.")
    published = {}
    for key, value in model.state_dict().items():
        name = _rename(key, _PUBLISHED_RENAMES)
        if key.endswith(("layer_scale1", "layer_scale2")):
            value = value.view(1, -1, 1, 1)
        elif key == "head.weight":
            value = value[..., None, None]
        published[name] = value
    for stage in range(config.num_stages):
        published[f"layers.{stage}.RoPE.angle"] = _angles(config.head_dim(stage))
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
    try:
        loaded: Any
        if path.suffix == ".safetensors":
            loaded = load_file(path)
        else:
            with torch.serialization.safe_globals([argparse.Namespace]):
                loaded = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise ValueError(f"path: {path} holds no weights that can be read safely: {error}") from error
    choices = [name for name in ("model", "model_ema") if isinstance(loaded, Mapping) and name in loaded]
    if weights is not None and weights not in choices:
        raise ValueError(
            f"weights: {path} has no {weights!r}; it has {', '.join(choices) or 'a bare state dict'}."
        )
    if choices:
        loaded = loaded[weights or choices[0]]
    if not isinstance(loaded, Mapping) or not all(isinstance(value, Tensor) for value in loaded.values()):
        raise ValueError(f"path: {path} must hold a state dict, or one under 'model' or 'model_ema'.")
    return dict(loaded)


def _rename(key: str, renames: Iterable[tuple[str, str]]) -> str:
    for pattern, replacement in renames:
        key = re.sub(pattern, replacement, key)
    return key


def _sizes(state_dict: Mapping[str, Tensor]) -> dict[str, Any]:
    """The config fields that the tensors tell."""

    def shape(key: str) -> torch.Size:
        if key not in state_dict:
            raise ValueError(f"state_dict: not a published vision checkpoint, {key!r} is missing.")
        return state_dict[key].shape

    stages = sorted({int(match[1]) for key in state_dict if (match := re.match(r"layers\.(\d+)\.", key))})
    if stages != list(range(len(stages))) or not stages:
        raise ValueError(f"state_dict: must have stages 'layers.0.', 'layers.1.', ..., got stages {stages}.")
    widths = [shape(f"layers.{i}.blocks.0.ffn.fc1.weight")[1] for i in stages]
    inner = [shape(f"layers.{i}.blocks.0.ffn.fc1.weight")[0] for i in stages]
    return {
        "num_channels": shape("patch_embed.proj.0.weight")[1],
        "hidden_sizes": widths,
        "depths": [_count(state_dict, rf"layers\.{i}\.blocks\.(\d+)\.") for i in stages],
        "num_attention_heads": [
            width // (2 * shape(f"layers.{i}.RoPE.angle")[0]) for i, width in enumerate(widths)
        ],
        "inner_sizes": inner,
        "has_layer_scale": "layers.0.blocks.0.gamma_1" in state_dict,
        "projection_dim": shape("proj.weight")[0],
        "num_labels": shape("head.weight")[0],
    }


def _count(state_dict: Mapping[str, Tensor], pattern: str) -> int:
    return len({match[1] for key in state_dict if (match := re.match(pattern, key))})


def _config_of(sizes: dict[str, Any]) -> NaLaVisionConfig:
    """A config of these sizes; where they are those of a preset, with its drop path and LayerScale."""
    fields = {key: value for key, value in sizes.items() if key not in ("inner_sizes", "has_layer_scale")}
    num_stages = len(fields["hidden_sizes"])
    if num_stages != 4:
        raise ValueError(
            f"config: the tensors do not tell the mixers of {num_stages} stages, so a config is needed."
        )
    pairs = zip(sizes["inner_sizes"], fields["hidden_sizes"], strict=True)
    fields["mlp_ratios"] = [inner / width for inner, width in pairs]
    fields["layer_scale_init_values"] = [1.0] * num_stages if sizes["has_layer_scale"] else None
    for preset in NaLaVisionConfig._presets.values():
        if all(
            preset[key] == fields[key]
            for key in ("hidden_sizes", "depths", "num_attention_heads", "mlp_ratios")
        ):
            fields["drop_path_rate"] = preset["drop_path_rate"]
            if sizes["has_layer_scale"]:
                fields["layer_scale_init_values"] = preset["layer_scale_init_values"]
    return NaLaVisionConfig(**fields)


def _check_sizes(config: NaLaVisionConfig, sizes: dict[str, Any]) -> None:
    found = {
        **{key: getattr(config, key) for key in sizes if key not in ("inner_sizes", "has_layer_scale")},
        "inner_sizes": [config.inner_size(stage) for stage in range(config.num_stages)],
        "has_layer_scale": config.layer_scale_init_values is not None,
    }
    wrong = [f"{key}: {found[key]} (tensors: {value})" for key, value in sizes.items() if found[key] != value]
    if wrong:
        raise ValueError(f"config: the checkpoint is of another variant; {'; '.join(wrong)}.")


def _angles(head_dim: int) -> Tensor:
    return torch.tensor(NaLaVisionRotary(head_dim).angles).repeat_interleave(2)


def _check_angles(state_dict: Mapping[str, Tensor], config: NaLaVisionConfig) -> None:
    """The tables are made anew, so what is stored must be what we make."""
    for stage in range(config.num_stages):
        key = f"layers.{stage}.RoPE.angle"
        expected = _angles(config.head_dim(stage))
        if not torch.allclose(state_dict[key].float(), expected, rtol=1e-5, atol=0):
            raise ValueError(f"state_dict: {key!r} must be 10000^-linspace(0, 1, D/4), each twice.")


def _check_keys(renamed: Mapping[str, str], own: Mapping[str, Tensor]) -> None:
    missing = sorted(set(own) - set(renamed))
    unknown = sorted(published for key, published in renamed.items() if key not in own)
    problems = []
    if missing:
        problems.append(f"missing: {', '.join(_rename(key, _PUBLISHED_RENAMES) for key in missing)}")
    if unknown:
        problems.append(f"unknown: {', '.join(unknown)}")
    if problems:
        raise ValueError(f"state_dict: not the published names; {'; '.join(problems)}.")
