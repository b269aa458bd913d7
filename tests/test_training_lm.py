"""Whole runs of `train_lm` on a tiny text: exact evaluation, checkpoints, interruption, resume."""

import json
import logging
import math
import random
import signal
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from nalaformer_hf.training.checkpoints import (
    atomic_folder,
    is_complete,
    last_complete_checkpoint,
    staging_path,
)
from nalaformer_hf.training.config import load_config
from nalaformer_hf.training.corpus import load_corpus
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lm import train_lm
from nalaformer_hf.training.models import make_model
from nalaformer_hf.training.packing import IGNORED, PackingCollator, pack_documents
from nalaformer_hf.training.sections import ModelSection
from nalaformer_hf.training.tokenizer import encode_documents, train_tokenizer
from nalaformer_hf.training.trainer import LMTrainer

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
MODELS = {
    # Dropout makes the random state part of what a resumed run must restore.
    "llama": {"config": {"model_type": "llama", "attention_dropout": 0.1, **SHAPE}},
    "nala": {"preset": "tiny", "overrides": SHAPE},
}
STEPS = 7


@pytest.fixture
def text(tmp_path, monkeypatch) -> Path:
    """Documents of random words, one a line."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = random.Random(0)
    rows = [
        {
            "text": " ".join(
                words.choices(["näla", "former", "delta", "rule", "linear"], k=words.randint(1, 60))
            )
        }
        for _ in range(60)
    ]
    path = tmp_path / "text.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows), encoding="utf-8")
    return path


def configure(text: Path, output_dir: Path, model: str = "llama", *overrides: str):
    values = {
        "model": MODELS[model],
        "data": {"files": str(text), "block_size": 32, "heldout_fraction": 0.2},
        "tokenizer": {"vocab_size": 280},
        "train": {
            "output_dir": str(output_dir),
            "use_cpu": True,
            "max_steps": STEPS,
            "per_device_train_batch_size": 4,
            "learning_rate": 0.01,
            "logging_steps": 4,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "disable_tqdm": True,
            "report_to": "none",
        },
    }
    return load_config(values, overrides)


def interrupt_at(monkeypatch: pytest.MonkeyPatch, step: int, number: signal.Signals) -> None:
    """Let the signal come while the given step is computed, once."""
    training_step = LMTrainer.training_step
    pending = [number]

    def signalled(self, *args, **kwargs):
        if self.state.global_step == step and pending:
            signal.raise_signal(pending.pop())
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(LMTrainer, "training_step", signalled)


def history(checkpoint: str) -> list[dict[str, float]]:
    """What was logged, without the times."""
    logged = json.loads((Path(checkpoint) / TRAINER_STATE_NAME).read_text())["log_history"]
    timed = ("runtime", "per_second")
    return [{name: value for name, value in row.items() if not name.endswith(timed)} for row in logged]


def weights(model_dir: str) -> dict[str, torch.Tensor]:
    return AutoModelForCausalLM.from_pretrained(model_dir).state_dict()


@pytest.mark.parametrize("model", MODELS)
def test_heldout_bits_per_byte_are_exact(text, tmp_path, model):
    """Packed, padded and batched, they equal the sum over documents, one at a time, in plain arithmetic."""
    config = configure(
        text, tmp_path / "run", model, "data.block_size=64", "train.per_device_eval_batch_size=3"
    )
    result = train_lm(config)
    trained = AutoModelForCausalLM.from_pretrained(result.model_dir)
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    heldout = load_corpus(config.data, seed=0).heldout
    # As in packing, a document longer than a block goes on in the next one with one token of context.
    pieces = []
    room = 64
    for document in encode_documents(heldout, tokenizer):
        while len(document) > 1:
            room = 64 if room < 2 else room
            pieces.append(document[:room])
            document = document[room - 1 :]
            room -= len(pieces[-1])
    nats = 0.0
    for ids in pieces:
        with torch.no_grad():
            logits = trained(torch.tensor([ids])).logits[0, :-1].double()
        nats -= logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]).sum().item()
    tokens = sum(len(ids) - 1 for ids in pieces)
    num_bytes = sum(len(text.encode()) for text in heldout["text"])
    assert result.heldout_bits_per_byte == pytest.approx(nats / math.log(2) / num_bytes, rel=1e-6)
    assert result.heldout_loss == pytest.approx(nats / tokens, rel=1e-6)


@pytest.mark.parametrize("model", MODELS)
def test_run_leaves_what_it_promises(text, tmp_path, model):
    config = configure(
        text, tmp_path / "run", model, "train.report_to=tensorboard", "train.eval_on_start=true"
    )
    result = train_lm(config)
    assert result.finished
    assert result.steps == STEPS
    assert load_config(tmp_path / "run" / "config.yaml") == config
    assert json.loads((tmp_path / "run" / "result.json").read_text())["steps"] == STEPS
    assert list((tmp_path / "run" / "runs").rglob("events.out.tfevents.*"))
    assert is_complete(Path(result.model_dir))
    evaluations = [row["eval_bits_per_byte"] for row in history(result.checkpoint) if "eval_loss" in row]
    assert len(evaluations) == 3  # before the first step, at step 4 and at the end
    assert result.heldout_bits_per_byte == evaluations[2] < evaluations[1] < evaluations[0]
    trained = AutoModelForCausalLM.from_pretrained(result.model_dir)
    assert trained.config.use_cache
    if model == "nala":
        card = (Path(result.model_dir) / "README.md").read_text(encoding="utf-8")
        assert f"- optimizer steps: {STEPS}\n- sequences a step: 4\n- tokens a sequence: 32\n" in card
        assert f"- held-out bits per byte: {result.heldout_bits_per_byte:.4f}".rstrip("0") in card
    tokenizer = AutoTokenizer.from_pretrained(result.model_dir)
    prompt = tokenizer("delta", return_tensors="pt")
    assert trained.generate(**prompt, max_new_tokens=3, min_new_tokens=3).shape[1] > 3


@pytest.mark.parametrize(("model", "number"), [("llama", signal.SIGINT), ("nala", signal.SIGTERM)])
def test_interrupted_and_resumed_is_uninterrupted(text, tmp_path, monkeypatch, model, number):
    overrides = ["train.gradient_accumulation_steps=2", "train.num_train_epochs=3", "train.max_steps=-1"]
    straight = train_lm(configure(text, tmp_path / "straight", model, *overrides))
    assert straight.steps > 6
    config = configure(text, tmp_path / "run", model, *overrides)
    for step in (0, 2, straight.steps - 2):
        with monkeypatch.context() as patch:
            interrupt_at(patch, step, number)
            stopped = train_lm(config, resume=step > 0)
        assert not stopped.finished
        assert stopped.steps == step + 1
        assert stopped.checkpoint == str(tmp_path / "run" / f"checkpoint-{step + 1}")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    resumed = train_lm(config, resume=True)
    assert resumed.finished
    assert history(resumed.checkpoint) == history(straight.checkpoint)
    assert resumed.heldout_bits_per_byte == straight.heldout_bits_per_byte
    expected = weights(straight.model_dir)
    for name, weight in weights(resumed.model_dir).items():
        assert torch.equal(weight, expected[name]), name


def test_streamed_run_resumes_alike(text, tmp_path, monkeypatch):
    """Also where the stream has begun anew before the interruption."""
    overrides = ["data.streaming=true", "data.heldout_documents=9", "data.shuffle_buffer=10"]
    overrides += ["data.block_size=64", "train.max_steps=16"]
    straight = train_lm(configure(text, tmp_path / "straight", "llama", *overrides))
    config = configure(text, tmp_path / "run", "llama", *overrides)
    interrupt_at(monkeypatch, 13, signal.SIGINT)
    assert not train_lm(config).finished
    resumed = train_lm(config, resume=True)
    assert history(resumed.checkpoint) == history(straight.checkpoint)


def test_second_signal_stops_at_once(text, tmp_path, monkeypatch):
    training_step = LMTrainer.training_step

    def signalled(self, *args, **kwargs):
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(LMTrainer, "training_step", signalled)
    with pytest.raises(KeyboardInterrupt):
        train_lm(configure(text, tmp_path / "run"))
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_broken_save_leaves_the_checkpoint_before(text, tmp_path, monkeypatch):
    """A crash while checkpoint 4 is written: the run resumes from checkpoint 2 to the same losses."""
    overrides = ["train.save_steps=2", "train.save_total_limit=2"]
    straight = train_lm(configure(text, tmp_path / "straight", "llama", *overrides))
    config = configure(text, tmp_path / "run", "llama", *overrides)
    save = LMTrainer._save_rng_state

    def crash(self, output_dir):
        if self.state.global_step == 4:
            raise OSError("no space left on device")
        save(self, output_dir)

    with monkeypatch.context() as patch:
        patch.setattr(LMTrainer, "_save_rng_state", crash)
        with pytest.raises(OSError, match="no space"):
            train_lm(config)
    run = tmp_path / "run"
    assert [path.name for path in run.glob("checkpoint-*")] == ["checkpoint-2"]
    assert staging_path(run / "checkpoint-4").exists()
    # What another program leaves half written is not taken for a checkpoint either.
    (run / "checkpoint-99").mkdir()
    assert last_complete_checkpoint(run) == run / "checkpoint-2"
    resumed = train_lm(config, resume=True)
    assert history(resumed.checkpoint) == history(straight.checkpoint)
    kept = {path.name for path in run.glob("checkpoint-*") if is_complete(path)}
    assert kept == {"checkpoint-6", "checkpoint-7"}
    assert not list(run.glob(".*"))


def test_best_checkpoint_is_found_where_it_ends_up(text, tmp_path):
    overrides = ["train.load_best_model_at_end=true", "train.save_steps=4", "train.save_total_limit=1"]
    overrides.append("train.greater_is_better=true")  # so that the best is not the last one
    result = train_lm(configure(text, tmp_path / "run", "llama", *overrides))
    state = json.loads((Path(result.checkpoint) / TRAINER_STATE_NAME).read_text())
    assert state["best_model_checkpoint"] == str(tmp_path / "run" / "checkpoint-4")
    assert Path(state["best_model_checkpoint"]).is_dir()
    assert result.heldout_loss == pytest.approx(state["best_metric"])


def test_finished_run_is_not_trained_further(text, tmp_path):
    config = configure(text, tmp_path / "run")
    first = train_lm(config)
    again = train_lm(config, resume=True)
    assert again == first


@pytest.mark.parametrize("model", MODELS)
def test_label_smoothing_shifts_the_labels(tmp_path, model):
    """The library's smoother shifts labels only for architectures that it knows by name."""
    values = {**MODELS[model], "overrides": {**SHAPE, "initializer_range": 0.3}}
    network = make_model(ModelSection(**values), train_tokenizer(iter(["a b c"]), 280)).eval()
    arguments = TrainingArguments(str(tmp_path), label_smoothing_factor=0.1, use_cpu=True)
    trainer = LMTrainer(eval_bytes=1, model=network, args=arguments)
    blocks = list(pack_documents([[0, *range(5, 40), 0], [0, 7, 7, 9, 0]], 32))
    batch = PackingCollator(32, 0, flatten=False)(blocks)
    loss = trainer.compute_loss(network, dict(batch), num_items_in_batch=40)
    labels = batch.pop("labels")[:, 1:]
    nats = -network(**batch, use_cache=False).logits[:, :-1].log_softmax(-1)[labels != IGNORED]
    right = nats.gather(1, labels[labels != IGNORED][:, None]).sum()
    assert len(nats) == 40
    expected = (0.9 * right + 0.1 * nats.mean(1).sum()) / 40
    torch.testing.assert_close(loss, expected)


