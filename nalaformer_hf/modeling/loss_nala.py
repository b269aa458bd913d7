"""The loss of the next token without all logits at once.

Letters in shapes: B batch, T tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

# Logits at a time: 64 MiB in fp32. Each piece costs a pass over the head's weights and their gradient.
CHUNK_LOGITS = 1 << 24


def chunked_loss(
    head: Callable[[Tensor], Tensor],
    loss_function: Callable[..., Tensor],
    hidden_states: Tensor,
    labels: Tensor,
    *,
    vocab_size: int,
    num_items_in_batch: Tensor | int | None = None,
    ignore_index: int = -100,
    shift_labels: Tensor | None = None,
    **kwargs,
) -> Tensor:
    """What `loss_function` gives for `head(hidden_states)`, piece by piece of the tokens.

    Both passes hold the logits of one piece: the backward makes them again, for a third more of the head's
    products.

    Args:
        head: Hidden states (..., C) to logits.
        loss_function: transformers' loss of a causal language model, or one called like it.
        hidden_states: (B, T, C).
        labels: (B, T), shifted here unless there are `shift_labels`.
        vocab_size: Width of the logits.
        num_items_in_batch: What the sum is divided by; None: the number of predicted tokens.
        ignore_index: The label of a token that is not predicted.
        shift_labels: (B, T), the next token of each.
        **kwargs: Passed on.
    """
    if shift_labels is None:
        shift_labels = F.pad(labels, (0, 1), value=ignore_index)[..., 1:]
    targets = shift_labels.reshape(-1).to(hidden_states.device)
    if num_items_in_batch is None:
        num_items_in_batch = (targets != ignore_index).sum()

    def loss_of(hidden: Tensor, target: Tensor) -> Tensor:
        return loss_function(
            logits=head(hidden),
            labels=None,
            vocab_size=vocab_size,
            num_items_in_batch=num_items_in_batch,
            ignore_index=ignore_index,
            shift_labels=target,
            **kwargs,
        )

    num_rows = max(1, CHUNK_LOGITS // vocab_size)
    pieces = zip(hidden_states.flatten(0, 1).split(num_rows), targets.split(num_rows), strict=True)
    losses = [checkpoint(loss_of, *piece, use_reentrant=False) for piece in pieces]
    return sum(losses[1:], start=losses[0])
