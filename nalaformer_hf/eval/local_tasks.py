"""lm-eval's standard tasks on local files: its own definitions, with the data taken from a folder.

The folder has one folder per task, with a file per split in the records of the dataset:
`piqa/validation.jsonl`, `arc_easy/test.jsonl`, `lambada_openai/test.jsonl`.
"""

import json
import logging
from pathlib import Path
from typing import Any

import lm_eval.tasks
import yaml
from lm_eval.tasks import TaskManager

from nalaformer_hf.training.errors import ConfigError

# Folders of lm-eval with the definitions, and what those read of a record, whose tasks are named like the
# folder. Looking through all of lm-eval's folders takes ten seconds.
DEFINITIONS = {
    "arc": ("question", "choices", "answerKey"),
    "hellaswag": ("activity_label", "ctx_a", "ctx_b", "endings", "label"),
    "lambada": ("text",),
    "piqa": ("goal", "sol1", "sol2", "label"),
    "wikitext": ("page",),
    "winogrande": ("sentence", "option1", "option2", "answer"),
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
            has no items, or a line that is none or lacks a field.
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


def _check_items(path: Path, fields: tuple[str, ...]) -> None:
    """Refuses a file without items, or with a line that is none or lacks one of the fields."""
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
            if missing := [name for name in fields if item.get(name) is None]:
                raise ConfigError(f"--data-dir: line {number} of {path} has no {missing[0]!r}")
            count += 1
    if not count:
        raise ConfigError(f"--data-dir: {path} has no items")
