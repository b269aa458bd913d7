"""Corpora: every kind of file, a deterministic held-out part, tokenizers."""

import json

import pytest
from datasets import Dataset

from nalaformer_hf.training.config import DataSection, TokenizerSection
from nalaformer_hf.training.corpus import count_bytes, cut_at_lines, load_corpus
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.tokenizer import (
    boundary_tokens,
    encode_documents,
    make_tokenizer,
    train_tokenizer,
)

TEXTS = [f"document {i}: " + "a b ü " * (i + 1) for i in range(20)]


@pytest.fixture
def files(tmp_path, monkeypatch):
    """The same texts as text files, JSONL and Parquet."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "text").mkdir()
    for i, text in enumerate(TEXTS):
        (tmp_path / "text" / f"{i}.txt").write_text(text, encoding="utf-8")
    lines = [json.dumps({"id": i, "body": text}) for i, text in enumerate(TEXTS)]
    (tmp_path / "all.jsonl").write_text("\n".join(lines), encoding="utf-8")
    Dataset.from_dict({"text": TEXTS, "other": TEXTS}).to_parquet(tmp_path / "all.parquet")
    return {
        "text": {"files": str(tmp_path / "text" / "*.txt")},
        "jsonl": {"files": [str(tmp_path / "all.jsonl")], "text_column": "body"},
        "parquet": {"files": [str(tmp_path / "all.parquet")]},
    }


@pytest.mark.parametrize("kind", ["text", "jsonl", "parquet"])
def test_files_of_every_kind_give_the_same_split(files, kind):
    corpus = load_corpus(DataSection(**files[kind], heldout_fraction=0.2), seed=0)
    assert len(corpus.heldout) == 4
    assert sorted([*corpus.train["text"], *corpus.heldout["text"]]) == sorted(TEXTS)
    reference = load_corpus(DataSection(**files["jsonl"], heldout_fraction=0.2), seed=0)
    assert set(corpus.heldout["text"]) == set(reference.heldout["text"])
    assert corpus.train.column_names == corpus.heldout.column_names == ["text"]
    assert count_bytes(corpus.heldout) == sum(len(text.encode()) for text in corpus.heldout["text"])


def test_stream_is_split_by_the_same_hash(files):
    section = DataSection(**files["jsonl"], streaming=True, heldout_fraction=0.3, heldout_documents=50)
    corpus = load_corpus(section, seed=0)
    train = [row["text"] for row in corpus.train]
    assert sorted([*train, *corpus.heldout["text"]]) == sorted(TEXTS)
    assert 0 < len(corpus.heldout) < 20


def test_shuffled_stream_follows_the_seed(files):
    section = DataSection(**files["jsonl"], streaming=True, heldout_documents=50, shuffle_buffer=10)
    orders = [[row["text"] for row in load_corpus(section, seed=seed).train] for seed in (1, 1, 2)]
    assert orders[0] == orders[1] != orders[2]
    assert sorted(orders[0]) == sorted(orders[2])


def test_files_of_their_own_for_evaluation(files):
    section = DataSection(**files["parquet"], heldout_files=files["text"]["files"], heldout_documents=3)
    corpus = load_corpus(section, seed=0)
    assert len(corpus.train) == 20
    assert len(corpus.heldout) == 3


def test_folder_with_splits_of_its_own(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    for split, texts in {"train": TEXTS[:15], "test": TEXTS[15:]}.items():
        (tmp_path / "set").mkdir(exist_ok=True)
        Dataset.from_dict({"text": texts}).to_parquet(tmp_path / "set" / f"{split}.parquet")
    corpus = load_corpus(DataSection(hub=str(tmp_path / "set"), heldout_split="test"), seed=0)
    assert list(corpus.train["text"]) == TEXTS[:15]
    assert list(corpus.heldout["text"]) == TEXTS[15:]


def test_stdlib_is_the_running_pythons_own():
    corpus = load_corpus(DataSection(corpus="stdlib"), seed=0)
    texts = [*corpus.train["text"], *corpus.heldout["text"]]
    assert 300 < len(texts) < 2000
    assert any('"""An extensible library for opening URLs' in text for text in texts)
    assert not any("import pytest" in text for text in texts)
    assert 0.01 < count_bytes(corpus.heldout) / sum(len(text.encode()) for text in texts) < 0.2
    assert set(load_corpus(DataSection(corpus="stdlib"), seed=1).heldout["text"]) == set(
        corpus.heldout["text"]
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"files": "nowhere/*.txt"}, r"no file matches 'nowhere/\*\.txt'"),
        ({"text_column": "txet"}, "text_column must be one of id, body, got 'txet'"),
        ({"files": __file__, "text_column": "text"}, "two different documents, got 1"),
    ],
)
def test_refusals(files, change, message):
    with pytest.raises(ConfigError, match=message):
        load_corpus(DataSection(**{**files["jsonl"], **change}), seed=0)


def test_kinds_cannot_be_mixed(files):
    with pytest.raises(ConfigError, match="of one kind, got json, parquet"):
        load_corpus(DataSection(files=[*files["jsonl"]["files"], *files["parquet"]["files"]]), seed=0)


def test_cut_at_lines():
    assert list(cut_at_lines("ab\ncdef\ng\n", 5)) == ["ab\n", "cdef\n", "g\n"]
    assert list(cut_at_lines("abcdefg", 3)) == ["abc", "def", "g"]
    assert list(cut_at_lines("", 3)) == []


def test_one_long_document_can_be_cut_and_split(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    path = tmp_path / "book.txt"
    path.write_text("".join(f"line {i}\n" for i in range(100)), encoding="utf-8")
    corpus = load_corpus(DataSection(files=str(path), document_chars=50), seed=0)
    assert len(corpus.heldout) >= 1
    assert max(len(text) for text in corpus.train["text"]) <= 50


def test_trained_tokenizer_spells_every_text_and_is_kept(tmp_path):
    documents = Dataset.from_dict({"text": TEXTS})
    tokenizer = make_tokenizer(TokenizerSection(vocab_size=300), documents, tmp_path / "tokenizer")
    strange = "\t\x00 日本 \U0001f600\n"
    assert tokenizer.decode(tokenizer(strange)["input_ids"]) == strange
    assert len(tokenizer) <= 300
    assert tokenizer.pad_token_id not in {tokenizer.eos_token_id, None}
    other = Dataset.from_dict({"text": ["something else"]})
    again = make_tokenizer(TokenizerSection(vocab_size=300), other, tmp_path / "tokenizer")
    assert again.get_vocab() == tokenizer.get_vocab()
    by_name = make_tokenizer(
        TokenizerSection(name=str(tmp_path / "tokenizer")), documents, tmp_path / "not-made"
    )
    assert by_name.get_vocab() == tokenizer.get_vocab()
    assert not (tmp_path / "not-made").exists()


def test_documents_stand_between_their_boundaries():
    documents = Dataset.from_dict({"text": TEXTS})
    tokenizer = train_tokenizer(iter(TEXTS), 300)
    encoded = list(encode_documents(documents, tokenizer, batch_size=7))
    begin, end = boundary_tokens(tokenizer)
    assert all(ids[0] == begin and ids[-1] == end for ids in encoded)
    assert [tokenizer.decode(ids[1:-1]) for ids in encoded] == TEXTS
    tokenizer.bos_token = None
    assert boundary_tokens(tokenizer) == (end, end)
    tokenizer.eos_token = None
    with pytest.raises(ConfigError, match="needs a bos or an eos token"):
        boundary_tokens(tokenizer)
