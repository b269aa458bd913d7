"""What the arguments of a model call mean: known keywords, positions, packed sequences.

Letters in shapes: B batch, T tokens, C hidden size, R packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.modeling_utils import PreTrainedModel
from transformers.utils.generic import TransformersKwargs

from .chunking_nala import bounds_on_host
from .config_base_nala import nearest

# The library's own, and those of its losses.
KEYWORDS = (*TransformersKwargs.__annotations__, "ignore_index", "shift_labels")
INTEGERS = (torch.int32, torch.int64)


def check_keywords(keywords: dict[str, Any]) -> None:
    """Refuses unknown keywords.

    Raises:
        TypeError: If one is not in `KEYWORDS`.
    """
    for keyword in keywords:
        if keyword not in KEYWORDS:
            raise TypeError(f"unexpected keyword {keyword!r}; {nearest(keyword, KEYWORDS)}")


def check_tensor(name: str, value: Any) -> None:
    """Checks that an argument is a tensor.

    Raises:
        TypeError: If not.
    """
    if not isinstance(value, Tensor):
        raise TypeError(f"{name} must be a tensor, got {type(value).__name__}.")


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, model: PreTrainedModel) -> Tensor:
    """The one that is given of `input_ids` (B, T) and `inputs_embeds` (B, T, C), checked.

    Raises:
        TypeError: If it is no tensor.
        ValueError: If it does not fit the model, or none or both are given.
    """
    if input_ids is not None and inputs_embeds is not None:
        raise ValueError("give either input_ids or inputs_embeds, got both.")
    if inputs_embeds is not None:
        check_hidden("inputs_embeds", inputs_embeds, model.config.hidden_size)
        if inputs_embeds.dtype != model.dtype and not torch.is_autocast_enabled(inputs_embeds.device.type):
            raise ValueError(
                f"inputs_embeds must be {model.dtype} like the model, unless under autocast, got "
                f"{inputs_embeds.dtype}."
            )
        return inputs_embeds
    if input_ids is None:
        raise ValueError("give either input_ids or inputs_embeds, got none.")
    check_tensor("input_ids", input_ids)
    if input_ids.ndim != 2 or input_ids.dtype not in INTEGERS or input_ids.numel() == 0:
        raise ValueError(
            "input_ids must be integers (batch, tokens) with at least one token, got "
            f"{input_ids.dtype} {tuple(input_ids.shape)}."
        )
    return input_ids


def check_hidden(name: str, x: Tensor, width: int) -> None:
    """Checks that x is floats (B, T, width), none empty.

    Raises:
        TypeError: If it is no tensor.
        ValueError: If not.
    """
    check_tensor(name, x)
    if x.ndim != 3 or x.shape[-1] != width or not x.is_floating_point() or x.numel() == 0:
        raise ValueError(
            f"{name} must be floats (batch, tokens, {width}) with at least one token, got {x.dtype} "
            f"{tuple(x.shape)}."
        )


def check_mask(mask: Any, layer_types: list[str]) -> None:
    """Checks that a mask is a tensor, or a tensor or None for each type of layer.

    Raises:
        TypeError: If it is something else.
        ValueError: If a type of layer has none.
    """
    if mask is None:
        return
    masks = mask if isinstance(mask, dict) else {"": mask}
    if isinstance(mask, dict) and not set(layer_types) <= set(mask):
        raise ValueError(
            f"attention_mask must have the keys {', '.join(sorted(set(layer_types)))}, got "
            f"{', '.join(map(str, mask)) or 'none'}."
        )
    for layer_type, value in masks.items():
        if value is not None:
            check_tensor(f"attention_mask[{layer_type!r}]" if layer_type else "attention_mask", value)


def check_cache(cache: Any) -> None:
    """Checks the cache's kind; each layer checks its own part of it.

    Raises:
        TypeError: If it is no `Cache`.
    """
    if cache is not None and not isinstance(cache, Cache):
        raise TypeError(
            "cache must be a transformers Cache, such as DynamicCache(config=model.config), got "
            f"{type(cache).__name__}."
        )


def check_positions(position_ids: Tensor | None, batch: int, length: int) -> None:
    """Checks that positions are integers (B, T) or (1, T).

    Raises:
        TypeError: If they are no tensor.
        ValueError: If they are other ones.
    """
    if position_ids is not None:
        _check_integers("position_ids", position_ids, batch, length)


def _check_integers(name: str, x: Tensor, batch: int, length: int) -> None:
    """One integer a token, for each row or for all."""
    check_tensor(name, x)
    if tuple(x.shape) not in ((1, length), (batch, length)) or x.dtype not in INTEGERS:
        raise ValueError(
            f"{name} must be integers ({batch} or 1, {length}), got {x.dtype} of shape {tuple(x.shape)}."
        )


def check_logits_to_keep(count: Any) -> None:
    """Checks that it is a number of last tokens, 0 for all, or a tensor of indices.

    Raises:
        TypeError: If it is something else.
        ValueError: If it is negative.
    """
    if isinstance(count, bool) or not isinstance(count, (int, Tensor)):
        raise TypeError(
            f"logits_to_keep must be a number or a tensor of indices, got {type(count).__name__}."
        )
    if isinstance(count, int) and count < 0:
        raise ValueError(f"logits_to_keep must be at least 0, got {count}.")


def default_positions(x: Tensor, mask: Any, cache: Cache | None, cu_seqlens: Tensor | None) -> Tensor:
    """Positions, (B, T) or (1, T): in each packed sequence, over real tokens, or after the cache's."""
    batch, length = x.shape[:2]
    if cu_seqlens is not None:
        tokens = torch.arange(batch * length, device=x.device)
        return (tokens - cu_seqlens[sequence_of_token(x, cu_seqlens).flatten()]).view(batch, length)
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return (mask.long().cumsum(1) - 1).clamp_min(0)[:, -length:]
    past = 0 if cache is None else cache.get_seq_length()
    return (torch.arange(length, device=x.device) + past).unsqueeze(0)