def test_runs_are_not_mixed_up(text, tmp_path, caplog):
    config = configure(text, tmp_path / "run")
    with caplog.at_level(logging.WARNING):
        train_lm(config, resume=True)
    assert f"train.output_dir {tmp_path / 'run'} holds no run to resume: it begins here" in caplog.text
    with pytest.raises(ConfigError, match="holds a run: resume it, or name another folder"):
        train_lm(config)
    with pytest.raises(
        ConfigError, match=r"keeps its model, data and tokenizer, but data\.block_size changed"
    ):
        train_lm(configure(text, tmp_path / "run", "llama", "data.block_size=16"), resume=True)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.config.hidden_sise=3", r"unknown key model\.config\.hidden_sise; .*hidden_size"),
        ("model.overrides.hidden_sise=3", r"unknown key model\.overrides\.hidden_sise; .*hidden_size"),
        (
            "model.config.model_type=lama",
            r"unknown model_type lama; the nearest known one is model_type llama",
        ),
        ("model.overrides.vocab_size=100", r"vocab_size must be at least the tokenizer's 280, got 100"),
    ],
)
def test_model_section_refusals(text, tmp_path, override, message):
    with pytest.raises(ConfigError, match=message):
        train_lm(configure(text, tmp_path / "run", "llama", override))


