"""Items from folders and from our generators, and the batches made of them."""

import json
from pathlib import Path

import numpy as np
import pytest
from datasets import ClassLabel, Dataset, Features, Image, Value
from lra_runs import LISTOPS
from PIL import Image as PILImage

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_config import LRADataSection
from nalaformer_hf.training.lra_data import SequenceCollator, load_splits
from nalaformer_hf.training.lra_tasks import LRA_TASKS

TEXTS = [("good", 1), ("schlecht, ü", 0), ("very " * 20, 1), ("dull", 0)]


def write_texts(folder: Path, splits=("train", "test")) -> str:
    folder.mkdir()
    for name in splits:
        rows = [{"text": f"{text} {name}", "label": label, "id": 7} for text, label in TEXTS]
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def write_pairs(folder: Path) -> str:
    folder.mkdir()
    for name in ("train", "eval", "test"):
        rows = [f'{float(i % 2)}\tP{i}\tQ{i}\ta "quoted {name} {i}\tNA' for i in range(4)]
        (folder / f"new_aan_pairs.{name}.tsv").write_text("\n".join(rows) + "\n")
    return str(folder)


def write_images(folder: Path, size: int = 32) -> str:
    folder.mkdir()
    generator = np.random.default_rng(0)
    features = Features({"img": Image(), "label": ClassLabel(num_classes=10), "other": Value("int64")})
    for name, count in (("train", 20), ("test", 5)):
        pixels = [generator.integers(0, 256, (size, size, 3), dtype=np.uint8) for _ in range(count)]
        labels = [i % 10 for i in range(count)]
        columns = {"img": pixels, "label": labels, "other": labels}
        Dataset.from_dict(columns, features=features).to_parquet(folder / f"{name}.parquet")
    return str(folder)


def test_published_sizes():
    """Long Range Arena's own numbers; all its items together."""
    assert {name: (task.max_length, sum(task.sizes)) for name, task in LRA_TASKS.items()} == {
        "listops": (2000, 100_000),
        "text": (4096, 50_000),
        "retrieval": (4000, 182_613),
        "image": (1024, 60_000),
        "pathfinder": (1024, 200_000),
    }


@pytest.mark.parametrize(
    ("task", "numbers"),
    [("listops", LISTOPS), ("pathfinder", {"num_train": 9, "num_validation": 4, "num_test": 5})],
)
def test_generated_splits_share_no_item_and_stay(task, numbers):
    splits = load_splits(LRADataSection(task=task, **numbers))
    assert splits.sizes == (numbers["num_train"], numbers["num_validation"], numbers["num_test"])
    sequences = [row for rows in vars(splits).values() for row in rows["sequence"][:]]
    assert len(set(sequences)) == sum(splits.sizes)
    more = load_splits(LRADataSection(task=task, **(numbers | {"num_train": 50})))
    assert more.test["sequence"][:] == splits.test["sequence"][:]
    assert more.validation["sequence"][:] == splits.validation["sequence"][:]
    assert more.train["sequence"][: splits.sizes[0]] == splits.train["sequence"][:]
    other = load_splits(LRADataSection(task=task, seed=1, **numbers))
    assert not set(other.test["sequence"][:]) & set(sequences)


def test_splits_without_validation_items(tmp_path):
    generated = LRADataSection(task="listops", **(LISTOPS | {"num_validation": 0}))
    read = LRADataSection(task="image", source=write_images(tmp_path / "images"), num_validation=0)
    assert load_splits(generated).validation is load_splits(read).validation is None


def test_texts_are_bytes_and_cut(tmp_path):
    data = LRADataSection(task="text", source=write_texts(tmp_path / "texts"), max_length=16)
    splits = load_splits(data)
    assert splits.sizes == (4, 0, 4)
    batch = SequenceCollator(data)(list(splits.train))
    assert batch["labels"].tolist() == [1, 0, 1, 0]
    assert batch["input_ids"].shape == (4, 16)
    for (text, _), ids, mask in zip(TEXTS, batch["input_ids"], batch["attention_mask"], strict=True):
        wanted = f"{text} train".encode()[:16]
        assert bytes((ids[mask] - 1).tolist()) == wanted
        assert mask.sum() == len(wanted)
        assert (ids[~mask] == 0).all()


def test_an_empty_text_is_padding():
    batch = SequenceCollator(LRADataSection(task="text"))([{"text": "", "label": 0}])
    assert batch["input_ids"].tolist() == [[0]]
    assert batch["attention_mask"].tolist() == [[False]]


def test_pairs_are_read_from_tables(tmp_path):
    data = LRADataSection(task="retrieval", source=write_pairs(tmp_path / "pairs"))
    splits = load_splits(data)
    assert splits.sizes == (4, 4, 4)
    batch = SequenceCollator(data)(list(splits.validation))
    assert batch["labels"].tolist() == [0, 1, 0, 1]
    first, second = batch["input_ids"][3]
    assert bytes((first - 1).tolist()) == b'a "quoted eval 3'
    assert bytes((second[:2] - 1).tolist()) == b"NA"
    assert not batch["attention_mask"][:, 1, 2:].any()


