"""Tiny models for the tests of the language model.

Weights are large (std 0.4): at the usual 0.02 logits hardly move when a state is lost or a document leaks.
"""

from typing import Any

import torch
from torch import Tensor

from nalaformer_hf import NaLaConfig, NaLaForCausalLM

VOCAB = 97
NALA_FIRST = ["nala_attention", "full_attention"]
FULL_FIRST = ["full_attention", "nala_attention"]
ROTARY = {"use_rotary": True, "feature_form": "polarity", "norm_scale": "rsqrt_dim"}

LINEAR: dict[str, dict[str, Any]] = {
    "linear": {},
    "linear-no-conv": {"use_short_conv": False, "use_output_gate": False},
    "linear-rotary": {**ROTARY, "value_head_dim": 8},
    "linear-elu": {"feature_form": "elu", "output_norm": "none"},
    "linear-hybrid": {"layer_types": NALA_FIRST, "num_key_value_heads": 1},
    "linear-rotary-hybrid": {**ROTARY, "layer_types": FULL_FIRST, "use_short_conv": False},
}
DELTA: dict[str, dict[str, Any]] = {
    "delta": {"mixer": "delta"},
    "delta-no-conv": {"mixer": "delta", "use_short_conv": False, "use_output_gate": False},
    "gated_delta": {"mixer": "gated_delta", "value_head_dim": 8},
    "gated_delta-no-conv": {"mixer": "gated_delta", "use_short_conv": False, "feature_form": "polarity"},
    "gated_delta-hybrid": {"mixer": "gated_delta", "layer_types": NALA_FIRST},
}
VARIANTS = {**LINEAR, **DELTA}
# One of each mixer, and a hybrid: for tests of what all variants share.
FEW = ["linear", "linear-rotary-hybrid", "delta-no-conv", "gated_delta"]
HYBRIDS = [name for name, fields in VARIANTS.items() if "layer_types" in fields]
ALL_NALA = [name for name in VARIANTS if name not in HYBRIDS]


def tiny_config(name: str = "linear", **fields: Any) -> NaLaConfig:
    base = {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "mixer": "linear",
        "initializer_range": 0.4,
        "bos_token_id": 1,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return NaLaConfig(**{**base, **VARIANTS[name], **fields})


def tiny_model(name: str = "linear", model_class: type = NaLaForCausalLM, **fields: Any) -> Any:
    torch.manual_seed(1)
    return model_class(tiny_config(name, **fields)).eval()


def random_ids(batch: int, length: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(2, VOCAB, (batch, length), generator=generator)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest difference, relative to the largest expected value."""
    return ((actual - expected).abs().max() / expected.abs().max()).item()


def cache_bytes(cache: Any) -> int:
    """Bytes of all tensors that a cache holds."""
    held = 0
    for layer in cache.layers:
        tensors = [
            *getattr(layer, "recurrent_states", {}).values(),
            *getattr(layer, "conv_states", {}).values(),
        ]
        tensors += [getattr(layer, "keys", None), getattr(layer, "values", None)]
        held += sum(x.numel() * x.element_size() for x in tensors if x is not None)
    return held
