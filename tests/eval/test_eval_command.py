"""`nalaformer eval`: lm-eval's flags, table and files."""

import json

import pytest
from eval_models import make_tokenizer, tiny_model

from nalaformer_hf import cli

ITEM = {"goal": "To warm a stone,", "sol1": "use the sun.", "sol2": "use a river.", "label": 0}


@pytest.fixture
def checkpoint(tmp_path):
    tiny_model("gated_delta").save_pretrained(tmp_path / "model")
    make_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def test_eval_lm_prints_lm_evals_table_and_writes_its_file(checkpoint, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    warnings: list[str] = []
    monkeypatch.setattr("lm_eval.models.huggingface.eval_logger.warning", warnings.append)
    (tmp_path / "data/piqa").mkdir(parents=True)
    (tmp_path / "data/piqa/validation.jsonl").write_text("\n".join([json.dumps(ITEM)] * 3))
    command = ["eval", "lm", "--model", checkpoint, "--data-dir", str(tmp_path / "data")]
    flags = ["--tasks", "piqa", "--device", "cpu", "--output_path", str(tmp_path / "out")]
    assert cli.main([*command, *flags]) == 0
    printed = capsys.readouterr().out
    assert "|Tasks|Version|Filter|n-shot| Metric |" in printed
    assert not warnings  # such as that of a type of model that lm-eval does not know
    (file,) = (tmp_path / "out").rglob("results_*.json")
    content = json.loads(file.read_text())
    assert content["config"]["model_args"] == {"pretrained": checkpoint, "state_reuse": True}
    assert content["versions"]["piqa"] == 1
    assert content["n-samples"]["piqa"]["effective"] == 3
    assert cli.main(["eval", "table", str(file), "--output", str(tmp_path / "table-0.1")]) == 0
    assert (tmp_path / "table-0.1.md").read_text() == capsys.readouterr().out
    assert (tmp_path / "table-0.1.png").exists()
    for folder in (".", ".."):
        assert cli.main(["eval", "table", str(file), "--output", folder]) == 1
        assert f"--output must be a file's name without its ending, got {folder}" in capsys.readouterr().err


def test_a_folder_without_items_is_refused_in_a_sentence(checkpoint, tmp_path, capsys):
    assert (
        cli.main(["eval", "lm", "--model", checkpoint, "--data-dir", str(tmp_path), "--tasks", "piqa"]) == 1
    )
    assert "has no files named like piqa/validation.jsonl" in capsys.readouterr().err


def test_unknown_model_args_are_refused_in_a_sentence(checkpoint, capsys):
    command = ["eval", "lm", "--model", checkpoint, "--tasks", "piqa", "--model_args", "foo=1"]
    assert cli.main(command) == 1
    assert "model_args: " in (error := capsys.readouterr().err)
    assert "unexpected keyword argument 'foo'" in error


@pytest.mark.parametrize(("flag", "value"), [("--include_path", "tasks"), ("--cache_requests", "true")])
def test_what_does_not_go_with_local_items_is_refused(checkpoint, tmp_path, capsys, flag, value):
    command = ["eval", "lm", "--model", checkpoint, "--data-dir", str(tmp_path), "--tasks", "piqa"]
    assert cli.main([*command, flag, value]) == 1
    assert f"--data-dir and {flag} exclude each other" in capsys.readouterr().err


def test_other_commands_know_their_own_flags_only(capsys):
    with pytest.raises(SystemExit, match="2"):
        cli.main(["presets", "--tasks", "piqa"])
    assert "unrecognized arguments: --tasks piqa" in capsys.readouterr().err
