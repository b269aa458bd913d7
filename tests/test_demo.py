"""The demo, small: interrupted in each training, resumed, and all that it promises left behind."""

import json
import random
import signal

import pytest
from transformers import AutoConfig

from nalaformer_hf.modeling import configuration_nala
from nalaformer_hf.training.demo import PROGRESS_FILE, DemoSettings, run_demo
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.trainer import LMTrainer

TOY = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "vocab_size": 300,
}


@pytest.fixture
def settings(tmp_path, monkeypatch) -> DemoSettings:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setitem(configuration_nala.PRESETS, "toy", TOY)
    words = random.Random(0)
    lines = [" ".join(words.choices(["def", "return", "self", "x"], k=12)) for _ in range(1500)]
    (tmp_path / "text.txt").write_text("\n".join(lines))
    return DemoSettings(preset="toy", steps=4, text_file=str(tmp_path / "text.txt"))


def test_demo_is_interrupted_resumed_and_complete(settings, tmp_path, monkeypatch, capfd):
    folder = tmp_path / "demo"
    training_step = LMTrainer.training_step
    signals = {"nala": 1, "llama": 2}  # the step in which each training is interrupted, once

    def signalled(self, *args, **kwargs):
        model = self.unwrapped_model.config.model_type
        if signals.get(model) == self.state.global_step:
            del signals[model]
            signal.raise_signal(signal.SIGINT)
        return training_step(self, *args, **kwargs)

    monkeypatch.setattr(LMTrainer, "training_step", signalled)
    assert not run_demo(settings, folder)
    assert not run_demo(settings, folder, resume=True)
    assert list(json.loads((folder / PROGRESS_FILE).read_text())["results"]) == ["nala"]
    assert run_demo(settings, folder, resume=True)
    results = json.loads((folder / PROGRESS_FILE).read_text())["results"]
    assert results["nala"]["num_parameters"] == pytest.approx(results["llama"]["num_parameters"], rel=0.05)
    for name in ("nala", "llama"):
        assert results[name]["steps"] == 4
        assert results[f"generate {name}"]["state_bytes"] > 0
        assert set(results[f"score {name}"]) == {"python_lines", "python_words"}
        assert 0 <= results[f"score {name}"]["python_lines"]["acc"] <= 1
        assert AutoConfig.from_pretrained(folder / name / "model").model_type == name
    assert (folder / "loss_curve.png").read_bytes().startswith(b"\x89PNG")
    printed = capfd.readouterr().out
    assert "class Counter" in printed
    assert results["generate nala"]["text"].strip() in printed
    for figure in ("held-out bits per byte before", "generated tokens/s", "state, bytes", "python_lines acc"):
        assert figure in printed

    with monkeypatch.context() as patch:
        patch.setattr("nalaformer_hf.training.demo.train_lm", None)  # nothing that is done is done again
        assert run_demo(settings, folder, resume=True)
    with pytest.raises(ConfigError, match="a demo with other settings"):
        run_demo(DemoSettings(preset="toy", steps=5, text_file=settings.text_file), folder, resume=True)


def test_demo_does_not_touch_other_folders(settings, tmp_path):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="holds something that is not a demo"):
        run_demo(settings, tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.tex").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"preset": "tinny"}, "unknown preset tinny; the nearest known one is preset tiny"),
        ({"steps": 0}, "steps must be at least 1, got 0"),
        ({"text_file": "no-such.txt"}, "text_file must be a file, got no-such.txt"),
    ],
)
def test_settings_are_checked_before_anything_is_replaced(change, message):
    with pytest.raises(ConfigError, match=message):
        DemoSettings(**change)
