"""Models of a run: a NaLa preset, or any other causal language model of transformers."""

import copy
from collections.abc import Container
from dataclasses import fields
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from nalaformer_hf import NaLaConfig
from nalaformer_hf.loading import load_pretrained
from nalaformer_hf.modeling.config_base_nala import NaLaBaseConfig
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.sections import ModelSection
from nalaformer_hf.training.settings import check_known
from nalaformer_hf.training.tokenizer import boundary_tokens


def check_model(section: ModelSection, preset_class: type[NaLaBaseConfig], mapping: Container[type]) -> None:
    """Refuse a model section that no data could make a model of: cheap, and so before data are read.

    Args:
        section: The model section.
        preset_class: The configuration whose presets it may name.
        mapping: Configurations of the models that are of the run's kind.

    Raises:
        ConfigError: Unknown field, preset or architecture, a value out of range, no checkpoint, or a model of
            another kind.
    """
    if section.pretrained is not None:
        config = load_pretrained(AutoConfig, section.pretrained, "model.pretrained: a configuration")
    else:
        config = build_config(section, section.overrides, preset_class)
    if type(config) not in mapping:
        raise ConfigError(f"model must be of the run's kind, got the architecture {config.model_type!r}")


def make_model(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PreTrainedModel:
    """Load the model that the section names, or make one with new weights and the tokenizer's vocabulary.

    Args:
        section: The model section.
        tokenizer: Gives `vocab_size`, unless the section overrides it, and the special tokens.

    Raises:
        ConfigError: Unknown field, unknown architecture, or a vocabulary smaller than the tokenizer's.
    """
    if section.pretrained is not None:
        what = "model.pretrained: a causal language model"
        model = load_pretrained(AutoModelForCausalLM, section.pretrained, what, dtype=torch.float32)
    else:
        model = AutoModelForCausalLM.from_config(make_config(section, tokenizer), dtype=torch.float32)
    if (have := model.config.vocab_size) < len(tokenizer):
        raise ConfigError(
            f"the model's vocab_size must be at least the tokenizer's {len(tokenizer)}, got {have}"
        )
    return model


def make_config(section: ModelSection, tokenizer: PreTrainedTokenizerBase) -> PreTrainedConfig:
    """Build the configuration of a model with new weights; see `make_model`."""
    begin, end = boundary_tokens(tokenizer)
    pad = end if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    tokens = {"vocab_size": len(tokenizer), "bos_token_id": begin, "eos_token_id": end, "pad_token_id": pad}
    return build_config(section, tokens | section.overrides, NaLaConfig)


def build_config(
    section: ModelSection, values: dict[str, Any], preset_class: type[NaLaBaseConfig]
) -> PreTrainedConfig:
    """Build the configuration that the section names.

    Args:
        section: The model section.
        values: Fields to set, its overrides among them.
        preset_class: The configuration whose presets it may name.

    Raises:
        ConfigError: Unknown field, preset or architecture, or a value that the configuration refuses.
    """
    try:
        if section.preset is not None:
            check_fields(preset_class, section.overrides)
            return preset_class.from_preset(section.preset, **values)
        given = _config_dict(section.config)
        config_class = CONFIG_MAPPING[given["model_type"]]
        check_fields(config_class, section.overrides)
        return config_class.from_dict(given | values)
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, StrictDataclassError) as error:
        raise ConfigError(f"model: {error}") from error


def match_size(config: PreTrainedConfig, num_parameters: int) -> PreTrainedConfig:
    """Return `config` with the `intermediate_size` that brings it nearest to a number of parameters.

    Args:
        config: A configuration in whose `intermediate_size`, a multiple of 8, the number is linear.
        num_parameters: The number to come near to.

    Raises:
        ConfigError: The rest of the model is larger already.
    """
    sizes = (8, 16)
    first, second = (count_parameters(_with_intermediate_size(config, size)) for size in sizes)
    size = 8 * round((sizes[0] + (num_parameters - first) * 8 / (second - first)) / 8)
    if size < 8:
        raise ConfigError(
            f"a {config.model_type} model of this shape has more than {num_parameters} parameters"
        )
    return _with_intermediate_size(config, size)


def count_parameters(config: PreTrainedConfig) -> int:
    """Return the number of parameters of a causal language model, tied ones counted once."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config).num_parameters()


def _with_intermediate_size(config: PreTrainedConfig, size: int) -> PreTrainedConfig:
    changed = copy.deepcopy(config)
    changed.intermediate_size = size
    return changed


def _config_dict(source: str | dict[str, Any] | None) -> dict[str, Any]:
    """Read the fields of a configuration, or check those that are written out."""
    if isinstance(source, str):
        given, _ = PreTrainedConfig.get_config_dict(source)
    else:
        given = dict(source or {})
    if "model_type" not in given:
        raise ConfigError(f"model.config must have the key model_type, got {', '.join(given) or 'no key'}")
    check_known("model_type ", [given["model_type"]], CONFIG_MAPPING)
    if not isinstance(source, str):
        check_fields(CONFIG_MAPPING[given["model_type"]], given, where="key model.config.")
    return given


def check_fields(config_class: type, given: dict[str, Any], where: str = "key model.overrides.") -> None:
    """Refuse fields that a configuration does not have, each with the nearest one that it has.

    Args:
        config_class: The configuration's class.
        given: Its fields, by name.
        where: What stands before a name in the message.
    """
    known = {field.name for field in fields(config_class)} | set(getattr(config_class, "attribute_map", {}))
    check_known(where, (name for name in given if name != "model_type"), known)