def test_images_are_grey_pixels_row_by_row(tmp_path):
    data = LRADataSection(task="image", source=write_images(tmp_path / "images"))
    splits = load_splits(data)
    assert splits.sizes == (18, 2, 5)  # a tenth held out, as published
    batch = SequenceCollator(data)(list(splits.test))
    red, green, blue = np.moveaxis(np.asarray(splits.test[0]["image"], dtype=float), -1, 0)
    grey = 0.299 * red + 0.587 * green + 0.114 * blue
    assert np.abs(batch["input_ids"][0].numpy() - 1 - grey.ravel()).max() < 1
    assert batch["attention_mask"].all()
    again = load_splits(data)
    assert again.validation["label"][:] == splits.validation["label"][:]


def test_images_of_another_size_are_scaled(tmp_path):
    data = LRADataSection(task="image", source=write_images(tmp_path / "images", size=8), max_length=16)
    row = load_splits(data).test[0]
    scaled = row["image"].convert("L").resize((4, 4), PILImage.Resampling.BICUBIC)
    ids = SequenceCollator(data)([row])["input_ids"][0] - 1
    assert ids.tolist() == list(scaled.tobytes())


def test_a_part_of_a_source_is_chosen_by_the_seed(tmp_path):
    data = LRADataSection(task="text", source=write_texts(tmp_path / "texts"), num_train=3, num_test=2)
    splits = load_splits(data)
    assert splits.sizes == (3, 0, 2)
    assert load_splits(data).train["text"][:] == splits.train["text"][:]
    assert splits.train["text"][:] != [f"{text} train" for text, _ in TEXTS[:3]]


def test_sources_that_do_not_fit_are_refused(tmp_path):
    texts = write_texts(tmp_path / "texts")
    with pytest.raises(ConfigError, match="must be at most 4, what the source has, got 5"):
        load_splits(LRADataSection(task="text", source=texts, num_test=5))
    with pytest.raises(ConfigError, match=r"num_validation must be 0 or none: .* has no validation items"):
        load_splits(LRADataSection(task="text", source=texts, num_validation=2))
    with pytest.raises(
        ConfigError, match="must have the columns text1, text2, label, but text1, text2 is not"
    ):
        load_splits(LRADataSection(task="retrieval", source=texts))
    with pytest.raises(ConfigError, match="has no split test, but train"):
        load_splits(LRADataSection(task="text", source=write_texts(tmp_path / "half", splits=("train",))))
    (tmp_path / "half" / "test.jsonl").write_text('{"text": "x", "label": 2}\n')
    with pytest.raises(ConfigError, match=r"whole numbers from 0 to 1, got \[2\] in the split test"):
        load_splits(LRADataSection(task="text", source=str(tmp_path / "half")))
    with pytest.raises((ConfigError, FileNotFoundError), match="nowhere"):
        load_splits(LRADataSection(task="text", source=str(tmp_path / "nowhere")))


@pytest.mark.parametrize(
    ("last_line", "message"),
    [
        ('{"text": null, "label": 0}', "1 rows have nothing in the column text"),
        ('{"text": "", "label": 0}', "1 rows have nothing in the column text"),
        ('{"text": "x", "label": null}', "1 rows have nothing in the column label"),
        ('{"text": "x", "la', "data.source .*: "),
    ],
)
def test_items_that_are_not_whole_are_refused(tmp_path, last_line, message):
    source = write_texts(tmp_path / "texts")
    with (tmp_path / "texts" / "test.jsonl").open("a") as file:
        file.write(last_line + "\n")
    with pytest.raises(ConfigError, match=message):
        load_splits(LRADataSection(task="text", source=source))


def test_a_pair_that_is_cut_short_is_refused(tmp_path):
    source = write_pairs(tmp_path / "pairs")
    with (tmp_path / "pairs" / "new_aan_pairs.test.tsv").open("a") as file:
        file.write("1.0\tP9\tQ9\thalf a")
    with pytest.raises(ConfigError, match="1 rows have nothing in the column text2"):
        load_splits(LRADataSection(task="retrieval", source=source))


def test_items_of_another_type_are_refused(tmp_path):
    folder = tmp_path / "items"
    folder.mkdir()
    for name in ("train", "test"):
        (folder / f"{name}.jsonl").write_text('{"text": 5, "image": "x", "label": 1}\n' * 4)
    with pytest.raises(ConfigError, match="the column text must hold text items, got Value"):
        load_splits(LRADataSection(task="text", source=str(folder)))
    with pytest.raises(ConfigError, match="the column image must hold image items, got Value"):
        load_splits(LRADataSection(task="image", source=str(folder)))


def test_a_depth_too_small_for_the_length_is_refused(monkeypatch):
    monkeypatch.setattr("nalaformer_hf.training.listops.MAX_TRIALS", 100)
    words = "max_length and data.max_depth do not fit: .* depth of at most 3 hardly ever .* more than 500"
    with pytest.raises(ConfigError, match=words):
        load_splits(LRADataSection(task="listops", max_depth=3))
