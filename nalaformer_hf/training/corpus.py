"""Text from files, from the Hub or from the standard library, and what of it is held out."""

import hashlib
import sysconfig
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from glob import glob
from itertools import islice
from pathlib import Path
from typing import Any

from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict, load_dataset
from datasets.exceptions import DatasetGenerationError

from nalaformer_hf.training.config import DataSection
from nalaformer_hf.training.errors import ConfigError

Documents = Dataset | IterableDataset

_LOADERS = {".parquet": "parquet", ".jsonl": "json", ".json": "json"}
_LOADERS |= {f"{suffix}.{packed}": "json" for suffix in (".jsonl", ".json") for packed in ("gz", "zst")}
# Parts of the library folder that are not the library's own source, or only there to test it.
_NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "test",
    "tests",
    "idle_test",
    "idlelib",
    "lib2to3",
    "__pycache__",
}


@dataclass(frozen=True)
class Corpus:
    """Documents to train on and documents held out, both with a single column `text`."""

    train: Documents
    heldout: Dataset


def load_corpus(data: DataSection, seed: int) -> Corpus:
    """Load the documents and hold some out.

    Unless a split or files of their own are named for it, the documents whose text has the smallest hashes
    are held
    out: the same ones on every machine, in whatever order they are read, and copies of a text on the same
        side.

    Args:
        data: The data section.
        seed: Seed of the shuffling of a stream.

    Raises:
        ConfigError: Files or a column do not exist, or one of the two parts would be empty.
    """
    documents = _documents(data, data.files, data.split)
    if data.heldout_split is not None or data.heldout_files is not None:
        heldout = _documents(data, data.heldout_files, data.heldout_split or data.split)
    else:
        documents, heldout = _split(documents, data)
    if isinstance(documents, IterableDataset) and data.shuffle_buffer:
        documents = documents.shuffle(seed=seed, buffer_size=data.shuffle_buffer)
    return Corpus(documents, _first(heldout, data.heldout_documents))


def count_bytes(documents: Dataset) -> int:
    """Return the number of UTF-8 bytes of all texts."""
    return sum(len(text.encode()) for text in documents["text"])


def _documents(data: DataSection, files: list[str] | str | None, split: str) -> Documents:
    loaded = _stdlib() if data.corpus == "stdlib" else _load(data, files, split)
    columns = loaded.column_names or list(next(iter(loaded)))
    if data.text_column not in columns:
        raise ConfigError(f"data.text_column must be one of {', '.join(columns)}, got {data.text_column!r}")
    if data.text_column != "text":
        loaded = loaded.remove_columns([name for name in columns if name == "text"])
        loaded = loaded.rename_column(data.text_column, "text")
    loaded = loaded.remove_columns([name for name in columns if name not in {data.text_column, "text"}])
    loaded = loaded.filter(_has_text, batched=True, input_columns=["text"])
    if data.document_chars is not None:
        loaded = loaded.map(
            partial(_cut_batch, limit=data.document_chars), batched=True, input_columns=["text"]
        )
    return loaded


def _load(data: DataSection, files: list[str] | str | None, split: str) -> Documents:
    source: dict[str, Any] = {"path": data.hub, "name": data.hub_config, "split": split}
    if files is not None:
        paths = _expand(files)
        kind = _kind(paths)
        source = {"path": kind, "data_files": paths, "split": "train"}
        if kind == "text":
            source["sample_by"] = "document"
    try:
        loaded = load_dataset(**source, streaming=data.streaming)
    except DatasetGenerationError as error:
        raise ConfigError(f"data: {source['path']} cannot be read as such: {error.__cause__}") from error
    if isinstance(loaded, DatasetDict | IterableDatasetDict):
        raise ConfigError(f"data.split must name one split, got {split!r}")
    return loaded


def _expand(patterns: list[str] | str) -> list[str]:
    patterns = [patterns] if isinstance(patterns, str) else patterns
    found = {pattern: sorted(glob(pattern, recursive=True)) for pattern in patterns}
    for pattern, paths in found.items():
        if not paths:
            raise ConfigError(f"data.files: no file matches {pattern!r}")
    return [path for paths in found.values() for path in paths if Path(path).is_file()]


def _kind(paths: list[str]) -> str:
    """Name the loader of the files; what is neither JSON nor Parquet is text."""
    kinds = {next((kind for end, kind in _LOADERS.items() if path.endswith(end)), "text") for path in paths}
    if len(kinds) != 1:
        raise ConfigError(f"data.files must be of one kind, got {', '.join(sorted(kinds))}")
    return kinds.pop()


def _stdlib() -> Dataset:
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(path for path in root.rglob("*.py") if not _NOT_STDLIB & set(path.relative_to(root).parts))
    texts = []
    for path in paths:
        with tokenize.open(path) as file:
            texts.append(file.read())
    return Dataset.from_dict({"text": texts})


def _has_text(texts: list[str | None]) -> list[bool]:
    return [bool(text and text.strip()) for text in texts]


def _cut_batch(texts: list[str], limit: int) -> dict[str, list[str]]:
    return {"text": [part for text in texts for part in cut_at_lines(text, limit)]}


def cut_at_lines(text: str, limit: int) -> Iterator[str]:
    """Cut a text into parts of at most `limit` characters, at line ends where the lines are short enough."""
    while len(text) > limit:
        end = text.rfind("\n", 0, limit) + 1 or limit
        yield text[:end]
        text = text[end:]
    if text:
        yield text


def _split(documents: Documents, data: DataSection) -> tuple[Documents, Documents]:
    if isinstance(documents, Dataset):
        threshold = _threshold(documents, data.heldout_fraction)
    else:
        threshold = int(data.heldout_fraction * 2**64)
    options: dict[str, Any] = {"batched": True, "input_columns": ["text"]}
    held = partial(_is_heldout, threshold=threshold, wanted=True)
    kept = partial(_is_heldout, threshold=threshold, wanted=False)
    return documents.filter(kept, **options), documents.filter(held, **options)


def _threshold(documents: Dataset, fraction: float) -> int:
    """The hash below which a document is held out: at least one is, and at least one is not."""
    hashes = sorted({_hash(text) for text in documents["text"]})
    if len(hashes) < 2:
        raise ConfigError(
            f"holding text out needs two different documents, got {len(hashes)}: set data.document_chars to"
            " cut the text into several, or name data.heldout_files"
        )
    return hashes[min(max(round(fraction * len(hashes)), 1), len(hashes) - 1)]


def _is_heldout(texts: list[str], threshold: int, wanted: bool) -> list[bool]:
    return [(_hash(text) < threshold) is wanted for text in texts]


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def _first(documents: Documents, limit: int | None) -> Dataset:
    """Read at most `limit` documents into memory or, for a set on disk, select them."""
    if isinstance(documents, IterableDataset):
        documents = Dataset.from_list(list(islice(documents, limit)))
    elif limit is not None:
        documents = documents.select(range(min(limit, len(documents))))
    if not len(documents):
        raise ConfigError(
            "no document is held out: raise data.heldout_fraction, or name a set for evaluation"
        )
    return documents