def test_goes_on_from_a_pretrained_model(text, tmp_path):
    first = train_lm(configure(text, tmp_path / "first"))
    values = configure(text, tmp_path / "second").to_dict()
    values["model"] = {"pretrained": first.model_dir}
    second = train_lm(load_config(values))
    assert second.heldout_bits_per_byte < first.heldout_bits_per_byte
    assert not (tmp_path / "second" / "tokenizer").exists()


def test_atomic_folder_is_whole_or_not_there(tmp_path):
    target = tmp_path / "made"

    def fail() -> None:
        with atomic_folder(target) as staging:
            (staging / "half").touch()
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert not target.exists()
    for content in ("old", "new"):
        with atomic_folder(target) as staging:
            (staging / content).touch()
    assert {path.name for path in target.iterdir()} == {"complete", "new"}
    assert [path.name for path in tmp_path.iterdir()] == ["made"]


def test_checkpoint_is_uploaded_from_where_it_stays(text, tmp_path, monkeypatch):
    """The upload runs in the background, so it must not begin before the folder has moved."""
    uploaded = []

    def push(self, folder: str) -> None:
        uploaded.append((Path(folder).name, is_complete(Path(folder))))

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self: None)
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "push_to_hub", lambda self, **kwargs: uploaded.append(kwargs))
    train_lm(configure(text, tmp_path / "run", "llama", "train.push_to_hub=true", "train.save_steps=4"))
    assert uploaded[:2] == [("checkpoint-4", True), ("checkpoint-7", True)]
    assert uploaded[2] == {"commit_message": "End of training"}
