"""What the arguments of a model call mean: known keywords, positions, packed sequences.

Letters in shapes: B batch, T tokens, R packed sequences.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.masking_utils import find_packed_sequence_indices
from transformers.utils.generic import TransformersKwargs

from .config_base_nala import nearest

# The library's own, and those of its losses.
KEYWORDS = (*TransformersKwargs.__annotations__, "ignore_index", "shift_labels")


def check_keywords(keywords: dict[str, Any]) -> None:
    """Refuses unknown keywords.

    Raises:
        TypeError: If one is not in `KEYWORDS`.
    """
    for keyword in keywords:
        if keyword not in KEYWORDS:
            raise TypeError(f"unexpected keyword {keyword!r}; {nearest(keyword, KEYWORDS)}")


def check_tokens(input_ids: Tensor | None, inputs_embeds: Tensor | None, hidden_size: int) -> None:
    """Checks that one of `input_ids` (B, T) and `inputs_embeds` (B, T, hidden_size) is given, with tokens.

    Raises:
        ValueError: If not.
    """
    if input_ids is not None and inputs_embeds is None:
        name, tokens, wanted = "input_ids", input_ids, "integers (batch, tokens)"
        fits = tokens.ndim == 2 and not tokens.is_floating_point()
    elif inputs_embeds is not None and input_ids is None:
        name, tokens, wanted = "inputs_embeds", inputs_embeds, f"floats (batch, tokens, {hidden_size})"
        fits = tokens.ndim == 3 and tokens.is_floating_point() and tokens.shape[-1] == hidden_size
    else:
        given = "none" if input_ids is None else "both"
        raise ValueError(f"give either input_ids or inputs_embeds, got {given}.")
    if not fits or tokens.shape[1] == 0:
        raise ValueError(
            f"{name} must be {wanted} with at least one token, got {tokens.dtype} {tuple(tokens.shape)}."
        )


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
        ValueError: If not.
    """
    if position_ids is None:
        return
    fits = position_ids.ndim == 2 and position_ids.shape[0] in (1, batch) and position_ids.shape[1] == length
    if not fits or position_ids.is_floating_point():
        raise ValueError(
            f"position_ids must be integers ({batch} or 1, {length}), got {position_ids.dtype} of shape "
            f"{tuple(position_ids.shape)}."
        )


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
        ValueError: If the bounds do not fit the tokens, or there is a mask or a cache beside them.
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
    if owners.ndim != 2 or owners.shape[0] not in (1, batch) or owners.shape[1] != length:
        raise ValueError(f"seq_idx must be (1 or {batch}, {length}), got shape {tuple(owners.shape)}.")
    owners = owners.expand(batch, length)
    starts = torch.ones_like(owners, dtype=torch.bool)
    starts[:, 1:] = owners[:, 1:] != owners[:, :-1]
    return torch.cat((starts.flatten().nonzero().flatten(), torch.tensor([starts.numel()], device=x.device)))


def check_bounds(name: str, bounds: Tensor, num_tokens: int) -> None:
    """Checks that the bounds of packed sequences are integers (R + 1,) that rise from 0 to `num_tokens`.

    Raises:
        ValueError: If not.
    """
    if bounds.ndim != 1 or bounds.is_floating_point() or len(bounds) < 2:
        raise ValueError(
            f"{name} must be integers (sequences + 1,), got {bounds.dtype} of shape {tuple(bounds.shape)}."
        )
    values = bounds.tolist()
    if values[0] != 0 or values[-1] != num_tokens or values != sorted(values):
        raise ValueError(f"{name} must rise from 0 to the {num_tokens} tokens, got {values}.")
