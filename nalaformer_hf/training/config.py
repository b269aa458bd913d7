"""The configuration of a language-model run: one YAML file, `key=value` overrides, checks in words."""

import dataclasses
import difflib
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args, get_type_hints

from huggingface_hub.dataclasses import type_validator
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from nalaformer_hf.training.errors import ConfigError, ConfigTypeError

if TYPE_CHECKING:
    from transformers import TrainingArguments

RECIPES = resources.files("nalaformer_hf.training") / "recipes"


@dataclasses.dataclass(kw_only=True)
class ModelSection:
    """Which model: exactly one of `preset`, `config` and `pretrained`.

    Args:
        preset: Name of a NaLa preset; the weights are new.
        config: A `config.json`, a folder or Hub name that has one, or its fields with `model_type` written
            out here; any causal language model of transformers, with new weights.
        pretrained: Folder or Hub name of a causal language model to go on from.
        overrides: Fields of the model's configuration that differ from `preset` or `config`.
    """

    preset: str | None = None
    config: str | dict[str, Any] | None = None
    pretrained: str | None = None
    overrides: dict[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        _require_one("model", self, ("preset", "config", "pretrained"))
        if self.pretrained is not None and self.overrides:
            raise ConfigError(
                "model.overrides cannot change model.pretrained, whose weights have their own shape"
            )


@dataclasses.dataclass(kw_only=True)
class DataSection:
    """Which text, and how it is cut into blocks: exactly one of `files`, `hub` and `corpus`.

    Args:
        files: Text, JSONL or Parquet files, all of one kind; `*` and `**` are expanded.
        hub: Name of a data set on the Hub, or of a local folder that `datasets` can load.
        hub_config: Configuration of that data set.
        split: Its split for training.
        heldout_split: Its split for evaluation; otherwise documents are held out of the training split.
        heldout_files: Files for evaluation; otherwise documents are held out of `files`.
        corpus: "stdlib" is the source of the running Python's standard library.
        text_column: Name of the column that holds the text.
        streaming: Read while training instead of before it. `train.max_steps` must be set then.
        shuffle_buffer: Number of documents that a streamed corpus is shuffled within; 0 keeps its order.
        document_chars: Longer documents are cut, at line ends, into documents of at most this many
            characters.
        heldout_fraction: Share of the documents that are held out, chosen by the hash of their text.
        heldout_documents: At most this many documents are held out; required where a stream is split.
        block_size: Tokens in a block, which is the longest context.
        sequences_per_step: Blocks in one optimizer step over all processes; the number of gradient
            accumulation steps follows from it. None leaves it to `train.gradient_accumulation_steps`.
    """

    files: list[str] | str | None = None
    hub: str | None = None
    hub_config: str | None = None
    split: str = "train"
    heldout_split: str | None = None
    heldout_files: list[str] | str | None = None
    corpus: Literal["stdlib"] | None = None
    text_column: str = "text"
    streaming: bool = False
    shuffle_buffer: int = 0
    document_chars: int | None = None
    heldout_fraction: float = 0.05
    heldout_documents: int | None = None
    block_size: int = 1024
    sequences_per_step: int | None = None

    def __post_init__(self) -> None:
        _require_one("data", self, ("files", "hub", "corpus"))
        for name, owner in {
            "hub_config": "hub",
            "heldout_split": "hub",
            "heldout_files": "files",
        }.items():
            if getattr(self, name) is not None and getattr(self, owner) is None:
                raise ConfigError(f"data.{name} belongs to data.{owner}, which is not set")
        if not 0 < self.heldout_fraction < 1:
            raise ConfigError(f"data.heldout_fraction must lie between 0 and 1, got {self.heldout_fraction}")
        for name, least in {"block_size": 2, "document_chars": 1, "heldout_documents": 1}.items():
            _require_at_least("data", self, name, least)
        _require_at_least("data", self, "sequences_per_step", 1)
        _require_at_least("data", self, "shuffle_buffer", 0)
        if self.corpus is not None and self.streaming:
            raise ConfigError("data.streaming cannot be combined with data.corpus, which is read from disk")
        if self.shuffle_buffer and not self.streaming:
            raise ConfigError(
                "data.shuffle_buffer needs data.streaming=true; other corpora are shuffled whole"
            )
        given = self.heldout_split is not None or self.heldout_files is not None
        if self.streaming and not given and self.heldout_documents is None:
            raise ConfigError("data.heldout_documents must be set where a streamed corpus is split")


@dataclasses.dataclass(kw_only=True)
class TokenizerSection:
    """Which tokenizer: an existing one by `name`, or a byte-level BPE trained on the corpus.

    Args:
        name: Folder or Hub name for `AutoTokenizer`. None trains one; with `model.pretrained`, the model's is
            taken.
        vocab_size: Vocabulary of the trained tokenizer, special tokens included.
        train_documents: The trained tokenizer sees at most this many documents; None means all of them.
    """

    name: str | None = None
    vocab_size: int = 8192
    train_documents: int | None = None

    def __post_init__(self) -> None:
        _require_at_least("tokenizer", self, "vocab_size", 258)
        _require_at_least("tokenizer", self, "train_documents", 1)


# Ours where they differ from the defaults of TrainingArguments.
TRAIN_DEFAULTS: dict[str, Any] = {
    "report_to": "tensorboard",
    "logging_steps": 10,
    "remove_unused_columns": False,
    "accelerator_config": {"dispatch_batches": False},  # each process reads a stream and takes its share
}


@dataclasses.dataclass(kw_only=True)
class LMTrainConfig:
    """A whole run.

    Args:
        model: The model section.
        data: The data section.
        tokenizer: The tokenizer section.
        train: Fields of `transformers.TrainingArguments`, all of them allowed; `output_dir` is required.
    """

    model: ModelSection
    data: DataSection
    tokenizer: TokenizerSection
    train: dict[str, Any]

    def __post_init__(self) -> None:
        if not self.train.get("output_dir"):
            raise ConfigError("train.output_dir must name the folder that the run is written to")
        if self.train["remove_unused_columns"]:
            raise ConfigError(
                "train.remove_unused_columns must be false: the boundaries of documents are such a column"
            )
        if self.data.streaming and self.train.get("max_steps", -1) < 1:
            raise ConfigError("train.max_steps must be set for a streamed corpus, whose length is unknown")
        if self.data.streaming and self.train.get("dataloader_num_workers", 0) > 1:
            raise ConfigError(
                "train.dataloader_num_workers must be 0 or 1 for a streamed corpus, which is one stream"
            )
        if self.data.sequences_per_step is not None and "gradient_accumulation_steps" in self.train:
            raise ConfigError("data.sequences_per_step already determines train.gradient_accumulation_steps")

    @property
    def output_dir(self) -> Path:
        """The folder that the run is written to."""
        return Path(self.train["output_dir"])

    def training_arguments(self) -> "TrainingArguments":
        """Build the `TrainingArguments`, which joins the process group of a launched run.

        Raises:
            ConfigError: `TrainingArguments` refuses its values, or `data.sequences_per_step` cannot be
                divided among the processes and their batches.
        """
        from transformers import TrainingArguments

        try:
            arguments = TrainingArguments(**self.train)
        except ValueError as error:
            raise ConfigError(f"train: {error}") from error
        if (wanted := self.data.sequences_per_step) is not None:
            at_once = arguments.train_batch_size * arguments.world_size
            if wanted % at_once:
                raise ConfigError(
                    f"data.sequences_per_step must be a multiple of {at_once}, the"
                    f" train.per_device_train_batch_size of all devices together, got {wanted}"
                )
            arguments.gradient_accumulation_steps = wanted // at_once
        return arguments

    def to_dict(self) -> dict[str, Any]:
        """Return the configuration as plain containers."""
        return dataclasses.asdict(self)


def load_config(
    source: str | Path | Mapping[str, Any] | None = None, overrides: Sequence[str] = ()
) -> LMTrainConfig:
    """Read a configuration and check it.

    Args:
        source: A YAML file, the name of a packaged recipe (`recipe_names`), a mapping, or None for an empty
            one.
        overrides: `key=value` strings with dotted keys, such as `train.learning_rate=1e-3`; values are YAML.

    Returns:
        The checked configuration.

    Raises:
        ConfigError: Unknown key (with the nearest known one), contradiction, file or recipe that does not
            exist.
        ConfigTypeError: A value of the wrong type.
    """
    for override in overrides:
        if "=" not in override:
            raise ConfigError(f"an override has the form key=value, got {override!r}")
    try:
        merged = OmegaConf.merge(_read(source), OmegaConf.from_dotlist(list(overrides)))
        values = OmegaConf.to_container(merged, resolve=True)
    except OmegaConfBaseException as error:
        raise ConfigError(f"the configuration cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"the configuration must be a mapping of sections, got {type(values).__name__}")
    return _parse({str(key): value for key, value in values.items()})


def recipe_names() -> list[str]:
    """Return the names of the packaged recipes, which `load_config` takes in place of a file."""
    return sorted(
        entry.name.removesuffix(".yaml") for entry in RECIPES.iterdir() if entry.name.endswith(".yaml")
    )


def check_known(where: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Refuse names that are not known, each with the nearest known one.

    Args:
        where: What stands before the name in the message, such as "key train.".
        names: The names that were given.
        known: The names that exist.

    Raises:
        ConfigError: A name is unknown.
    """
    known = list(known)
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
            hint = f"; the nearest known one is {where}{near[0]}" if near else ""
            raise ConfigError(f"unknown {where}{name}{hint}")


def _read(source: str | Path | Mapping[str, Any] | None) -> DictConfig | ListConfig:
    if source is None or isinstance(source, Mapping):
        return OmegaConf.create(dict(source or {}))
    if str(source) in recipe_names():
        return OmegaConf.create((RECIPES / f"{source}.yaml").read_text(encoding="utf-8"))
    if not Path(source).is_file():
        raise ConfigError(f"{source} is neither a file nor one of the recipes {', '.join(recipe_names())}")
    return OmegaConf.load(source)


def _parse(values: dict[str, Any]) -> LMTrainConfig:
    sections = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection}
    check_known("key ", values, [*sections, "train"])
    for name, section in values.items():
        if not isinstance(section, dict | None):
            raise ConfigTypeError(f"section {name} must be a mapping of keys to values, got {section!r}")
    parsed = {name: cls(**_checked(name, cls, values.get(name) or {})) for name, cls in sections.items()}
    return LMTrainConfig(**parsed, train=TRAIN_DEFAULTS | _checked_train(values.get("train") or {}))


def _checked_train(values: dict[str, Any]) -> dict[str, Any]:
    from transformers import TrainingArguments

    return _checked("train", TrainingArguments, values)


def _checked(section: str, cls: type, values: dict[str, Any]) -> dict[str, Any]:
    """Check names and types against the fields of a dataclass; whole numbers may stand for floats."""
    hints = get_type_hints(cls)
    check_known(f"key {section}.", values, [field.name for field in dataclasses.fields(cls)])
    checked = {}
    for name, value in values.items():
        is_whole_float = isinstance(value, int) and not isinstance(value, bool) and _takes_float(hints[name])
        checked[name] = float(value) if is_whole_float else value
        try:
            type_validator(f"{section}.{name}", checked[name], hints[name])
        except TypeError as error:
            raise ConfigTypeError(str(error)) from error
    return checked


def _takes_float(hint: object) -> bool:
    options = get_args(hint) or (hint,)
    return float in options and int not in options


def _require_one(section: str, values: object, names: Sequence[str]) -> None:
    given = [f"{section}.{name}" for name in names if getattr(values, name) is not None]
    if len(given) != 1:
        choices = ", ".join(f"{section}.{name}" for name in names)
        raise ConfigError(f"exactly one of {choices} must be set, got {', '.join(given) or 'none'}")


def _require_at_least(section: str, values: object, name: str, least: int) -> None:
    value = getattr(values, name)
    if value is not None and value < least:
        raise ConfigError(f"{section}.{name} must be at least {least}, got {value}")
