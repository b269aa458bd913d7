"""ListOps: nested operations on lists of digits, by rule (Nangia and Bowman 2018, arXiv 1804.06028)."""

import random
import statistics
from collections.abc import Callable

from nalaformer_hf.training.lra_items import Item

OPERATORS: dict[str, Callable[[list[int]], int]] = {
    "[MIN": min,
    "[MAX": max,
    "[MED": lambda values: int(statistics.median(values)),  # between two middle ones, rounded down
    "[SM": lambda values: sum(values) % 10,
}
END = "]"
TOKENS = [*"0123456789", *OPERATORS, END]  # a sequence holds their places in this list
MAX_DEPTH = 10
MAX_ARGUMENTS = 10
OPERATOR_SHARE = 0.25
SHORTEST_SHARE = 0.25
MAX_TRIALS = 200_000  # the published sizes need three


class _TooLongError(Exception):
    """The expression being drawn has reached the length that it must stay below."""


def draw_listops(rng: random.Random, max_length: int, max_depth: int = MAX_DEPTH) -> Item:
    """Draw an expression and its value.

    The distribution is that of Long Range Arena's code: four operators, each argument an operation with
    probability 1/4 and a digit otherwise, 2 to 10 arguments, a depth of at most 10, digits included;
    expressions are drawn until one has more than `max_length / 4` (there 500) and fewer than `max_length`
    (2,000) tokens.

    Args:
        rng: Where the random numbers come from.
        max_length: Bound of the length.
        max_depth: Bound of the depth.

    Returns:
        The tokens' places in `TOKENS`, and the value, 0 to 9.

    Raises:
        ValueError: Expressions of that depth hardly ever have that many tokens.
    """
    for _ in range(MAX_TRIALS):
        tokens: list[int] = []
        try:
            value = _operation(rng, max_depth - 1, tokens, max_length)
        except _TooLongError:
            continue
        if SHORTEST_SHARE * max_length < len(tokens):
            return Item(bytes(tokens), value)
    raise ValueError(
        f"expressions of a depth of at most {max_depth} hardly ever have more than"
        f" {SHORTEST_SHARE * max_length:g} and fewer than {max_length} tokens"
    )


def _operation(rng: random.Random, levels: int, tokens: list[int], max_length: int) -> int:
    """Append a random operation, of so many levels at most, to the tokens, and return its value."""
    operator = rng.choice(list(OPERATORS))
    tokens.append(TOKENS.index(operator))
    values = []
    for _ in range(rng.randint(2, MAX_ARGUMENTS)):
        if levels > 1 and rng.random() < OPERATOR_SHARE:
            values.append(_operation(rng, levels - 1, tokens, max_length))
        else:
            values.append(rng.randrange(10))
            tokens.append(values[-1])
        if len(tokens) >= max_length - 1:  # the end is one more
            raise _TooLongError
    tokens.append(TOKENS.index(END))
    return OPERATORS[operator](values)
