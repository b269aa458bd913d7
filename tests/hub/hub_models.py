"""Models that take no time to make."""

from typing import Any

from nalaformer_hf import NaLaConfig, NaLaVisionConfig


def small_config(**fields: Any) -> NaLaConfig:
    """Two layers of two heads, with weights so large that a wrong state or weight shows."""
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "initializer_range": 0.3}
    defaults = {"mixer": "linear", "pad_token_id": 0, "eos_token_id": None}
    return NaLaConfig(**{**sizes, **heads, **defaults, **fields})


def small_vision_config(**fields: Any) -> NaLaVisionConfig:
    """Two stages of one block, one of each mixer."""
    sizes = {
        "hidden_sizes": [8, 16],
        "depths": [1, 1],
        "num_attention_heads": [2, 2],
        "mlp_ratios": [2.0, 2.5],
    }
    parts = {"mixers": ["linear", "softmax"], "layer_scale_init_values": [1.0, 1.0], "projection_dim": 24}
    return NaLaVisionConfig(**{**sizes, **parts, "num_labels": 5, "initializer_range": 0.3, **fields})
