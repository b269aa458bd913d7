"""Score requests by their prefix tree: a model reads each node once, from its parent's state."""

import copy
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from accelerate.utils.memory import clear_device_cache, should_reduce_batch_size
from torch import Tensor
from torch.nn import functional as F
from transformers import Cache

from nalaformer_hf.eval.prefix_tree import Node, Request, plan, without_state
from nalaformer_hf.generation import cache_bytes, cache_tensors

# Rows of a batch differ by no more than this part of the longest, or by a few tokens.
SHORTEST_ROW = 0.7
FEW_TOKENS = 8
# Numbers in the logits of one batch: 1 GiB in fp32.
MAX_LOGITS = 2**28

Answer = tuple[float, bool]


class _Past(NamedTuple):
    """What a batch leaves behind for its nodes' children: the states, and the real tokens behind each row."""

    cache: Cache
    mask: Tensor  # (rows, past)


class _Pending(NamedTuple):
    """Nodes yet to read, in the order of reading from the end, each with its row of the past."""

    nodes: list[tuple[Node, int]]
    past: _Past | None


class _Queries(NamedTuple):
    """What is scored in a batch: for each target its request, and its place in the kept logits."""

    requests: list[int]
    places: list[int]
    targets: list[int]


class TreeScorer:
    """Scores requests: log-likelihood of each continuation, and whether it is the greedy one.

    The states that wait for children are held within `max_state_bytes`, those of the batch in work beside
    them; where they do not fit, a shared prefix is read again for each of its children.

    Args:
        model: A NaLa causal language model.
        batch_size: Rows at once; scores do not depend on it beyond rounding.
        may_shrink: Halve the batch size when memory runs out, instead of raising.
        max_state_bytes: Limit of the held states.
        softmax_dtype: For the softmax; None takes that of the logits.

    Raises:
        ValueError: `batch_size` is below 1.
    """

    def __init__(
        self,
        model: Any,
        *,
        batch_size: int,
        may_shrink: bool = False,
        max_state_bytes: int,
        softmax_dtype: torch.dtype | None = None,
    ) -> None:
        if batch_size < 1:
            raise ValueError(f"batch_size must be at least 1, got {batch_size}")
        self.model = model
        self.batch_size = batch_size
        self.may_shrink = may_shrink
        self.max_state_bytes = max_state_bytes
        self.softmax_dtype = softmax_dtype
        self.grows = "full_attention" in model.config.layer_types
        self.row_bytes = 0  # of the largest state of a row, known after the first that is kept
        self.row_length = 0  # tokens behind it
        self.num_tokens = 0  # read so far, padding included

    @torch.no_grad()
    def score(
        self, requests: Sequence[Request], on_answer: Callable[[int, Answer], object] = lambda *_: None
    ) -> list[Answer]:
        """Score requests.

        Args:
            requests: Contexts and continuations, as tokens.
            on_answer: Gets each request's number and answer as soon as it is known.

        Returns:
            For each request (log-likelihood, whether each target is the likeliest token).

        Raises:
            ValueError: A request has an empty context or continuation.
        """
        totals, greedy = [0.0] * len(requests), [True] * len(requests)
        roots = [(root, 0) for root in plan(requests)]
        stack = [_pending(roots, None)] if roots else []
        while stack:
            nodes, past = stack[-1]
            held = sum(cache_bytes(p.past.cache) for p in stack if p.past)
            batch = self._take(nodes, held, past.mask.shape[1] if past else 0)
            if not nodes:
                stack.pop()
            if not batch:
                continue
            try:
                answers, new_past = self._read(batch, past)
            except RuntimeError as error:
                if not (self.may_shrink and len(batch) > 1 and should_reduce_batch_size(error)):
                    raise
                clear_device_cache(garbage_collection=True)
                self.batch_size = len(batch) // 2
                stack.append(_pending(batch, past))
                continue
            for number, value, hit in answers:
                totals[number] += value
                greedy[number] &= hit
            for number in (number for node, _ in batch for number in node.finished):
                on_answer(number, (totals[number], greedy[number]))
            children = [(child, row) for row, (node, _) in enumerate(batch) for child in node.children]
            if children:
                stack.append(_pending(children, new_past))
        return list(zip(totals, greedy, strict=True))

    def _take(self, nodes: list[tuple[Node, int]], held: int, num_before: int) -> list[tuple[Node, int]]:
        """The next batch: nodes of like length, all with children or all without."""
        first, row = nodes[-1]
        room = self._room(held, num_before + len(first.tokens)) if first.children else 1
        if len(first.children) > 1 and room < 1:
            nodes.pop()
            nodes.extend((child, row) for child in without_state(first))
            nodes.sort(key=_order)
            return []
        most = min(self.batch_size, max(room, 1)) if first.children else self.batch_size
        width = len(first.tokens)
        shortest = min(SHORTEST_ROW * width, width - FEW_TOKENS)
        batch, kept = [], 1
        while nodes and len(batch) < most:
            node = nodes[-1][0]
            kept = max(kept, node.num_scored)
            too_many = (len(batch) + 1) * kept * self.model.config.vocab_size > MAX_LOGITS
            if batch and (
                too_many or len(node.tokens) < shortest or bool(node.children) != bool(first.children)
            ):
                break
            batch.append(nodes.pop())
        return batch

    def _room(self, held: int, length: int) -> int:
        """How many states after `length` tokens fit beside the held ones; one, to measure it, if unknown."""
        if not self.row_bytes:
            return 1
        # Softmax layers keep every token, so that a state grows with what is read.
        growth = max(1.0, length / self.row_length) if self.grows else 1.0
        return int((self.max_state_bytes - held) // (growth * self.row_bytes))

    def _read(
        self, batch: list[tuple[Node, int]], past: _Past | None
    ) -> tuple[list[tuple[int, float, bool]], _Past | None]:
        """One forward pass: (request, log-likelihood, greedy) per scored token, and the states after it."""
        nodes = [node for node, _ in batch]
        ids, mask = _left_padded([node.tokens for node in nodes], self.model.device)
        cache = None
        if past is not None:
            rows = torch.tensor([row for _, row in batch], device=mask.device)
            cache, mask = _select(past.cache, rows), torch.cat((past.mask[rows], mask), dim=1)
        has_children = any(node.children for node in nodes)
        kept = max(1, max(node.num_scored for node in nodes))
        output = self.model(
            input_ids=ids,
            attention_mask=mask,
            cache=cache,
            use_cache=has_children,
            logits_to_keep=kept,
        )
        self.num_tokens += ids.numel()
        new_past = None
        if has_children:
            new_past = _Past(output.cache, mask)
            row_bytes = cache_bytes(output.cache) // len(nodes)
            if row_bytes > self.row_bytes:
                self.row_bytes, self.row_length = row_bytes, mask.shape[1]
        return self._answers(output.logits, _queries(nodes, kept)), new_past

    def _answers(self, logits: Tensor, queries: _Queries) -> list[tuple[int, float, bool]]:
        """(request, log-likelihood, greedy) per scored token, from logits (rows, kept, vocabulary)."""
        if not queries.requests:
            return []
        places = torch.tensor(queries.places, device=logits.device)
        targets = torch.tensor(queries.targets, device=logits.device)
        distinct, which = places.unique(return_inverse=True)
        log_probs = F.log_softmax(logits.flatten(0, 1)[distinct], dim=-1, dtype=self.softmax_dtype)
        values = log_probs[which, targets].tolist()
        hits = (log_probs.argmax(-1)[which] == targets).tolist()
        return list(zip(queries.requests, values, hits, strict=True))


def _order(pending: tuple[Node, int]) -> tuple[bool, int]:
    """From the end: those with children first, each kind from the longest on."""
    node, _ = pending
    return bool(node.children), len(node.tokens)


def _pending(nodes: list[tuple[Node, int]], past: _Past | None) -> _Pending:
    return _Pending(sorted(nodes, key=_order), past)


def _left_padded(rows: list[list[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Token ids and mask, both (rows, longest row)."""
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows], device=device)
    lengths = torch.tensor([len(row) for row in rows], device=device)
    mask = torch.arange(width, device=device) >= width - lengths.unsqueeze(1)
    return ids, mask.long()


def _select(cache: Cache, rows: Tensor) -> Cache:
    """A cache of the given rows, which shares no tensor that a forward pass writes to."""
    # Only what `batch_select_indices` replaces is left uncopied.
    shared = {id(tensor): tensor for tensor in cache_tensors(cache) if tensor.ndim > 0}
    chosen = copy.deepcopy(cache, shared)
    chosen.batch_select_indices(rows)
    return chosen


def _queries(nodes: list[Node], kept: int) -> _Queries:
    """Where in the last `kept` logits of each row something is scored."""
    queries = _Queries([], [], [])
    for row, node in enumerate(nodes):
        for span in node.spans:
            first = row * kept + kept - len(node.tokens) + span.first
            queries.requests.extend([span.request] * len(span.targets))
            queries.places.extend(range(first, first + len(span.targets)))
            queries.targets.extend(span.targets)
    return queries
