"""The packed blocks of a corpus: on disk, or made from a stream while it is read."""

import shutil
from collections.abc import Iterator
from itertools import chain, count
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, List, Value, concatenate_datasets, load_from_disk
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerBase

from nalaformer_hf.training.checkpoints import atomic_folder, is_complete
from nalaformer_hf.training.corpus import Documents
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.packing import Block, pack_documents
from nalaformer_hf.training.tokenizer import encode_documents

FEATURES = Features({"input_ids": List(Value("int32")), "lengths": List(Value("int32"))})


class PackedStream(TorchIterableDataset):
    """Blocks packed from a streamed corpus while it is read, again and again without end.

    The epochs are begun here, so that a resumed run, which skips what was read before, finds its place in a
    later one too.

    Args:
        documents: Rows with `text`; a shuffled stream is shuffled anew each time.
        tokenizer: The tokenizer.
        block_size: Tokens in a block.
    """

    def __init__(
        self, documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.block_size = block_size

    def __iter__(self) -> Iterator[Block]:
        for epoch in count():
            self.documents.set_epoch(epoch)
            blocks = pack_documents(encode_documents(self.documents, self.tokenizer), self.block_size)
            first = next(blocks, None)
            if first is None:
                raise ConfigError("the corpus has no document to train on")
            yield from chain([first], blocks)


def pack_corpus(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, block_size: int, folder: Path
) -> Dataset | PackedStream:
    """Pack a corpus into blocks, on disk in `folder` unless it is a stream.

    Args:
        documents: Rows with `text`.
        tokenizer: The tokenizer.
        block_size: Tokens in a block.
        folder: Where the blocks are kept; those that are there already are taken.
    """
    if isinstance(documents, IterableDataset):
        return PackedStream(documents, tokenizer, block_size)
    if not is_complete(folder):
        with atomic_folder(folder) as staging:
            blocks = Dataset.from_generator(
                lambda: pack_documents(encode_documents(documents, tokenizer), block_size),
                features=FEATURES,
                cache_dir=str(staging / "cache"),
                fingerprint="blocks",
            )
            blocks.save_to_disk(staging)
            shutil.rmtree(staging / "cache")
    blocks = load_from_disk(str(folder))
    assert isinstance(blocks, Dataset)
    return blocks


def pack_in_memory(documents: Dataset, tokenizer: PreTrainedTokenizerBase, block_size: int) -> Dataset:
    """Pack a small corpus, such as the held-out one, into blocks."""
    blocks = pack_documents(encode_documents(documents, tokenizer), block_size)
    return Dataset.from_list(list(blocks), features=FEATURES)


def pad_blocks(blocks: Dataset, multiple: int) -> Dataset:
    """Add blocks without a predicted token up to a multiple.

    A whole number of batches then holds each block exactly once, over however many processes.

    Args:
        blocks: The blocks.
        multiple: Number of blocks in a batch over all processes.
    """
    empty = [{"input_ids": [], "lengths": []}] * (-len(blocks) % multiple)
    return concatenate_datasets([blocks, Dataset.from_list(empty, features=FEATURES)]) if empty else blocks
