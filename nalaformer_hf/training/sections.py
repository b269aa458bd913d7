"""What every training run has: a model section, and the section of the Trainer's arguments."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.settings import RecipeKind, checked, read_sections, require_one

if TYPE_CHECKING:
    from transformers import TrainingArguments


@dataclasses.dataclass(kw_only=True)
class ModelSection:
    """Which model: exactly one of `preset`, `config` and `pretrained`.

    Args:
        preset: Name of a NaLa preset; the weights are new.
        config: A `config.json`, a folder or Hub name that has one, or its fields with `model_type` written
            out here; any model of transformers that is of the run's kind, with new weights.
        pretrained: Folder or Hub name of such a model to go on from.
        overrides: Fields of the model's configuration that differ from `preset` or `config`.
    """

    preset: str | None = None
    config: str | dict[str, Any] | None = None
    pretrained: str | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        require_one("model", self, ("preset", "config", "pretrained"))
        if self.pretrained is not None and self.overrides:
            raise ConfigError(
                "model.overrides cannot change model.pretrained, whose weights have their own shape"
            )


# Ours where they differ from the defaults of TrainingArguments.
TRAIN_DEFAULTS: dict[str, Any] = {
    "report_to": "tensorboard",
    "logging_steps": 10,
    "remove_unused_columns": False,
    "accelerator_config": {"dispatch_batches": False},  # each process reads a stream and takes its share
}


# Their choice "no" is false to a reader of YAML.
_STRATEGIES = ("eval_strategy", "logging_strategy", "save_strategy")


@dataclasses.dataclass(kw_only=True)
class RunConfig:
    """What the configurations of all runs share.

    Args:
        model: The model section, of a class of the run's own.
        data: The data section, likewise.
        train: Fields of `transformers.TrainingArguments`, all of them allowed; `output_dir` is required.
    """

    model: Any
    data: Any
    train: dict[str, Any]
    # The field of `data` that sets how many samples an optimizer step takes over all processes.
    samples_per_step: ClassVar[str] = "sequences_per_step"

    def __post_init__(self) -> None:
        if not self.train.get("output_dir"):
            raise ConfigError("train.output_dir must name the folder that the run is written to")
        if self._samples is not None and "gradient_accumulation_steps" in self.train:
            raise ConfigError(
                f"data.{self.samples_per_step} already determines train.gradient_accumulation_steps"
            )

    @property
    def output_dir(self) -> Path:
        """The folder that the run is written to."""
        return Path(self.train["output_dir"])

    def training_arguments(self) -> "TrainingArguments":
        """Build the `TrainingArguments`, which joins the process group of a launched run.

        Raises:
            ConfigError: `TrainingArguments` refuses its values, or the samples of a step cannot be divided
                among the processes and their batches.
        """
        from transformers import TrainingArguments

        try:
            arguments = TrainingArguments(**self.train)
        except ValueError as error:
            raise ConfigError(f"train: {error}") from error
        if arguments.device.type == "cpu":  # where it does nothing but draw a warning
            arguments.dataloader_pin_memory = False
        if self._samples is not None:
            at_once = arguments.train_batch_size * arguments.world_size
            if self._samples % at_once:
                raise ConfigError(
                    f"data.{self.samples_per_step} must be a multiple of {at_once}, the"
                    f" train.per_device_train_batch_size of all devices together, got {self._samples}"
                )
            arguments.gradient_accumulation_steps = self._samples // at_once
        return arguments

    @property
    def _samples(self) -> int | None:
        return getattr(self.data, self.samples_per_step)

    def _check_false(self, reasons: Mapping[str, str]) -> None:
        """Refuse arguments of the Trainer that would spoil a run, each with the reason."""
        for name, reason in reasons.items():
            if self.train.get(name):
                raise ConfigError(f"train.{name} must be false: {reason}")

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain containers."""
        return dataclasses.asdict(self)


Config = TypeVar("Config", bound=RunConfig)


def read_run_config(
    kind: RecipeKind,
    config_class: type[Config],
    sections: Mapping[str, type],
    source: str | Path | Mapping[str, Any] | None,
    overrides: Sequence[str],
) -> Config:
    """Read the configuration of a run, and check it.

    Args:
        kind: Which recipes may be named.
        config_class: The configuration's class.
        sections: The class of each section but `train`.
        source: A YAML file, the name of a packaged recipe, a mapping, or None for an empty one.
        overrides: `key=value` strings with dotted keys.
    """
    from transformers import TrainingArguments

    values = read_sections(kind, source, overrides, [*sections, "train"])
    values["train"] |= {name: "no" for name in _STRATEGIES if values["train"].get(name) is False}
    parsed: dict[str, Any] = {name: cls(**checked(name, cls, values[name])) for name, cls in sections.items()}
    train = TRAIN_DEFAULTS | checked("train", TrainingArguments, values["train"])
    return config_class(**parsed, train=train)
