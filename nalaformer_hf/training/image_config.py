"""The configuration of an image-classification run: its sections and their checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.sections import ModelSection, RunConfig, read_run_config
from nalaformer_hf.training.settings import require_at_least

# Arguments of the Trainer that would spoil a run, and how.
_MUST_BE_FALSE = {
    "remove_unused_columns": "the images are such a column",
    "dataloader_drop_last": "the evaluation would leave images out; training takes whole batches anyway",
    "prediction_loss_only": "the evaluation would have no accuracies",
    "batch_eval_metrics": "accuracies are computed at the end of an evaluation",
}


@dataclasses.dataclass(kw_only=True)
class ImageDataSection:
    """Which images, and how they are brought to one size.

    Args:
        source: "digits" (scikit-learn's, with the splits train and test), a folder with a sub-folder a class
            (below one for each split, if there are several), or a data set on the Hub or on disk that
            `datasets` can load.
        config: Configuration of a data set on the Hub.
        split: Split for training.
        eval_split: Split for evaluation; otherwise images are held out of `split`.
        heldout_fraction: Share of each class's images that is held out.
        image_column: Column of the images.
        label_column: Column of the classes, a `datasets.ClassLabel`.
        image_size: Height and width; None: as the model's configuration says.
        crop_fraction: For evaluation, the image's shorter side is resized to image_size / crop_fraction, and
            the centre cropped. None: 0.875 up to 224, 1 above (published code).
        images_per_step: Images in one optimizer step over all processes; the number of gradient accumulation
            steps follows from it. None leaves it to `train.gradient_accumulation_steps`.
    """

    source: str | None = None
    config: str | None = None
    split: str = "train"
    eval_split: str | None = None
    heldout_fraction: float = 0.1
    image_column: str = "image"
    label_column: str = "label"
    image_size: int | None = None
    crop_fraction: float | None = None
    images_per_step: int | None = None

    def __post_init__(self) -> None:
        if self.source is None:
            raise ConfigError("data.source must name the images: digits, a folder, or a data set on the Hub")
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"data.heldout_fraction must lie between 0 and 1, got {self.heldout_fraction}")
        if self.crop_fraction is not None and not 0 < self.crop_fraction <= 1:
            raise ConfigError(f"data.crop_fraction must be above 0 and at most 1, got {self.crop_fraction}")
        require_at_least("data", self, "image_size", 4)
        require_at_least("data", self, "images_per_step", 1)


@dataclasses.dataclass(kw_only=True)
class AugmentSection:
    """How training images are varied (timm's transforms and mixup). The defaults are a crop and a flip.

    Args:
        scale: Smallest and largest share of the image's area that a random crop has.
        ratio: Smallest and largest width / height of the crop.
        horizontal_flip: Probability of a flip.
        color_jitter: Strength of random brightness, contrast and saturation; not used with `auto_augment`.
        auto_augment: timm's name of an automatic augmentation, such as "rand-m9-mstd0.5-inc1".
        random_erasing: Probability that a rectangle is filled with noise.
        mixup: α of mixup, 0 for none.
        cutmix: α of cutmix, 0 for none.
        mix_probability: Probability that a batch is mixed.
        cutmix_share: Share of the mixed batches that get cutmix, where both are on.
        repeats: Repeated augmentation: each image of an epoch is drawn so many times, each time varied anew,
            and an epoch has as many draws as there are images.
    """

    scale: list[float] = dataclasses.field(default_factory=lambda: [0.08, 1.0])
    ratio: list[float] = dataclasses.field(default_factory=lambda: [3 / 4, 4 / 3])
    horizontal_flip: float = 0.5
    color_jitter: float = 0.0
    auto_augment: str | None = None
    random_erasing: float = 0.0
    mixup: float = 0.0
    cutmix: float = 0.0
    mix_probability: float = 1.0
    cutmix_share: float = 0.5
    repeats: int = 1

    def __post_init__(self) -> None:
        for name in ("scale", "ratio"):
            bounds = getattr(self, name)
            if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
                raise ConfigError(f"augment.{name} must be two positive numbers in order, got {bounds}")
        if self.scale[1] > 1:
            raise ConfigError(f"augment.scale must be shares of the image, at most 1, got {self.scale}")
        for name in ("horizontal_flip", "random_erasing", "mix_probability", "cutmix_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"augment.{name} must be from 0 to 1, got {getattr(self, name)}")
        for name in ("color_jitter", "mixup", "cutmix"):
            require_at_least("augment", self, name, 0)
        require_at_least("augment", self, "repeats", 1)
        if self.auto_augment is not None and self.color_jitter:
            raise ConfigError("augment.color_jitter must be 0 where augment.auto_augment is set, as in timm")

    @property
    def mixes(self) -> bool:
        """Whether batches are mixed."""
        return self.mixup > 0 or self.cutmix > 0


@dataclasses.dataclass(kw_only=True)
class EmaSection:
    """An exponential moving average of the weights, which is then what is evaluated and saved.

    Args:
        decay: Share of the average that a step keeps; None: no average.
        warmup: Let the decay grow from 0 to `decay`, as 1 − (1 + step)^(−2/3).
    """

    decay: float | None = None
    warmup: bool = True

    def __post_init__(self) -> None:
        if self.decay is not None and not 0 < self.decay < 1:
            raise ConfigError(f"ema.decay must lie between 0 and 1, got {self.decay}")


@dataclasses.dataclass(kw_only=True)
class ImageTrainConfig(RunConfig):
    """A whole run.

    Args:
        model: The model section; presets are those of `NaLaVisionConfig`.
        data: The data section.
        augment: The augmentation section.
        ema: The section of the averaged weights.
        train: Fields of `transformers.TrainingArguments`, all of them allowed; `output_dir` is required.
    """

    model: ModelSection
    data: ImageDataSection
    augment: AugmentSection
    ema: EmaSection
    samples_per_step: ClassVar[str] = "images_per_step"

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_false(_MUST_BE_FALSE)
        smoothing = self.train.get("label_smoothing_factor", 0.0)
        if not 0 <= smoothing <= 1:
            raise ConfigError(f"train.label_smoothing_factor must be from 0 to 1, got {smoothing}")
        for name in ("seed", "data_seed"):
            if (self.train.get(name) or 0) < 0:
                raise ConfigError(f"train.{name} must be at least 0, got {self.train[name]}")
        size = self.train.get("per_device_train_batch_size", 8)
        if self.augment.mixes and size % 2:
            raise ConfigError(
                "train.per_device_train_batch_size must be even where augment.mixup or augment.cutmix mix"
                f" pairs, got {size}"
            )


def load_image_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> ImageTrainConfig:
    """Read a configuration and check it.

    Args:
        source: A YAML file, the name of a packaged recipe, a mapping, or None for an empty one.
        overrides: `key=value` strings with dotted keys, such as `augment.mixup=0.8`; values are YAML.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Unknown key (with the nearest known one), contradiction, file or recipe that does not
            exist.
        ConfigTypeError: A value of the wrong type.
    """
    sections = {"model": ModelSection, "data": ImageDataSection, "augment": AugmentSection, "ema": EmaSection}
    return read_run_config("image", ImageTrainConfig, sections, source, overrides)
