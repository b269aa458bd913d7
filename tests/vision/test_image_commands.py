"""`nalaformer train image` and `nalaformer eval image`: what they print, return, write and refuse."""

import json

import pytest

from nalaformer_hf import cli, console


def test_digits_are_trained_and_scored(tmp_path, capsys, monkeypatch):
    run, report = tmp_path / "run", tmp_path / "deep" / "scores.json"
    command = ["train", "image", "--config", "digits", "train.max_steps=3", "train.report_to=none"]
    command += [f"train.output_dir={run}", "train.use_cpu=true", "train.per_device_train_batch_size=16"]
    assert cli.main(command) == 0
    result = json.loads((run / "result.json").read_text())
    assert f"{run / 'model'}: {result['top1']:.2%} of the held-out images right" in capsys.readouterr().err
    scoring = ["eval", "image", "--model", str(run / "model"), "--data", "digits", "--batch-size", "100"]
    assert cli.main([*scoring, "--output", str(report)]) == 0
    figures = json.loads(report.read_text())
    assert list(report.parent.iterdir()) == [report]
    assert (figures["split"], figures["num_images"], figures["top1"]) == ("test", 360, result["top1"])
    printed = capsys.readouterr()
    assert printed.out == f"top-1 {result['top1']:.2%}, top-5 {result['top5']:.2%} of 360 images\n"
    assert "images" in printed.err  # the progress bar
    for option, value, message in (
        ("--split", "dev", "data.split: digits have the splits train and test, got 'dev'"),
        ("--batch-size", "0", "batch_size must be at least 1, got 0"),
        ("--device", "abacus", "device must be one that torch finds here"),
        ("--dtype", "int3", "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
        ("--data", "./no-such-folder", "no-such-folder"),
    ):
        assert cli.main([*scoring, option, value]) == 1
        assert message in capsys.readouterr().err


@pytest.mark.slow
def test_digits_recipe_learns_the_digits(tmp_path, capsys):
    """The whole recipe: over 97 % of the test images, in minutes on two cores."""
    overrides = [f"train.output_dir={tmp_path / 'run'}", "train.use_cpu=true", "train.report_to=none"]
    assert cli.main(["train", "image", "--config", "digits", *overrides]) == 0
    assert json.loads((tmp_path / "run" / "result.json").read_text())["top1"] > 0.97


def test_errors_are_a_sentence(capsys):
    assert cli.main(["train", "image", "--config", "imagenet-3000"]) == 1
    assert (
        "neither a file nor one of the recipes digits, imagenet-300, imagenet-320" in capsys.readouterr().err
    )


@pytest.mark.parametrize("command", ["train image", "eval image --model x --data digits"])
def test_missing_extra_is_named(command, capsys, monkeypatch):
    monkeypatch.setitem(console.EXTRAS, "vision", ("no_such_module",))
    assert cli.main(command.split()) == 1
    assert "pip install 'nalaformer-hf[vision]'" in capsys.readouterr().err
