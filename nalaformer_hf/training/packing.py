"""Documents packed into blocks of one length, with their boundaries kept."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import torch
from transformers import DataCollatorWithFlattening, PreTrainedConfig

IGNORED = -100
Block = dict[str, list[int]]


def pack_documents(documents: Iterable[Sequence[int]], block_size: int) -> Iterator[Block]:
    """Fill blocks with documents so that every token but the first of a document is predicted exactly once.

    A document that does not fit goes on in the next block, which repeats the last token before the cut as
    context.

    Args:
        documents: Token ids of each document, the token that begins it first.
        block_size: Tokens in a block.

    Yields:
        `input_ids`, at most `block_size` of them, and `lengths` of the pieces that they consist of.
    """
    ids: list[int] = []
    lengths: list[int] = []
    for document in documents:
        context = 0
        while context < len(document) - 1:
            if block_size - len(ids) < 2:
                yield {"input_ids": ids, "lengths": lengths}
                ids, lengths = [], []
            piece = document[context : context + block_size - len(ids)]
            ids.extend(piece)
            lengths.append(len(piece))
            context += len(piece) - 1
    if ids:
        yield {"input_ids": ids, "lengths": lengths}


class PackingCollator:
    """Batches of packed blocks in which nothing leaks between the pieces and no label crosses a boundary.

    The first token of each piece has the label -100, and `position_ids` begin anew there. What is missing to
    a whole block is filled with a piece of padding, whose labels are all -100.

    Args:
        block_size: Tokens in a block.
        pad_token_id: Token of the padding.
        flatten: One row that holds all blocks, with `cu_seq_lens_q` and the like, which some recurrent layers
            and flash attention need; otherwise one row a block, where the mask of softmax attention follows
            from `position_ids`.
    """

    def __init__(self, block_size: int, pad_token_id: int, *, flatten: bool) -> None:
        self.block_size = block_size
        self.pad_token_id = pad_token_id
        self.flatten = DataCollatorWithFlattening(return_flash_attn_kwargs=True) if flatten else None

    def __call__(self, blocks: list[Block]) -> dict[str, Any]:
        """Collate blocks of `pack_documents`."""
        if self.flatten is not None:
            return self.flatten([piece for block in blocks for piece in self._pieces(block)])
        rows = [self._row(block) for block in blocks]
        return {name: torch.from_numpy(np.stack([row[name] for row in rows])) for name in rows[0]}

    def _pieces(self, block: Block) -> Iterator[Block]:
        ends = list(accumulate(block["lengths"], initial=0))
        for begin, end in pairwise(ends):
            ids = block["input_ids"][begin:end]
            yield {"input_ids": ids, "labels": ids}
        if missing := self.block_size - ends[-1]:
            yield {"input_ids": [self.pad_token_id] * missing, "labels": [IGNORED] * missing}

    def _row(self, block: Block) -> dict[str, np.ndarray]:
        used = len(block["input_ids"])
        lengths = np.array([*block["lengths"], self.block_size - used])
        begins = np.cumsum(lengths) - lengths
        ids = np.full(self.block_size, self.pad_token_id, dtype=np.int64)
        labels = np.full(self.block_size, IGNORED, dtype=np.int64)
        ids[:used] = labels[:used] = block["input_ids"]
        labels[begins[:-1]] = IGNORED
        positions = np.arange(self.block_size) - np.repeat(begins, lengths)
        return {"input_ids": ids, "labels": labels, "position_ids": positions}


def needs_flattening(config: PreTrainedConfig) -> bool:
    """Tell whether a model needs the boundaries of packed documents as `cu_seq_lens_q`, in a single row.

    NaLa layers and softmax attention with an explicit mask find them in the `position_ids` of each row; flash
    attention and other recurrent layers do not.
    """
    layer_types = set(getattr(config, "layer_types", None) or ["full_attention"])
    has_mask = config._attn_implementation in {"sdpa", "eager"}
    return not (has_mask and layer_types <= {"nala_attention", "full_attention", "sliding_attention"})
