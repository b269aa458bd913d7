"""Sequences that ask what a model remembers: associative recall, needle in a haystack, induction, copy.

All are made by rule, with labels where the answer is asked for and -100 elsewhere. Letters in
shapes: B batch, T tokens.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

IGNORED = -100
MARK, SEPARATOR = 1, 2  # 0 fills
FIRST_LETTER = 3  # of the tokens that carry content, where there are marks
NEEDLE_TOKENS = 3

Batch = tuple[Tensor, Tensor]


def associative_recall(
    batch: int, length: int, vocab_size: int, generator: torch.Generator, num_pairs: int = 4
) -> Batch:
    """Multi-query associative recall (Zoology, arXiv 2312.04927).

    Key-value pairs, then the keys again in another order, each at a random place among fillers. Keys are the
    lower half of the vocabulary, values the upper half, 0 fills. A repeated key's successor is asked for.

    Args:
        batch: B.
        length: T, at least 4 `num_pairs`.
        vocab_size: Number of tokens.
        generator: Source of chance.
        num_pairs: Pairs in a sequence.

    Returns:
        Tokens and labels, both (B, T).
    """
    half = vocab_size // 2
    keys = torch.rand((batch, half - 1), generator=generator).argsort(1)[:, :num_pairs] + 1
    values = torch.randint(half, vocab_size, (batch, num_pairs), generator=generator)
    ids = torch.zeros(batch, length, dtype=torch.long)
    ids[:, 0 : 2 * num_pairs : 2], ids[:, 1 : 2 * num_pairs : 2] = keys, values
    room = (length - 2 * num_pairs) // 2
    slots = torch.rand(batch, room, generator=generator).argsort(1)[:, :num_pairs] * 2 + 2 * num_pairs
    ids.scatter_(1, slots, keys)
    ids.scatter_(1, slots + 1, values)
    labels = torch.full_like(ids, IGNORED).scatter_(1, slots + 1, values)
    return ids, labels


def needle(batch: int, length: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """A needle in a haystack: a mark and three tokens at a random depth of random text, asked for at its end.

    Args:
        batch: B.
        length: T.
        vocab_size: Number of tokens.
        generator: Source of chance.

    Returns:
        Tokens and labels, both (B, T): the mark again, then the three tokens, labelled.
    """
    ids = torch.randint(FIRST_LETTER, vocab_size, (batch, length), generator=generator)
    end = length - NEEDLE_TOKENS
    starts = torch.randint(0, end - 2 - NEEDLE_TOKENS, (batch, 1), generator=generator)
    ids.scatter_(1, starts, MARK)
    needles = ids.gather(1, starts + 1 + torch.arange(NEEDLE_TOKENS))
    ids[:, end - 1], ids[:, end:] = MARK, needles
    return ids, _labels(ids, end)


def induction(batch: int, length: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """Induction: random text ends on a token that stood in it once before; its successor there is asked for.

    Args:
        batch: B.
        length: T.
        vocab_size: Number of tokens.
        generator: Source of chance.

    Returns:
        Tokens and labels, both (B, T): the last token labelled.
    """
    ids = torch.randint(FIRST_LETTER, vocab_size, (batch, length), generator=generator)
    asked = torch.randint(FIRST_LETTER, vocab_size, (batch, 1), generator=generator)
    others = FIRST_LETTER + (ids - FIRST_LETTER + 1) % (vocab_size - FIRST_LETTER)
    ids = torch.where(ids == asked, others, ids)
    starts = torch.randint(0, length - 3, (batch, 1), generator=generator)
    ids.scatter_(1, starts, asked)
    ids[:, -2:] = torch.cat((asked, ids.gather(1, starts + 1)), dim=1)
    return ids, _labels(ids, length - 1)


def copying(batch: int, length: int, vocab_size: int, generator: torch.Generator) -> Batch:
    """Copy: random text, a separator, the text again.

    Args:
        batch: B.
        length: T, odd or even: the text is (T - 1) // 2 long, and a last token fills up.
        vocab_size: Number of tokens.
        generator: Source of chance.

    Returns:
        Tokens and labels, both (B, T): the second text labelled.
    """
    size = (length - 1) // 2
    text = torch.randint(FIRST_LETTER, vocab_size, (batch, size), generator=generator)
    fill = torch.zeros(batch, length - 2 * size - 1, dtype=torch.long)
    ids = torch.cat((text, torch.full((batch, 1), SEPARATOR), text, fill), dim=1)
    labels = _labels(ids, size + 1)
    labels[:, 2 * size + 1 :] = IGNORED
    return ids, labels


def _labels(ids: Tensor, start: int) -> Tensor:
    """The tokens from `start` on."""
    labels = torch.full_like(ids, IGNORED)
    labels[:, start:] = ids[:, start:]
    return labels


@dataclass(frozen=True)
class RecallTask:
    """A rule for sequences, and a size at which small models find it in minutes.

    Args:
        make: The rule: batch, length, vocabulary and source of chance to tokens and labels.
        min_length: The shortest length that it fits in.
        length: The longest one in training.
        vocab_size: Number of tokens.
        num_steps: Optimizer steps.
    """

    make: Callable[[int, int, int, torch.Generator], Batch]
    min_length: int
    length: int
    vocab_size: int
    num_steps: int


RECALL_TASKS = {
    "mqar": RecallTask(associative_recall, 16, length=32, vocab_size=24, num_steps=800),
    "needle": RecallTask(needle, 12, length=32, vocab_size=24, num_steps=400),
    "induction": RecallTask(induction, 8, length=24, vocab_size=12, num_steps=1500),
    "copy": RecallTask(copying, 8, length=24, vocab_size=12, num_steps=1200),
}
