"""The queries and keys that a trained model's NaLa layers see on a text or on images.

Letters in shapes: B batch, T tokens, H heads, D head dim.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor, nn
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
)

from nalaformer_hf.loading import load_pretrained
from nalaformer_hf.modeling.attention_nala import NaLaAttention
from nalaformer_hf.modeling.feature_maps_nala import FeatureSpec
from nalaformer_hf.modeling.vision_attention_nala import NaLaVisionAttention
from nalaformer_hf.training.errors import ConfigError

# Rows with fewer keys say little about entropy.
MIN_KEYS = 16
# And a correlation needs some rows.
MIN_TOKENS = 2 * MIN_KEYS
# More of them make matrices of all weights that take gigabytes.
MAX_KEYS = 8192


@dataclass(frozen=True)
class LayerQueries:
    """What one layer's attention gets.

    Args:
        layer: Number of the layer in a language model; among the linear layers in a vision model.
        spec: Its feature maps.
        causal: Whether a query sees the keys up to its own only.
        q: Queries (B, T, H, D), before rotary.
        k: Keys, same shape.
    """

    layer: int
    spec: FeatureSpec
    causal: bool
    q: Tensor
    k: Tensor


def read_text_queries(model_dir: str, text: str, num_tokens: int) -> list[LayerQueries]:
    """Run a language model over a text.

    Args:
        model_dir: Folder or Hub name of a NaLa language model.
        text: The text.
        num_tokens: Tokens of it to read.

    Returns:
        For each NaLa layer its queries and keys after the convolution, B = 1.

    Raises:
        ConfigError: The model has no NaLa layers or no tokenizer, or the text is too short.
    """
    if not MIN_TOKENS <= num_tokens <= MAX_KEYS:
        raise ConfigError(f"--tokens must be from {MIN_TOKENS} to {MAX_KEYS}, got {num_tokens}")
    model = load_pretrained(AutoModelForCausalLM, model_dir, "a causal language model").eval()
    tokenizer = load_pretrained(AutoTokenizer, model_dir, "a tokenizer")
    layers = _layers(model, NaLaAttention)
    ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :num_tokens]
    if ids.shape[1] < MIN_TOKENS:
        raise ConfigError(f"--text must have at least {MIN_TOKENS} tokens, got {ids.shape[1]}")
    suffix = "conv1d" if model.config.use_short_conv else "proj"
    modules = [getattr(layer, f"{name}_{suffix}") for layer in layers for name in ("q", "k")]
    with torch.no_grad(), recorded(modules) as outputs:
        model(input_ids=ids, use_cache=False)
    return [
        LayerQueries(layer.layer_idx, layer.spec, model.config.is_causal, *_heads((q, k), layer.num_heads))
        for layer, q, k in zip(layers, outputs[::2], outputs[1::2], strict=True)
    ]


def choose_images(source: str, split: str, count: int) -> Dataset:
    """Choose images of a split at random, always the same ones.

    Args:
        source: "digits", a folder with a sub-folder a class, or a data set that `datasets` can load.
        split: Its split.
        count: How many to take; all, if there are fewer.

    Raises:
        ConfigError: There are no such images, or `count` is not positive.
    """
    from nalaformer_hf.training.image_data import load_split

    if count < 1:
        raise ConfigError(f"--num-images must be at least 1, got {count}")
    images = load_split(source, split).shuffle(seed=0)
    return images.select(range(min(count, len(images))))


def read_image_queries(model_dir: str, images: Dataset) -> list[LayerQueries]:
    """Run an image classifier over images that its own image processor prepares.

    Args:
        model_dir: Folder or Hub name of a NaLa vision model.
        images: Rows with `image` and `label`.

    Returns:
        For each linear layer its queries and keys, B images of T positions.

    Raises:
        ConfigError: The model has no NaLa layers or no image processor, or a layer sees too many positions.
    """
    from nalaformer_hf.training.image_batches import PreparedImages, collate

    model = load_pretrained(AutoModelForImageClassification, model_dir, "an image classifier").eval()
    processor = load_pretrained(AutoImageProcessor, model_dir, "an image processor")
    layers = [layer for layer in _layers(model, NaLaVisionAttention) if layer.mixer == "linear"]
    prepared = PreparedImages(images, processor, model.config.num_channels)
    pixel_values = collate([prepared[i] for i in range(len(prepared))])["pixel_values"]
    if (most := pixel_values[0, 0, ::4, ::4].numel()) > MAX_KEYS:  # the stem's stride is 4
        raise ConfigError(f"--images must have at most {MAX_KEYS} positions after the stem, got {most}")
    with torch.no_grad(), recorded([layer.qkvg for layer in layers]) as outputs:
        model(pixel_values=pixel_values)
    found = []
    for i, (layer, qkvg) in enumerate(zip(layers, outputs, strict=True)):
        q, k = qkvg.flatten(1, 2).chunk(4 if layer.has_gate else 3, dim=-1)[:2]
        found.append(LayerQueries(i, layer.spec, False, *_heads((q, k), layer.num_heads)))
    return found


def _layers(model: Any, kind: type) -> list[Any]:
    layers = [module for module in model.modules() if isinstance(module, kind)]
    if not layers:
        raise ConfigError(f"--model must have NaLa layers, got one of type {model.config.model_type}")
    return layers


@contextmanager
def recorded(modules: Sequence[nn.Module]) -> Iterator[list[Tensor]]:
    """Collect what the modules return inside the block, in the order of the modules."""
    outputs: dict[nn.Module, Tensor] = {}

    def keep(module: nn.Module, _: Any, output: Tensor) -> None:
        outputs[module] = output

    handles = [module.register_forward_hook(keep) for module in modules]
    found: list[Tensor] = []
    try:
        yield found
        found += [outputs[module] for module in modules]
    finally:
        for handle in handles:
            handle.remove()


def _heads(tensors: tuple[Tensor, Tensor], num_heads: int) -> tuple[Tensor, Tensor]:
    """(B, T, H D) to (B, T, H, D)."""
    q, k = (x.unflatten(-1, (num_heads, -1)) for x in tensors)
    return q, k
