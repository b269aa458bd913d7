"""The tokenizer of a run: an existing one, or a byte-level BPE trained on the corpus."""

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import cast

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nalaformer_hf.loading import load_pretrained
from nalaformer_hf.training.checkpoints import atomic_folder, is_complete
from nalaformer_hf.training.config import TokenizerSection
from nalaformer_hf.training.corpus import Documents
from nalaformer_hf.training.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
PADDING = "<|pad|>"


def make_tokenizer(
    section: TokenizerSection, documents: Documents, folder: Path, *, pretrained: str | None = None
) -> PreTrainedTokenizerBase:
    """Load the tokenizer that the section names, or train one and keep it in `folder` for the next time.

    Args:
        section: The tokenizer section.
        documents: Text for the training.
        folder: Where a trained tokenizer is kept.
        pretrained: Model whose tokenizer is taken if the section names none.
    """
    if name := section.name or pretrained:
        return load_pretrained(AutoTokenizer, name, "a tokenizer")
    if not is_complete(folder):
        texts = (row["text"] for row in islice(documents, section.train_documents))
        with atomic_folder(folder) as staging:
            train_tokenizer(texts, section.vocab_size).save_pretrained(staging)
    return AutoTokenizer.from_pretrained(folder)


def train_tokenizer(texts: Iterator[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE, which spells every text and so needs no unknown token.

    Args:
        texts: The texts to learn from.
        vocab_size: Number of tokens, special ones included; fewer result if the texts do not yield so many.
    """
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_TEXT, PADDING],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token=END_OF_TEXT, eos_token=END_OF_TEXT, pad_token=PADDING
    )


def encode_documents(
    documents: Documents, tokenizer: PreTrainedTokenizerBase, batch_size: int = 256
) -> Iterator[list[int]]:
    """Tokenize documents, each between the token that begins and the one that ends a document.

    Args:
        documents: Rows with `text`.
        tokenizer: A tokenizer with a bos or an eos token; one stands for the other where that is missing.
        batch_size: Documents tokenized at once.

    Yields:
        The token ids of each document.

    Raises:
        ConfigError: The tokenizer has neither.
    """
    begin, end = boundary_tokens(tokenizer)
    for batch in documents.iter(batch_size):
        texts = cast("dict[str, list[str]]", batch)["text"]
        encoded = tokenizer(texts, add_special_tokens=False, return_attention_mask=False, verbose=False)
        for ids in encoded["input_ids"]:
            yield [begin, *ids, end]


def boundary_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """Return the ids of the tokens that begin and end a document.

    Raises:
        ConfigError: The tokenizer has neither a bos nor an eos token.
    """
    begin, end = tokenizer.bos_token_id, tokenizer.eos_token_id
    begin, end = (end if begin is None else begin), (begin if end is None else end)
    if not isinstance(begin, int) or not isinstance(end, int):
        raise ConfigError(
            "the tokenizer needs a bos or an eos token to mark where a document begins and ends"
        )
    return begin, end
