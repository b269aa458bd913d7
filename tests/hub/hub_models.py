"""Models that take no time to make."""

from typing import Any

from nalaformer_hf import NaLaConfig


def small_config(**fields: Any) -> NaLaConfig:
    """Two layers of two heads, with weights so large that a wrong state or weight shows."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "initializer_range": 0.3}
    defaults = {"mixer": "linear", "pad_token_id": 0, "eos_token_id": None}
    return NaLaConfig(**{**sizes, **heads, **defaults, **fields})
