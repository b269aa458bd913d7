"""lm-eval as it stands beside `nalaformer eval lm`: the same scores on the same local items, wikitext too."""

import json
import math
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from eval_models import make_tokenizer, phrase, tiny_model
from lm_eval.__main__ import cli_evaluate
from tolerances import LOGLIKELIHOOD

from nalaformer_hf import NaLaForCausalLM, cli
from nalaformer_hf.eval.local_tasks import write_local_tasks

# Pages as the dataset has them, and what the task's own clean-up makes of them.
PAGES = {
    " = Stones = \n\n the stone , under a river . \n": " = Stones =\n\nthe stone, under a river.\n",
    " = Clouds = \n the cloud walks @-@ over": " = Clouds =\nthe cloud walks-over",
}
# Where lm-eval looks for its own definitions; reading all of them takes ten seconds, and ours include theirs.
DEFAULTS = "lm_eval.tasks.manager.__file__"
# lm-eval's own command, where the package cannot be imported.
OUTSIDE = """
import sys
sys.modules["nalaformer_hf"] = None
import lm_eval.tasks.manager
from lm_eval.__main__ import cli_evaluate
lm_eval.tasks.manager.__file__ = sys.argv.pop()
cli_evaluate()
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Iterator[Path]:
    """A checkpoint with its tokenizer and code, items of two tasks, and their definitions."""
    root = tmp_path_factory.mktemp("harness")
    tiny_model("gated_delta").save_pretrained(root / "model")
    make_tokenizer().save_pretrained(root / "model")
    rng = random.Random(0)
    choices = [{"goal": phrase(rng, 5), "sol1": phrase(rng, 3), "sol2": phrase(rng, 4)} for _ in range(6)]
    items = {
        "piqa/validation": [choice | {"label": rng.randrange(2)} for choice in choices],
        "wikitext/test": [{"page": page} for page in PAGES],
    }
    for name, records in items.items():
        path = root / "data" / f"{name}.jsonl"
        path.parent.mkdir(parents=True)
        path.write_text("\n".join(map(json.dumps, records)))
    (root / "tasks").mkdir()
    write_local_tasks(root / "data", root / "tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("datasets.config.HF_DATASETS_CACHE", str(root / "cache"))
        patch.setattr(DEFAULTS, str(root / "none" / "manager.py"))
        yield root


def flags(output: Path) -> list[str]:
    options = ["--tasks", "piqa,wikitext", "--batch_size", "4", "--device", "cpu"]
    return [*options, "--log_samples", "--output_path", str(output)]


def plain_flags(folder: Path, output: Path) -> list[str]:
    """Flags of lm-eval's own command, with its own backend and the checkpoint's code."""
    model_args = f"pretrained={folder / 'model'},trust_remote_code=True"
    command = ["--model", "hf", "--model_args", model_args, "--include_path", str(folder / "tasks")]
    return command + flags(output)


def read_scores(output: Path) -> tuple[list[float], dict[str, dict[str, float]]]:
    """All log-likelihoods, by task and item, and the metrics of each task."""
    values = []
    for file in sorted(output.rglob("samples_*.jsonl")):
        samples = sorted(map(json.loads, file.read_text().splitlines()), key=lambda sample: sample["doc_id"])
        values += [float(number) for s in samples for number in re.findall(r"-\d+\.\d+", str(s["resps"]))]
    (file,) = output.rglob("results_*.json")
    return values, json.loads(file.read_text())["results"]


@pytest.fixture(scope="module")
def ours(folder) -> tuple[list[float], dict[str, dict[str, float]]]:
    """Scores of `nalaformer eval lm`."""
    command = ["eval", "lm", "--model", str(folder / "model"), "--data-dir", str(folder / "data")]
    assert cli.main([*command, *flags(folder / "ours")]) == 0
    return read_scores(folder / "ours")


def assert_same(actual, expected):
    values, metrics = actual
    assert len(values) == 2 * 6 + len(PAGES)
    assert values == pytest.approx(expected[0], abs=LOGLIKELIHOOD)
    assert metrics["piqa"]["acc,none"] == expected[1]["piqa"]["acc,none"]
    perplexity = "word_perplexity,none"
    assert metrics["wikitext"][perplexity] == pytest.approx(expected[1]["wikitext"][perplexity], rel=1e-4)


def test_wikitext_reads_local_pages_by_the_rolling_path(folder, ours):
    model, tokenizer = NaLaForCausalLM.from_pretrained(folder / "model"), make_tokenizer()
    totals = []
    for text in PAGES.values():
        ids = torch.tensor([[0, *tokenizer(text)["input_ids"]]])
        with torch.no_grad():
            log_probs = model(ids[:, :-1]).logits.log_softmax(-1)
        totals.append(log_probs.gather(-1, ids[:, 1:, None]).sum().item())
    values, metrics = ours
    assert values[-len(PAGES) :] == pytest.approx(totals, rel=1e-5)
    words = sum(len(re.split(r"\s+", page)) for page in PAGES)
    expected = math.exp(-sum(totals) / words)
    assert metrics["wikitext"]["word_perplexity,none"] == pytest.approx(expected, rel=1e-5)


def test_the_plain_command_scores_alike_beside_the_package(folder, ours, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["lm_eval", *plain_flags(folder, tmp_path / "out")])
    cli_evaluate()
    assert_same(read_scores(tmp_path / "out"), ours)


def test_the_plain_command_scores_alike_without_the_package(folder, ours, tmp_path):
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            OUTSIDE,
            *plain_flags(folder, tmp_path / "out"),
            str(tmp_path / "none" / "manager.py"),
        ],
        cwd=tmp_path,
        env=environment | {"HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"},
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same(read_scores(tmp_path / "out"), ours)