def sequence_of_token(x: Tensor, cu_seqlens: Tensor) -> Tensor:
    """Number of the packed sequence that each token of x (B, T, ...) belongs to, (B, T)."""
    tokens = torch.arange(x.shape[0] * x.shape[1], device=x.device)
    return (torch.searchsorted(cu_seqlens, tokens, right=True) - 1).view(x.shape[:2])


def packed_bounds(
    x: Tensor, mask: Any, position_ids: Tensor | None, cache: Cache | None, keywords
) -> Tensor | None:
    """Bounds (R + 1,) of packed sequences in the B·T tokens of x, row after row, or None.

    `cu_seq_lens_q` says it for one row, `seq_idx` for each; without them, and without mask and cache,
    positions that restart do.

    Raises:
        TypeError: If the bounds or numbers are no tensor of integers.
        ValueError: If they do not fit the tokens, or there is a mask or a cache beside them.
    """
    bounds, owners = keywords.get("cu_seq_lens_q"), keywords.get("seq_idx")
    if bounds is None and owners is None:
        if position_ids is None or mask is not None or cache is not None:
            return None
        owners = find_packed_sequence_indices(position_ids)
        if owners is None:
            return None
    if cache is not None:
        raise ValueError("cu_seq_lens_q, seq_idx: packed sequences cannot continue a cache, pass cache=None.")
    if isinstance(mask, dict) or (mask is not None and not bool(mask.all())):
        raise ValueError("attention_mask: packed sequences have no padding, pass None or ones.")
    batch, length = x.shape[:2]
    if bounds is not None:
        if batch != 1:
            raise ValueError(f"cu_seq_lens_q needs one packed row (batch 1), got batch {batch}.")
        check_bounds("cu_seq_lens_q", bounds, length)
        return bounds.to(device=x.device, dtype=torch.long)
    _check_integers("seq_idx", owners, batch, length)
    owners = owners.expand(batch, length)
    starts = torch.ones_like(owners, dtype=torch.bool)
    starts[:, 1:] = owners[:, 1:] != owners[:, :-1]
    return torch.cat((starts.flatten().nonzero().flatten(), torch.tensor([starts.numel()], device=x.device)))


def check_unpacked(
    x: Tensor, mask: Tensor | None, position_ids: Tensor | None, cache: Cache | None, keywords
) -> None:
    """Checks that no row of x (B, T, ...) holds several packed sequences.

    Raises:
        ValueError: If one does.
    """
    check_positions(position_ids, *x.shape[:2])
    if packed_bounds(x, mask, position_ids, cache, keywords) is not None:
        raise ValueError(
            "cu_seq_lens_q, seq_idx, position_ids: one label a row needs one sequence a row, got packed ones."
        )


def check_bounds(name: str, bounds: Tensor, num_tokens: int) -> None:
    """Checks that the bounds of packed sequences are integers (R + 1,) that rise from 0 to `num_tokens`.

    Raises:
        TypeError: If they are no tensor of int32 or int64.
        ValueError: If they are other ones.
    """
    check_tensor(name, bounds)
    if bounds.dtype not in INTEGERS:
        raise TypeError(f"{name} must be int32 or int64, got {bounds.dtype}.")
    if bounds.ndim != 1 or len(bounds) < 2:
        raise ValueError(f"{name} must be (sequences + 1,), at least two, got shape {tuple(bounds.shape)}.")
    values = bounds_on_host(bounds)
    if values[0] != 0 or values[-1] != num_tokens or values != sorted(values):
        raise ValueError(f"{name} must rise from 0 to the {num_tokens} tokens, got {values}.")
