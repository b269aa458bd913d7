"""Images and their classes, from scikit-learn, from a folder or through `datasets`."""

from dataclasses import dataclass

import numpy as np
from datasets import ClassLabel, Dataset, Features, Image, load_dataset

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.image_config import ImageDataSection

DIGITS = "digits"
DIGITS_TEST_SHARE = 0.2


@dataclass(frozen=True)
class Images:
    """Images to train on and images held out, both with the columns `image` and `label`."""

    train: Dataset
    heldout: Dataset

    @property
    def classes(self) -> list[str]:
        """Names of the classes, in the order of their numbers."""
        return class_names(self.train)


def load_images(data: ImageDataSection) -> Images:
    """Load the images, and hold some of each class out unless a split is named for the evaluation.

    Args:
        data: The data section.

    Raises:
        ConfigError: A split or column does not exist, the label column has no named classes, a part would be
            empty, or the splits have different classes.
    """
    train = _load(data, data.split)
    if data.eval_split is None:
        parts = _split(train, data.heldout_fraction)
        return Images(parts["train"], parts["test"])
    heldout = _load(data, data.eval_split)
    if class_names(train) != class_names(heldout):
        raise ConfigError(
            f"data.eval_split must have the classes of data.split, got {class_names(heldout)[:5]} ... and"
            f" {class_names(train)[:5]} ..."
        )
    return Images(train, heldout)


def load_split(
    source: str,
    split: str,
    *,
    config: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
) -> Dataset:
    """Load one split.

    Args:
        source: "digits", a folder with a sub-folder a class, or what `datasets.load_dataset` takes.
        split: Name of the split.
        config: Configuration of a data set on the Hub.
        image_column: Its column of the images.
        label_column: Its column of the classes.

    Returns:
        Rows with `image`, a PIL image, and `label`, a number with a name.

    Raises:
        ConfigError: The split or a column does not exist or is of another type, or there are no images.
    """
    loaded = load_digits_split(split) if source == DIGITS else _load_split(source, config, split)
    for name, wanted, kind in (("image", Image, image_column), ("label", ClassLabel, label_column)):
        if kind not in loaded.features or not isinstance(loaded.features[kind], wanted):
            have = ", ".join(f"{column} ({type(of).__name__})" for column, of in loaded.features.items())
            raise ConfigError(
                f"data.{name}_column must be a column of type {wanted.__name__}, got {kind!r}: {have}"
            )
    if not len(loaded):
        raise ConfigError(f"data.source: there are no images in the split {split!r} of {source}")
    _check_rows(loaded, image_column, label_column)
    names = {image_column: "image", label_column: "label"}
    loaded = loaded.select_columns(list(names))
    return loaded.rename_columns({old: new for old, new in names.items() if old != new})


def _check_rows(loaded: Dataset, image_column: str, label_column: str) -> None:
    """Every row has an image and a class; data sets whose labels are secret have -1."""
    if missing := loaded.data.column(image_column).null_count:
        raise ConfigError(f"data.image_column {image_column!r}: {missing} rows have no image")
    labels, num_classes = loaded.data.column(label_column), loaded.features[label_column].num_classes
    known = labels.drop_null().to_numpy()
    if missing := len(labels) - int(((known >= 0) & (known < num_classes)).sum()):
        raise ConfigError(
            f"data.label_column {label_column!r}: {missing} of {len(labels)} images have no class from 0 to "
            f"{num_classes - 1}; take a split whose labels are public"
        )


def class_names(images: Dataset) -> list[str]:
    """Return the names of the classes, in the order of their numbers."""
    return list(images.features["label"].names)


def load_digits_split(split: str) -> Dataset:
    """scikit-learn's handwritten digits, 8×8 grey: 1,437 for training, 360 for testing, alike in classes."""
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    if split not in ("train", "test"):
        raise ConfigError(f"data.split: digits have the splits train and test, got {split!r}")
    pixels, labels = load_digits(return_X_y=True)
    indices = np.arange(len(labels))
    train, test = train_test_split(indices, test_size=DIGITS_TEST_SHARE, stratify=labels, random_state=0)
    chosen = train if split == "train" else test
    images = np.round(pixels[chosen].reshape(-1, 8, 8) * (255 / 16)).astype(np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=[str(digit) for digit in range(10)])})
    return Dataset.from_dict({"image": list(images), "label": labels[chosen]}, features=features)


def _load(data: ImageDataSection, split: str) -> Dataset:
    assert data.source is not None
    columns = {"image_column": data.image_column, "label_column": data.label_column}
    return load_split(data.source, split, config=data.config, **columns)


def _load_split(source: str, config: str | None, split: str) -> Dataset:
    try:
        loaded = load_dataset(source, config, split=split)
    except ValueError as error:
        raise ConfigError(f"data.source {source}: {error}") from error
    if not isinstance(loaded, Dataset):
        raise ConfigError(f"data.split must name one split, got {split!r}")
    return loaded


def _split(images: Dataset, fraction: float) -> dict[str, Dataset]:
    """The same images on every machine; of each class the share that is held out, at least one of them."""
    labels = np.asarray(images["label"])
    order = np.random.default_rng(0).permutation(len(labels))
    held = [
        members[: max(1, round(fraction * len(members)))]
        for label in np.unique(labels)
        if len(members := order[labels[order] == label])
    ]
    heldout = np.sort(np.concatenate(held))
    kept = np.setdiff1d(np.arange(len(labels)), heldout)
    if not len(kept):
        raise ConfigError("data.heldout_fraction leaves no image to train on: name data.eval_split")
    return {"train": images.select(kept), "test": images.select(heldout)}
