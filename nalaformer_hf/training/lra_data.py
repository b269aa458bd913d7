"""The items of Long Range Arena: drawn by rule, or read from the Hub or a folder; a sequence is bytes."""

import csv
import hashlib
import inspect
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict, Features, Image, Value, load_dataset
from datasets.exceptions import DatasetGenerationError
from pyarrow.compute import call_function

from nalaformer_hf.training import listops, lra_items, pathfinder
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_config import LRADataSection

PADDING = 0  # the token of a byte is its value + 1
# Columns of the sequences in each task's items; `image` may have any name.
COLUMNS = {"text": ("text",), "retrieval": ("text1", "text2"), "image": ("image",)}
_TSV_COLUMNS = ["label", "id1", "id2", "text1", "text2"]
_TSV_SPLITS = {"train": "*train*.tsv", "validation": "*eval*.tsv", "test": "*test*.tsv"}


@dataclass(frozen=True)
class LRASplits:
    """The items of a task: a column for each sequence of an item, and `label`; some have no validation."""

    train: Dataset
    validation: Dataset | None
    test: Dataset

    @property
    def sizes(self) -> tuple[int, int, int]:
        """Numbers of items, of the splits train, validation and test."""
        return len(self.train), 0 if self.validation is None else len(self.validation), len(self.test)


def load_splits(data: LRADataSection) -> LRASplits:
    """Load the items of a task.

    No sequence stands twice among generated items. Where a source has no validation split, and the task as
    published has one, the published share of the training items is held out, the same ones each time.

    Args:
        data: The data section.

    Raises:
        ConfigError: A split or column does not exist, there are fewer items than are asked for, or a label is
            none of the task's classes.
    """
    splits = _generate(data) if data.facts.is_generated else _read(data)
    for name, rows in vars(splits).items():
        if rows is not None:
            _check_labels(name, rows, data.facts.num_labels)
    return splits


