"""The packed blocks of a corpus: on disk, or made from a stream while it is read."""

import shutil
from collections.abc import Iterator
from pathlib import Path

from datasets import Dataset, Features, IterableDataset, List, Value, load_from_disk
from torch.utils.data import IterableDataset as TorchIterableDataset
from transformers import PreTrainedTokenizerBase

from nalaformer_hf.training.checkpoints import atomic_folder, is_complete
from nalaformer_hf.training.corpus import Documents
from nalaformer_hf.training.packing import Block, pack_documents
from nalaformer_hf.training.tokenizer import encode_documents


class PackedStream(TorchIterableDataset):
    """Blocks packed from a streamed corpus while it is read.

    Args:
        documents: Rows with `text`.
        tokenizer: The tokenizer.
        block_size: Tokens in a block.
    """

    def __init__(
        self, documents: IterableDataset, tokenizer: PreTrainedTokenizerBase, block_size: int
    ) -> None:
        self.documents = documents
        self.tokenizer = tokenizer
        self.block_size = block_size

    def set_epoch(self, epoch: int) -> None:
        """Reshuffle a shuffled stream."""
        self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[Block]:
        return pack_documents(encode_documents(self.documents, self.tokenizer), self.block_size)


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
                features=Features({"input_ids": List(Value("int32")), "lengths": List(Value("int32"))}),
                cache_dir=str(staging / "cache"),
                fingerprint="blocks",
            )
            blocks.save_to_disk(staging)
            shutil.rmtree(staging / "cache")
    blocks = load_from_disk(str(folder))
    assert isinstance(blocks, Dataset)
    return blocks
