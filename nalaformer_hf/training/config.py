"""The configuration of a language-model run: its sections and their checks."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.sections import ModelSection, RunConfig, read_run_config
from nalaformer_hf.training.settings import require_at_least, require_one


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
        require_one("data", self, ("files", "hub", "corpus"))
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
            require_at_least("data", self, name, least)
        require_at_least("data", self, "sequences_per_step", 1)
        require_at_least("data", self, "shuffle_buffer", 0)
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
        require_at_least("tokenizer", self, "vocab_size", 258)
        require_at_least("tokenizer", self, "train_documents", 1)


@dataclasses.dataclass(kw_only=True)
class LMTrainConfig(RunConfig):
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

    def __post_init__(self) -> None:
        super().__post_init__()
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
    sections = {"model": ModelSection, "data": DataSection, "tokenizer": TokenizerSection}
    return read_run_config("lm", LMTrainConfig, sections, source, overrides)
