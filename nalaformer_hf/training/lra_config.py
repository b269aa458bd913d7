"""The configuration of a Long Range Arena run: its sections and their checks."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_tasks import LRA_TASKS, LRATask, TaskName
from nalaformer_hf.training.sections import RunConfig, read_run_config
from nalaformer_hf.training.settings import require_at_least

# Arguments of the Trainer that would spoil a run, and how.
_MUST_BE_FALSE = {
    "remove_unused_columns": "the sequences are such a column",
    "dataloader_drop_last": "the evaluation would leave items out",
    "prediction_loss_only": "the evaluation would have no accuracy",
    "batch_eval_metrics": "the accuracy is computed at the end of an evaluation",
}


@dataclasses.dataclass(kw_only=True)
class LRAModelSection:
    """Which encoder.

    Args:
        attention: "nala"; or a baseline: "elu", 1 + ELU in the place of NaLa's feature maps, "softmax", with
            a feed-forward width that gives it as many parameters.
        overrides: Fields of `NaLaConfig`, such as `hidden_size`; the same ones for all three.
    """

    attention: Literal["nala", "elu", "softmax"] = "nala"
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(kw_only=True)
class LRADataSection:
    """Which task and items; the defaults are the published sizes.

    Args:
        task: "listops", "text", "retrieval", "image" or "pathfinder".
        source: Of `text`, `image` and `retrieval`: a folder, or a data set on the Hub. None takes the task's
            own on the Hub, which `retrieval` does not have.
        seed: Of generated items, and of the choice where only some items are taken or held out.
        max_length: Longest sequence. Texts are cut to it, images scaled to so many pixels, expressions
            drawn anew until they are shorter.
        max_depth: Bound of the depth of `listops`, digits included; None: the published one.
        num_train, num_validation, num_test: Items of each split. None: the published number of generated
            items, and all that the source has.
        sequences_per_step: Items in one optimizer step over all processes; the number of gradient
            accumulation steps follows from it. None leaves it to `train.gradient_accumulation_steps`.
    """

    task: TaskName | None = None
    source: str | None = None
    seed: int = 0
    max_length: int | None = None
    max_depth: int | None = None
    num_train: int | None = None
    num_validation: int | None = None
    num_test: int | None = None
    sequences_per_step: int | None = None

    def __post_init__(self) -> None:
        if self.task is None:
            raise ConfigError(f"data.task must be one of {', '.join(LRA_TASKS)}")
        if self.facts.is_generated and self.source is not None:
            raise ConfigError(f"data.source must not be set: the items of {self.task} are generated")
        if self.task == "retrieval" and self.source is None:
            raise ConfigError("data.source must name the documents of retrieval: a folder, or a Hub name")
        for name in ("num_train", "num_test", "sequences_per_step"):
            require_at_least("data", self, name, 1)
        require_at_least("data", self, "num_validation", 0)
        require_at_least("data", self, "max_length", 16)
        require_at_least("data", self, "max_depth", 3)
        if self.max_depth is not None and self.task != "listops":
            raise ConfigError(f"data.max_depth belongs to listops, not to {self.task}")
        if self.facts.is_image and math.isqrt(self.length) ** 2 != self.length:
            raise ConfigError(f"data.max_length must be a square for {self.task}, got {self.length}")
        if self.task == "pathfinder" and self.length != self.facts.max_length:
            raise ConfigError(f"data.max_length must be 1024 for pathfinder, got {self.length}")

    @property
    def facts(self) -> LRATask:
        """The task as published."""
        assert self.task is not None
        return LRA_TASKS[self.task]

    @property
    def length(self) -> int:
        """The longest sequence."""
        return self.facts.max_length if self.max_length is None else self.max_length


@dataclasses.dataclass(kw_only=True)
class LRATrainConfig(RunConfig):
    """A whole run.

    Args:
        model: The model section.
        data: The data section.
        train: Fields of `transformers.TrainingArguments`, all of them allowed; `output_dir` is required.
    """

    model: LRAModelSection
    data: LRADataSection

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check_false(_MUST_BE_FALSE)


def load_lra_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> LRATrainConfig:
    """Read a configuration and check it.

    Args:
        source: A YAML file, the name of a packaged recipe, a mapping, or None for an empty one.
        overrides: `key=value` strings with dotted keys, such as `model.attention=elu`; values are YAML.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Unknown key (with the nearest known one), contradiction, file or recipe that does not
            exist.
        ConfigTypeError: A value of the wrong type.
    """
    sections = {"model": LRAModelSection, "data": LRADataSection}
    return read_run_config("lra", LRATrainConfig, sections, source, overrides)
