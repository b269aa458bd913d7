"""The golden files of the published vision code, by name: `golden/README.md` says what they hold."""

import importlib.util
import json
from functools import cache
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor

GOLDEN = Path(__file__).parents[1] / "golden"
_spec = importlib.util.spec_from_file_location("fill_weights", GOLDEN / "fill_weights.py")
fill_weights = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fill_weights)

TINY_SEED = 2025
TINY = {
    "dims": [16, 32, 64, 96],
    "depths": [1, 1, 1, 1],
    "num_heads": [1, 2, 4, 6],
    "mlp_ratios": [3.5] * 4,
    "layer_scales": [1.0] * 4,
    "projection_dim": 64,
    "num_classes": 10,
}
VARIANTS = {
    "XT": {"dims": [32, 64, 128, 384], "depths": [2, 2, 2, 2], "num_heads": [1, 2, 4, 12]},
    "T": {"dims": [64, 128, 256, 512], "depths": [2, 2, 6, 2], "num_heads": [1, 2, 4, 8]},
    "S": {"dims": [64, 128, 320, 512], "depths": [3, 5, 9, 3], "num_heads": [1, 2, 5, 8]},
    "B": {"dims": [96, 192, 384, 512], "depths": [4, 6, 12, 6], "num_heads": [1, 2, 6, 8]},
    "L": {"dims": [96, 192, 448, 640], "depths": [4, 7, 19, 8], "num_heads": [1, 2, 7, 10]},
}
for _name, _ratio in {"XT": 3.5, "T": 4.0, "S": 3.5, "B": 4.0, "L": 3.5}.items():
    VARIANTS[_name] |= {"mlp_ratios": [_ratio] * 4, "layer_scales": [1.0] * 4}
# Variants of the tiny model: changed arguments, seed of the weights.
TINY_VARIANTS = {
    "no_layerscale_seed+1": ({"layer_scales": None}, TINY_SEED + 1),
    "all_l_seed+2": ({"mixers": ("linear",) * 4}, TINY_SEED + 2),
    "all_v_seed+3": ({"mixers": ("softmax",) * 4}, TINY_SEED + 3),
}
TINY_SIZES = ["1x3x224x224", "1x3x192x256", "1x3x225x231", "2x3x32x32", "2x3x64x48", "3x3x33x39"]
TINY_SIZES += ["1x3x5x7", "1x3x1x1"]
# (error of an output, error of a gradient), to the largest value.
GATES = {torch.float32: (5e-6, 2e-5), torch.float64: (1e-12, 1e-12)}


@cache
def tiny_golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden_tiny.safetensors")


def golden_part(prefix: str) -> dict[str, Tensor]:
    """What stands under a prefix, without it."""
    return {key.removeprefix(prefix): value for key, value in tiny_golden().items() if key.startswith(prefix)}


def variant_golden() -> dict[str, Tensor]:
    """The outputs of the five published variants."""
    return load_file(GOLDEN / "golden_xt.safetensors")


@cache
def official_keys() -> dict[str, dict]:
    """Variant: its number of parameters, drop path rates and keys, by the published code."""
    loaded = json.loads((GOLDEN / "official_keys.json").read_text())
    return {name.removeprefix("NALAFORMER_"): entry for name, entry in loaded.items()}


def weight_hashes() -> dict[str, dict[str, str]]:
    """Hashes of some weights, by "variant/seed": the recipe must give the same numbers on this machine."""
    with safe_open(GOLDEN / "golden_xt.safetensors", "pt") as file:
        return json.loads(file.metadata()["weight_sha256_16"])


def published_state(model: torch.nn.Module, seed: int) -> dict[str, Tensor]:
    """The golden weights for a model with the published keys."""
    return fill_weights.fill_state_dict(model.state_dict(), seed)


def golden_input(size: str, seed: int = TINY_SEED) -> Tensor:
    """The image batch of a size like "2x3x64x48"."""
    batch, channels, height, width = (int(number) for number in size.split("x"))
    return fill_weights.make_input(seed, batch, height, width, channels)


def error(actual: Tensor, expected: Tensor) -> float:
    """Largest error to the largest value."""
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    return float((actual.detach().double() - expected.double()).abs().max() / expected.abs().max())
