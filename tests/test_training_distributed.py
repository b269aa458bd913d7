"""Two processes under `accelerate launch` train like one."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from nalaformer_hf.training.config import load_config
from nalaformer_hf.training.lm import train_lm

STEPS = 14  # more than an epoch


@pytest.fixture
def config(tmp_path, monkeypatch) -> Path:
    """A configuration in which a step has 8 blocks, however many processes share them."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    words = random.Random(0)
    texts = [" ".join(words.choices(["näla", "former", "delta"], k=words.randint(1, 60))) for _ in range(60)]
    (tmp_path / "text.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    path = tmp_path / "run.yaml"
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    data = {"files": str(tmp_path / "text.jsonl"), "block_size": 32, "sequences_per_step": 8}
    train = {
        "output_dir": str(tmp_path / "run"),
        "use_cpu": True,
        "max_steps": STEPS,
        "per_device_train_batch_size": 2,
        "learning_rate": 0.01,
        "logging_steps": 1,
        "eval_strategy": "steps",
        "eval_steps": 4,
        "report_to": "none",
        "disable_tqdm": True,
    }
    values = {"model": {"preset": "tiny", "overrides": shape}, "data": data, "train": train}
    path.write_text(json.dumps(values | {"tokenizer": {"vocab_size": 280}}))
    return path


def launch(config: Path, output_dir: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
    command += [
        "--num_machines",
        "1",
        "--mixed_precision",
        "no",
        "--dynamo_backend",
        "no",
        "--main_process_port",
        "0",
    ]
    command += ["-m", "nalaformer_hf.cli", "train", "lm", "--config", str(config), *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([*command, f"train.output_dir={output_dir}"], env=environment)


def losses(output_dir: Path, steps: int = STEPS) -> list[float]:
    logged = json.loads((output_dir / f"checkpoint-{steps}" / "trainer_state.json").read_text())[
        "log_history"
    ]
    return [row.get("loss", row.get("eval_bits_per_byte")) for row in logged]


STREAMED = ["data.streaming=true", "data.heldout_documents=10", "data.shuffle_buffer=10"]


@pytest.mark.parametrize("overrides", [[], pytest.param(STREAMED, marks=pytest.mark.slow)])
def test_two_processes_give_the_losses_of_one(config, tmp_path, overrides):
    assert launch(config, tmp_path / "two", *overrides).wait() == 0
    train_lm(load_config(config, overrides))
    expected = losses(tmp_path / "run")
    assert len(expected) == STEPS + 4
    assert losses(tmp_path / "two") == pytest.approx(expected, rel=1e-5)


@pytest.mark.slow
def test_signal_to_one_process_stops_both_and_the_run_resumes(config, tmp_path):
    steps = 300
    long = [f"train.max_steps={steps}", "train.save_steps=20", "train.save_total_limit=2"]
    run = launch(config, tmp_path / "two", *long)
    while not list((tmp_path / "two").glob("checkpoint-*")):
        time.sleep(0.05)
        assert run.poll() is None
    psutil.Process(run.pid).children(recursive=True)[-1].send_signal(signal.SIGINT)
    assert run.wait() != 0
    assert not (tmp_path / "two" / f"checkpoint-{steps}").exists()
    assert launch(config, tmp_path / "two", "--resume", *long).wait() == 0
    assert launch(config, tmp_path / "straight", *long).wait() == 0
    assert losses(tmp_path / "two", steps) == losses(tmp_path / "straight", steps)
