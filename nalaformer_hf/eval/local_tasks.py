"""lm-eval's standard tasks on local files: its own definitions, with the data taken from a folder.

The folder has one folder per task, with a file per split in the records of the dataset:
`piqa/validation.jsonl`, `arc_easy/test.jsonl`, `lambada_openai/test.jsonl`.
"""

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from nalaformer_hf.training.errors import ConfigError

Record = dict[str, Any]


class Field(NamedTuple):
    """A field that a definition reads: what it takes, in words, and whether a value of a record is that."""

    wanted: str
    fits: Callable[[Any, Record], bool]


def _one_of(*values: Any) -> Field:
    return Field(f"one of {', '.join(map(repr, values))}", lambda value, _: value in values)


def _are_texts(value: object) -> bool:
    return isinstance(value, list) and all(isinstance(text, str) for text in value)


def _are_choices(value: Any, _: Record) -> bool:
    if not isinstance(value, dict):
        return False
    texts, labels = value.get("text", ()), value.get("label", ())
    return _are_texts(texts) and _are_texts(labels) and len(texts) == len(labels)


_TEXT = Field("a text", lambda value, _: isinstance(value, str))
_WORDS = Field("a text that is not empty", lambda value, _: isinstance(value, str) and bool(value.strip()))

# Folders of lm-eval with the definitions, and what those read of a record, whose tasks are named like the
# folder. Looking through all of lm-eval's folders takes ten seconds.
DEFINITIONS: dict[str, dict[str, Field]] = {
    "arc": {
        "question": _TEXT,
        "choices": Field("{'text': [...], 'label': [...]}, as many texts as labels", _are_choices),
        "answerKey": Field("a label of its choices", lambda key, record: key in record["choices"]["label"]),
    },
    "hellaswag": {
        **dict.fromkeys(("activity_label", "ctx_a", "ctx_b"), _TEXT),
        "endings": Field("a list of four texts", lambda value, _: _are_texts(value) and len(value) == 4),
        "label": _one_of("0", "1", "2", "3", 0, 1, 2, 3),
    },
    "lambada": {"text": _WORDS},
    "piqa": {**dict.fromkeys(("goal", "sol1", "sol2"), _TEXT), "label": _one_of(0, 1)},
    "wikitext": {"page": _WORDS},
    "winogrande": {
        "sentence": Field("a text with a _", lambda value, _: isinstance(value, str) and "_" in value),
        **dict.fromkeys(("option1", "option2"), _TEXT),
        "answer": _one_of("1", "2"),
    },
}
SPLIT_KEYS = ("training_split", "validation_split", "test_split", "fewshot_split")

logger = logging.getLogger(__name__)


def write_local_tasks(data_dir: Path, folder: Path) -> list[str]:
    """Write definitions that lm-eval's `--include_path` takes instead of its own, with local data.

    All but where the data is stands in lm-eval's own files, which these include: prompts, metrics, versions.

    Args:
        data_dir: Folder of folders named like tasks.
        folder: Where to write the definitions.

    Returns:
        The names of the tasks.

    Raises:
        ConfigError: A folder is not named like a known task, its task's evaluated split is missing, or a file
            has no items, or a line that is none, or lacks a field or has a wrong value there.
    """
    if not data_dir.is_dir():
        raise ConfigError(f"--data-dir must be a folder, got {data_dir}")
    root = Path(lm_eval.tasks.__file__).parent
    known = TaskManager(include_defaults=False, include_path=[root / name for name in DEFINITIONS])
    names = sorted({path.parent.name for path in data_dir.glob("*/*.jsonl")})
    if not names:
        raise ConfigError(f"--data-dir {data_dir} has no files named like piqa/validation.jsonl")
    for name in names:
        if name not in known.all_subtasks:
            wanted = ", ".join(known.all_subtasks)
            raise ConfigError(f"--data-dir {data_dir}: {name} is not one of the tasks {wanted}")
        entry = known.task_index[name]
        definition = _local_definition(name, entry.cfg or {}, str(entry.yaml_path), data_dir / name)
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(definition), encoding="utf-8")
    if untrained := [name for name in names if not (data_dir / name / "train.jsonl").is_file()]:
        logger.warning("No train split: few-shot examples of %s are of another one", ", ".join(untrained))
    return names


def _local_definition(name: str, own: dict[str, Any], path: str, data: Path) -> dict[str, Any]:
    """lm-eval's own definition, which stands at the path, with fields that take the data from the folder."""
    splits = {key: own[key] for key in SPLIT_KEYS if own.get(key)}
    files = {split: data / f"{split}.jsonl" for split in dict.fromkeys(splits.values())}
    evaluated = splits.get("test_split") or splits["validation_split"]
    if not files[evaluated].is_file():
        raise ConfigError(f"--data-dir: {name} is evaluated on {files[evaluated]}, which is missing")
    present = {split: str(path.resolve()) for split, path in files.items() if path.is_file()}
    fields = next(fields for folder, fields in DEFINITIONS.items() if name.startswith(folder))
    for file in present.values():
        _check_items(Path(file), fields)
    return {
        "include": path,
        "task": name,
        "dataset_path": "json",
        "dataset_name": None,
        "dataset_kwargs": {"data_files": present},
        **{key: None for key, split in splits.items() if split not in present},
    }


def _check_items(path: Path, fields: dict[str, Field]) -> None:
    """Refuses a file without items, or with a line that is none or does not have what the fields want."""
    count = 0
    with path.open("rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                item = json.loads(line)
            except ValueError:
                item = None
            if not isinstance(item, dict):
                raise ConfigError(f"--data-dir: line {number} of {path} is no record: {line[:60]!r}")
            for name, field in fields.items():
                if (value := item.get(name)) is None:
                    raise ConfigError(f"--data-dir: line {number} of {path} has no {name!r}")
                if not field.fits(value, item):
                    raise ConfigError(
                        f"--data-dir: line {number} of {path}: {name!r} must be {field.wanted}, got {value!r}"
                    )
            count += 1
    if not count:
        raise ConfigError(f"--data-dir: {path} has no items")
