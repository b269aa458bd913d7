"""The prefix tree: each target once, after the right tokens, and no prefix more than once."""

import random

import pytest

from nalaformer_hf.eval.prefix_tree import Node, Request, count_tokens, plan, walk, without_state


def random_requests(seed: int, num_tokens: int = 3) -> list[Request]:
    """Few different tokens, so that prefixes are shared at all depths."""
    rng = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return [rng.randrange(num_tokens) for _ in range(length)]

    requests = [Request(tokens(rng.randrange(1, 9)), tokens(rng.randrange(1, 9))) for _ in range(60)]
    return [*requests, requests[0], Request(requests[1].context, requests[1].continuation[:1])]


def scored(roots: list[Node]) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    """For each request, in order, what is scored: (all tokens read up to there, target)."""
    found: dict[int, list[tuple[tuple[int, ...], int]]] = {}
    pending = [(root, ()) for root in roots]
    while pending:
        node, before = pending.pop()
        for span in node.spans:
            for column, target in enumerate(span.targets, span.first):
                read = (*before, *node.tokens[: column + 1])
                found.setdefault(span.request, []).append((read, target))
        pending.extend((child, (*before, *node.tokens)) for child in node.children)
    return {request: sorted(parts, key=lambda part: len(part[0])) for request, parts in found.items()}


def expected(requests: list[Request]) -> dict[int, list[tuple[tuple[int, ...], int]]]:
    return {
        number: [((*context, *continuation[:i]), continuation[i]) for i in range(len(continuation))]
        for number, (context, continuation) in enumerate(requests)
    }


@pytest.mark.parametrize("min_saving", [1, 4, 1000])
@pytest.mark.parametrize("piece", [1, 3, 1000])
@pytest.mark.parametrize("seed", range(4))
def test_each_target_is_scored_once_after_its_own_prefix(seed, piece, min_saving):
    requests = random_requests(seed)
    roots = plan(requests, min_saving=min_saving, piece=piece)
    assert scored(roots) == expected(requests)
    assert all(1 <= len(node.tokens) <= piece for node in walk(roots))
    finished = [number for node in walk(roots) for number in node.finished]
    assert sorted(finished) == list(range(len(requests)))


@pytest.mark.parametrize("seed", range(4))
def test_a_full_tree_reads_each_distinct_prefix_once(seed):
    requests = random_requests(seed)
    prefixes = {tuple(r.tokens[: i + 1]) for r in requests for i in range(len(r.tokens))}
    assert count_tokens(plan(requests, min_saving=1)) == len(prefixes)


def test_without_savings_each_distinct_input_is_read_alone():
    requests = random_requests(0)
    inputs = {tuple(request.tokens) for request in requests}
    alone = {a for a in inputs if not any(a != b and b[: len(a)] == a for b in inputs)}
    roots = plan(requests, min_saving=10_000)
    assert sorted(tuple(root.tokens) for root in roots) == sorted(alone)


@pytest.mark.parametrize("seed", range(4))
def test_a_node_without_state_is_read_by_each_child(seed):
    requests = random_requests(seed)
    roots = plan(requests, min_saving=1)
    number = next(i for i, root in enumerate(roots) if len(root.children) > 1)
    roots[number : number + 1] = without_state(roots[number])
    assert scored(roots) == expected(requests)
    assert sorted(n for node in walk(roots) for n in node.finished) == list(range(len(requests)))


def test_a_prefix_gets_a_node_if_it_saves_enough():
    header, choices = [1] * 10, ([2, 3], [4, 5], [6, 7])
    requests = [Request(header, choice) for choice in choices]
    (root,) = plan(requests, min_saving=20)  # (3 - 1) * 10 tokens
    assert root.tokens == header
    assert len(plan(requests, min_saving=21)) == 3


@pytest.mark.parametrize(
    ("requests", "limits", "message"),
    [
        ([Request([], [1])], {}, "requests: number 0 has an empty context"),
        (
            [Request([1], [2]), Request([1], [])],
            {},
            "requests: number 1 has an empty context or continuation",
        ),
        ([], {"piece": 0}, "piece must be at least 1, got 0"),
        ([], {"min_saving": 0}, "min_saving must be at least 1, got 0"),
    ],
)
def test_bad_input_is_refused(requests, limits, message):
    with pytest.raises(ValueError, match=message):
        plan(requests, **limits)


def test_nothing_to_score():
    assert plan([]) == []
