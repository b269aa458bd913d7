"""Items of Long Range Arena's generated tasks: drawn from a seed, each of them once."""

import random
from collections.abc import Callable, Iterator
from typing import NamedTuple


class Item(NamedTuple):
    """A sequence, a byte a token, and its class."""

    sequence: bytes
    label: int


def distinct_items(draw: Callable[[random.Random], Item], seed: int, count: int) -> Iterator[Item]:
    """Yield the first `count` items of a seed whose sequences differ from all before.

    Args:
        draw: Draws an item.
        seed: Seed of its random numbers.
        count: How many to yield; the first ones are the same for any count.
    """
    rng = random.Random(seed)
    seen: set[bytes] = set()
    while len(seen) < count:
        item = draw(rng)
        if item.sequence not in seen:
            seen.add(item.sequence)
            yield item