class SequenceCollator:
    """Batches of items: `input_ids` (B, T), of two documents (B, 2, T), `attention_mask` and `labels` (B,).

    A byte b has the id b + 1; 0 pads the sequences to the longest of the batch.

    Args:
        data: The data section, which says what the sequences are and how long they may be.
    """

    def __init__(self, data: LRADataSection) -> None:
        self._columns = COLUMNS.get(str(data.task), ("sequence",))
        self._length = data.length
        self._side = math.isqrt(data.length)

    def __call__(self, rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        """Collate rows of `load_splits`."""
        sequences = [self._encode(row[column]) for row in rows for column in self._columns]
        ids = np.full((len(sequences), max(1, *map(len, sequences))), PADDING, dtype=np.int64)
        for row, sequence in zip(ids, sequences, strict=True):
            row[: len(sequence)] = np.frombuffer(sequence, dtype=np.uint8) + np.int64(1)
        if len(self._columns) > 1:
            ids = ids.reshape(len(rows), len(self._columns), -1)
        input_ids = torch.from_numpy(ids)
        labels = torch.tensor([int(row["label"]) for row in rows])
        return {"input_ids": input_ids, "attention_mask": input_ids != PADDING, "labels": labels}

    def _encode(self, value: Any) -> bytes:
        """A text in UTF-8, cut; an image's grey pixels, row by row, scaled where it has another size."""
        if isinstance(value, bytes):
            return value
        if isinstance(value, str):
            return value.encode()[: self._length]
        grey, size = value.convert("L"), (self._side, self._side)
        return (grey if grey.size == size else grey.resize(size)).tobytes()


def _generate(data: LRADataSection) -> LRASplits:
    """The first items of the seed are for testing, then validation: the number of others changes none."""
    asked = (data.num_train, data.num_validation, data.num_test)
    sizes = [
        published if size is None else size for size, published in zip(asked, data.facts.sizes, strict=True)
    ]
    bounds = np.cumsum([0, *reversed(sizes)])
    settings: dict[str, Any] = {
        "task": data.task,
        "length": data.length,
        "depth": data.max_depth or listops.MAX_DEPTH,
        "seed": data.seed,
        "code": _digest_of_the_code(),
    }
    try:  # before `datasets` wraps what is wrong
        next(_rows(**settings, count=1))
    except ValueError as error:
        raise ConfigError(f"data.max_length and data.max_depth do not fit: {error}") from error
    made = Dataset.from_generator(
        _rows,
        features=Features({"sequence": Value("binary"), "label": Value("int64")}),
        gen_kwargs=settings | {"count": int(bounds[-1])},
    )
    test, validation, train = (made.select(range(*bounds[i : i + 2])) for i in range(3))
    return LRASplits(train, validation or None, test)


def _rows(task: str, length: int, depth: int, seed: int, count: int, code: str) -> Iterator[dict[str, Any]]:
    """Items as rows; `code` keeps `datasets` from taking what other code made from its cache."""
    draw = {
        "listops": partial(listops.draw_listops, max_length=length, max_depth=depth),
        "pathfinder": pathfinder.draw_pathfinder,
    }
    for item in lra_items.distinct_items(draw[task], seed, count):
        yield item._asdict()


def _digest_of_the_code() -> str:
    sources = "".join(inspect.getsource(module) for module in (listops, lra_items, pathfinder))
    return hashlib.sha256(sources.encode()).hexdigest()


def _read(data: LRADataSection) -> LRASplits:
    source = data.source or data.facts.source
    assert source is not None
    loaded = _load(source)
    if missing := [name for name in ("train", "test") if name not in loaded]:
        raise ConfigError(
            f"data.source {source} has no split {missing[0]}, but {', '.join(map(str, loaded))}"
        )
    splits = {
        name: _select_columns(data, loaded[name])
        for name in ("train", "validation", "test")
        if name in loaded
    }
    share = data.facts.sizes[1] / sum(data.facts.sizes[:2])
    if "validation" not in splits and share:
        parts = splits["train"].train_test_split(share, seed=data.seed)
        splits |= {"train": parts["train"], "validation": parts["test"]}
    if "validation" not in splits and data.num_validation:
        raise ConfigError(f"data.num_validation must be 0 or none: {source} has no validation items")
    taken = {name: _take(data, name, rows) for name, rows in splits.items()}
    return LRASplits(taken["train"], taken.get("validation") or None, taken["test"])


def _load(source: str) -> DatasetDict:
    """A folder of Long Range Arena's own .tsv files, or whatever `datasets` can load."""
    tables = {name: sorted(map(str, Path(source).glob(files))) for name, files in _TSV_SPLITS.items()}
    try:
        if not any(tables.values()):
            loaded = load_dataset(source)
        else:
            loaded = load_dataset(
                "csv",
                data_files={name: files for name, files in tables.items() if files},
                delimiter="\t",
                column_names=_TSV_COLUMNS,
                quoting=csv.QUOTE_NONE,
                keep_default_na=False,
            )
    except (ValueError, DatasetGenerationError) as error:
        raise ConfigError(f"data.source {source}: {error.__cause__ or error}") from error
    assert isinstance(loaded, DatasetDict)
    return loaded


def _select_columns(data: LRADataSection, rows: Dataset) -> Dataset:
    """The columns of the sequences, under their names here, and `label`."""
    columns = COLUMNS[str(data.task)]
    if data.task == "image":
        images = [name for name, kind in rows.features.items() if isinstance(kind, Image)]
        rows = rows.rename_columns({name: "image" for name in images if len(images) == 1 and name != "image"})
    wanted = (*columns, "label")
    if missing := [name for name in wanted if name not in rows.features]:
        raise ConfigError(
            f"data.source: the items of {data.task} must have the columns {', '.join(wanted)}, but"
            f" {', '.join(missing)} is not among {', '.join(rows.features)}"
        )
    is_sequence = _is_image if data.task == "image" else _is_text
    for name in wanted:
        if name != "label" and not is_sequence(kind := rows.features[name]):
            raise ConfigError(f"data.source: the column {name} must hold {data.task} items, got {kind}")
        if missing := _count_missing(rows.data.column(name), _is_text(rows.features[name])):
            raise ConfigError(f"data.source: {missing} rows have nothing in the column {name}")
    return rows.select_columns(list(wanted))


def _count_missing(column: Any, is_text: bool) -> int:
    """How many values are null or an empty text."""
    if not is_text:
        return column.null_count
    lengths = call_function("binary_length", [column]).fill_null(0)
    return int(np.count_nonzero(lengths.to_numpy() == 0))


def _is_image(kind: object) -> bool:
    return isinstance(kind, Image)


def _is_text(kind: object) -> bool:
    return isinstance(kind, Value) and kind.dtype in ("string", "large_string")


def _take(data: LRADataSection, name: str, rows: Dataset) -> Dataset:
    count = getattr(data, f"num_{name}")
    if count is None:
        return rows
    if count > len(rows):
        raise ConfigError(f"data.num_{name} must be at most {len(rows)}, what the source has, got {count}")
    return rows.shuffle(seed=data.seed).select(range(count))


def _check_labels(name: str, rows: Dataset, num_labels: int) -> None:
    labels = np.asarray(rows["label"])
    if not len(labels):
        raise ConfigError(f"data.source: there are no items in the split {name}")
    if not np.isin(labels, np.arange(num_labels)).all():
        raise ConfigError(
            f"data.source: labels must be whole numbers from 0 to {num_labels - 1}, got"
            f" {sorted(set(labels.tolist()))[:20]} in the split {name}"
        )
