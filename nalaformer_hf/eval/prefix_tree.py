"""Which tokens a set of scoring requests needs, each shared prefix once: a compressed prefix tree.

A request asks for the log-likelihood of a continuation after a context. The model reads their tokens but the
last, and what it says at the positions from the context's last one on is scored. Requests that begin alike
share the states along their common prefix.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

# A prefix is worth a state of its own if it saves at least so many tokens.
MIN_SAVING = 16
# Longer stretches are read in pieces, so that memory does not grow with a document's length.
PIECE = 1024


class Request(NamedTuple):
    """Tokens to condition on, at least one, and tokens to score, at least one."""

    context: Sequence[int]
    continuation: Sequence[int]

    @property
    def tokens(self) -> list[int]:
        """What the model reads: all but the last token."""
        return [*self.context, *self.continuation[:-1]]


class Span(NamedTuple):
    """A part of a request that is scored inside one node."""

    request: int
    first: int  # column of the node's tokens that predicts the first target
    targets: Sequence[int]


@dataclass(eq=False)
class Node:
    """A stretch of tokens that the model reads in one piece, after those of its ancestors."""

    tokens: list[int]
    children: list["Node"] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    finished: list[int] = field(default_factory=list)  # requests whose last span is here

    @property
    def num_scored(self) -> int:
        """How many of its last tokens have something scored."""
        return max((len(self.tokens) - span.first for span in self.spans), default=0)


@dataclass(eq=False)
class _Branch:
    """The common prefix of some sequences, the first `end` tokens of `tokens`, while the tree is built."""

    tokens: list[int]
    end: int
    children: list["_Branch"] = field(default_factory=list)
    requests: list[int] = field(default_factory=list)


def plan(
    requests: Sequence[Request],
    *,
    min_saving: int = MIN_SAVING,
    piece: int = PIECE,
) -> list[Node]:
    """Arrange requests as a forest in which shared prefixes stand once.

    Args:
        requests: What to score.
        min_saving: Tokens that a shared prefix must save to get a node of its own.
        piece: Longest stretch that is read at once.

    Returns:
        The roots. A node's spans score positions among its own tokens.

    Raises:
        ValueError: A limit is below 1, or a request has an empty context or continuation.
    """
    for name, value in (("min_saving", min_saving), ("piece", piece)):
        if value < 1:
            raise ValueError(f"{name} must be at least 1, got {value}")
    for number, request in enumerate(requests):
        if not request.context or not request.continuation:
            raise ValueError(f"requests: number {number} has an empty context or continuation")
    inputs = [request.tokens for request in requests]
    order = sorted(range(len(inputs)), key=inputs.__getitem__)
    root = _common_prefixes(inputs, order, min_saving)
    return _cut(root, requests, piece)


def without_state(node: Node) -> list[Node]:
    """Return what stands for the node if its state cannot be held: its children, each reading its tokens."""
    length = len(node.tokens)
    for child in node.children:
        child.tokens = node.tokens + child.tokens
        child.spans = [span._replace(first=span.first + length) for span in child.spans]
    eldest = node.children[0]
    eldest.spans = node.spans + eldest.spans
    eldest.finished = node.finished + eldest.finished
    return node.children


def count_tokens(roots: Sequence[Node]) -> int:
    """Count the tokens that the model reads, without padding."""
    return sum(len(node.tokens) for node in walk(roots))


def walk(roots: Sequence[Node]) -> Iterator[Node]:
    """Yield all nodes, parents first."""
    pending = list(roots)
    while pending:
        node = pending.pop()
        yield node
        pending.extend(node.children)


def _common_prefixes(inputs: Sequence[list[int]], order: Sequence[int], min_saving: int) -> _Branch:
    """The tree of all prefixes that save enough, from sequences in lexicographic order."""
    path = [_Branch([], 0)]
    for number in order:
        tokens = inputs[number]
        shared = _shared_length(path[-1].tokens, tokens)
        while path[-1].end > shared:
            branch = path.pop()
            if path[-1].end < shared:
                path.append(_Branch(branch.tokens, shared))
            _attach(branch, path[-1], min_saving)
        if path[-1].end < len(tokens):
            path.append(_Branch(tokens, len(tokens)))
        path[-1].requests.append(number)
    while len(path) > 1:
        branch = path.pop()
        _attach(branch, path[-1], min_saving)
    return path[0]


def _attach(branch: _Branch, parent: _Branch, min_saving: int) -> None:
    """Hangs a finished branch, or its children if it saves too little, below its parent."""
    saving = (branch.end - parent.end) * (len(branch.children) - 1)
    if branch.children and saving < min_saving:
        branch.children[0].requests.extend(branch.requests)
        parent.children.extend(branch.children)
    else:
        parent.children.append(branch)


def _shared_length(a: Sequence[int], b: Sequence[int]) -> int:
    for length, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return length
    return min(len(a), len(b))


# Nodes from the root on, each with the position of its first token.
_Path = tuple[tuple[int, Node], ...]


def _cut(root: _Branch, requests: Sequence[Request], piece: int) -> list[Node]:
    """The nodes of the branches below the root, of at most `piece` tokens, with the requests' spans."""
    roots: list[Node] = []
    pending: list[tuple[_Branch, int, list[Node], _Path]] = [(root, 0, roots, ())]
    while pending:
        branch, start, siblings, path = pending.pop()
        for begin in range(start, branch.end, piece):
            node = Node(branch.tokens[begin : min(begin + piece, branch.end)])
            siblings.append(node)
            siblings, path = node.children, (*path, (begin, node))
        for number in branch.requests:
            _place(number, requests[number], path)
        pending.extend((child, branch.end, siblings, path) for child in branch.children)
    return roots


def _place(number: int, request: Request, path: _Path) -> None:
    """Adds the spans of a request, which ends somewhere on the path."""
    first, length = len(request.context) - 1, len(request.context) + len(request.continuation) - 1
    places = [(begin, node) for begin, node in path if begin < length]
    for begin, node in places:
        end = min(begin + len(node.tokens), length)
        if end > first:
            column = max(first, begin)
            targets = request.continuation[column - first : end - first]
            node.spans.append(Span(number, column - begin, targets))
    places[-1][1].finished.append(number)
