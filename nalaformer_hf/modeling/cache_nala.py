"""The cache layer of a NaLa layer: one fp32 state a head, the convolution's window, a token counter.

It works inside transformers' own `DynamicCache(config=...)` and `StaticCache`, under the layer type
"nala_attention".
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from transformers.cache_utils import STATIC_LAYER_TYPE_MAPPING, CacheLayerMixin, LinearAttentionLayer
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.utils.import_utils import is_torchdynamo_compiling

LAYER_TYPE = "nala_attention"

# (n, state, window) before a recorded forward pass to (state, window) after its first n tokens.
Replay = Callable[[int, Tensor | None, Tensor | None], tuple[Tensor | None, Tensor | None]]


class _Record(NamedTuple):
    """One forward pass since the last `crop`."""

    num_tokens: int
    replay: Replay


class NaLaCacheLayer(LinearAttentionLayer, CacheLayerMixin):
    """State (B, H, F, V + 1) fp32, window (B, conv_size - 1, channels), number of tokens seen.

    The state of the `linear` mixer is a plain sum, so it can be put back exactly: while `record_past` is on,
    the state before the first forward pass since the last `crop` is kept, and what each pass added since;
    `crop` adds the part that stays anew. A delta-rule state cannot be put back; its layers give no `replay`,
    and `crop` refuses.
    """

    _layer_type = LAYER_TYPE

    def __init__(self, max_cache_len: int | None = None, **kwargs):
        LinearAttentionLayer.__init__(self)
        CacheLayerMixin.__init__(self)
        self.max_cache_len = max_cache_len
        self.cumulative_length = torch.tensor(0, dtype=torch.long)
        self.can_replay = False
        self.base: tuple[Tensor | None, Tensor | None] = (None, None)
        self.records: list[_Record] = []

    @property
    def state(self) -> Tensor | None:
        """The recurrent state, None before the first token."""
        return self.recurrent_states[0] if self.has_previous_state[0] else None

    @property
    def window(self) -> Tensor | None:
        """The last inputs of the convolution, None before the first token or without a convolution."""
        return self.conv_states[0] if self.has_previous_state[0] else None

    def update(self, state: Tensor, window: Tensor | None, num_tokens: int, replay: Replay | None) -> None:
        """Takes the state and window after `num_tokens` more tokens; no `replay`: no rollback is possible."""
        self.can_replay = replay is not None
        if self.record_past and replay is not None:
            if not self.records:
                self.base = (self.state, self.window)
            self.records.append(_Record(num_tokens, replay))
        old_state, old_window = self.recurrent_states[0], self.conv_states[0]
        if old_state is not None and self.may_overwrite(state):
            old_state.copy_(state)
            if old_window is not None and window is not None:
                old_window.copy_(window)
            self.cumulative_length += num_tokens
        else:
            self._assign(state, window, self.cumulative_length + num_tokens)
        self.has_previous_state[0] = True

    def may_overwrite(self, state: Tensor) -> bool:
        """Whether a new state like `state` may stand where the old one is, as a CUDA graph needs it."""
        old = self.recurrent_states[0]
        if old is None or self.record_past or torch.is_grad_enabled():
            return False
        if is_torchdynamo_compiling():
            return True
        writable = torch.is_inference_mode_enabled() or not old.is_inference()
        return writable and not old.requires_grad and old.shape == state.shape

    def _assign(self, state: Tensor, window: Tensor | None, length: Tensor) -> None:
        self.device, self.dtype = state.device, state.dtype
        self.recurrent_states[0], self.conv_states[0] = state, window
        self.cumulative_length = length.to(state.device)
        self.is_recurrent_states_initialized[0] = True
        self.is_conv_states_initialized[0] = window is not None
        self.is_initialized = True
        if not is_torchdynamo_compiling():
            for tensor in (state, window, self.cumulative_length):
                if tensor is not None:
                    torch._dynamo.mark_static_address(tensor)

    def lazy_initialization(self, *args, **kwargs) -> None:
        """Nothing to do ahead: the first `update` brings the tensors."""

    def get_seq_length(self) -> Tensor | int:
        """Tokens seen so far; a tensor, so that a compiled step does not depend on its value."""
        return self.cumulative_length.clone() if self.is_initialized else 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Key length and offset for the mask of the full-attention layers of the same cache."""
        if self.max_cache_len is not None:
            return self.max_cache_len, 0
        return int(self.get_seq_length()) + query_length, 0

    @property
    def is_croppable(self) -> bool:
        """Whether `crop` can go back: known after the first `update`."""
        return self.can_replay

    def crop(self, tokens_to_remove: int) -> None:
        """Goes back by `-tokens_to_remove` tokens, exactly, and forgets the records.

        Raises:
            ValueError: If `tokens_to_remove` is positive, the mixer keeps a delta-rule state, or fewer tokens
                were recorded.
        """
        if tokens_to_remove > 0:
            raise ValueError(f"crop: tokens_to_remove must be 0 or negative, got {tokens_to_remove}.")
        recorded = sum(record.num_tokens for record in self.records)
        if tokens_to_remove and self.is_initialized and not self.can_replay:
            raise ValueError("crop: the state of the delta mixers cannot be rolled back; use mixer='linear'.")
        if -tokens_to_remove > recorded:
            raise ValueError(
                f"crop: asked to remove {-tokens_to_remove} tokens, but {recorded} were recorded since the "
                "last crop; call `activate_past_recording` on the cache before tokens that may have to go."
            )
        if tokens_to_remove:
            self._replay(recorded + tokens_to_remove)
            self.cumulative_length += tokens_to_remove
        self._forget_records()

    def _replay(self, num_tokens: int) -> None:
        """Stands where the first `num_tokens` recorded tokens led."""
        state, window = self.base
        for record in self.records:
            kept = min(num_tokens, record.num_tokens)
            if kept:
                state, window = record.replay(kept, state, window)
            num_tokens -= kept
        if state is None:
            self.has_previous_state[0] = False
        else:
            self._assign(state, window, self.cumulative_length)

    def _forget_records(self) -> None:
        self.base = (None, None)
        self.records = []

    def reset(self) -> None:
        """Forgets all tokens; the tensors stay where they are."""
        super().reset()
        self.cumulative_length.zero_()
        self._forget_records()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Puts the rows of the batch in the order of the beams."""
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Keeps the given rows of the batch."""
        self._map_rows(lambda rows: rows[indices.to(rows.device)])

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row of the batch."""
        self._map_rows(lambda rows: rows.repeat_interleave(repeats, dim=0))

    def _map_rows(self, rearrange: Callable[[Tensor], Tensor]) -> None:
        if self.state is None:
            return
        window = self.window
        self._assign(
            rearrange(self.state), None if window is None else rearrange(window), self.cumulative_length
        )
        self._forget_records()


def create_nala_mask(
    config, inputs_embeds: Tensor, attention_mask: Tensor | None, cache=None, **kwargs
) -> Tensor | None:
    """Which of this call's tokens are real, (B, T), or None if all are.

    Unlike the library's mask for recurrent layers, a call with one token keeps its mask: a padded prefill in
    pieces of one token would otherwise put padding into the state.
    """
    if attention_mask is None:
        return None
    batch, length = inputs_embeds.shape[:2]
    shape = tuple(attention_mask.shape)
    has_past = cache is not None and any(getattr(layer, "state", None) is not None for layer in cache.layers)
    if len(shape) != 2 or shape[0] not in (1, batch) or shape[1] < length + has_past:
        raise ValueError(
            f"attention_mask must be (batch, past + new tokens), here ({batch}, past + {length}), for NaLa "
            f"layers, got shape {shape}."
        )
    # Looking at values makes an accelerator wait: worth it for a prefill, not for a decode step.
    may_look = not is_torchdynamo_compiling() and (length > 1 or attention_mask.device.type == "cpu")
    past = int(cache.get_seq_length()) if may_look and cache is not None else 0
    if may_look and shape[1] != past + length:
        raise ValueError(
            f"attention_mask must cover the {past} past and {length} new tokens, got {shape[1]} columns."
        )
    mask = attention_mask[:, -length:].expand(batch, -1)
    if may_look and bool(mask.all()):
        return None
    return mask.contiguous()


STATIC_LAYER_TYPE_MAPPING[LAYER_TYPE] = NaLaCacheLayer
LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[LAYER_TYPE] = create_nala_mask
