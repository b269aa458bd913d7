"""The console command: what it prints, returns and refuses."""

import json
import shutil
import signal

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from nalaformer_hf import NaLaConfig, NaLaForImageClassification, NaLaVisionConfig, __version__, cli, console
from nalaformer_hf.generation import cache_bytes, load, stream
from nalaformer_hf.training.tokenizer import train_tokenizer
from nalaformer_hf.training.trainer import LMTrainer

SHAPE = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
TEXT = "one two three four five six seven\n" * 40


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory) -> dict[str, str]:
    """A NaLa and a Llama with random weights, saved with a tokenizer."""
    tokenizer = train_tokenizer(iter([TEXT]), 300)
    special = {"vocab_size": len(tokenizer), "bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 1}
    folders = {}
    for config in (NaLaConfig(**SHAPE, **special), LlamaConfig(**SHAPE, **special)):
        folder = tmp_path_factory.mktemp(config.model_type)
        AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        folders[config.model_type] = str(folder)
    return folders


def test_version(capsys):
    with pytest.raises(SystemExit, match="0"):
        cli.main(["--version"])
    assert capsys.readouterr().out.strip() == f"nalaformer_hf {__version__}"


def test_presets(capsys):
    assert cli.main(["presets"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines][:3] == ["tiny", "small", "340m-linear"]
    model = AutoModelForCausalLM.from_config(NaLaConfig.from_preset("tiny"))
    assert f"{model.num_parameters():,} parameters" in lines[0]


@pytest.mark.parametrize("name", ["nala", "llama"])
def test_generate_streams_and_measures(checkpoints, capsys, tmp_path, name):
    stats = tmp_path / "stats.json"
    command = ["generate", "--model", checkpoints[name], "--prompt", "one two", "--max-new-tokens", "9"]
    assert cli.main([*command, "--temperature", "0", "--stats", str(stats)]) == 0
    printed = capsys.readouterr()
    figures = json.loads(stats.read_text())
    assert printed.out.strip("\n") == ("one two" + figures["text"]).strip("\n")
    assert f"{figures['num_new_tokens']} tokens after {figures['num_prompt_tokens']}" in printed.err
    model, tokenizer = load(checkpoints[name])
    ids = tokenizer("one two", return_tensors="pt")["input_ids"]
    expected = model.generate(ids, max_new_tokens=9, do_sample=False)[0, ids.shape[1] :]
    assert figures["text"] == tokenizer.decode(expected, skip_special_tokens=True)
    assert figures["num_new_tokens"] == len(expected)


def test_text_is_handed_on_while_it_is_made(checkpoints):
    model, tokenizer = load(checkpoints["nala"])
    seen = []
    model.generation_config.eos_token_id = None
    continuation = stream(model, tokenizer, "one", seen.append, max_new_tokens=20, seed=3)
    assert len(seen) == 21  # each token, and what was held back for want of the next ones
    assert "".join(seen) == continuation.text
    assert stream(model, tokenizer, "one", seen.append, max_new_tokens=20, seed=3).text == continuation.text


def test_sampling_follows_the_seed_and_an_empty_prompt_begins_a_document(checkpoints, capsys):
    outputs = []
    for seed in (1, 1, 2):
        assert cli.main(["generate", "--model", checkpoints["nala"], "--seed", str(seed)]) == 0
        outputs.append(capsys.readouterr().out)
    assert outputs[0] == outputs[1] != outputs[2]


def test_state_is_constant_for_nala_and_grows_for_llama(checkpoints):
    sizes = {}
    for name, folder in checkpoints.items():
        model, tokenizer = load(folder)
        runs = [stream(model, tokenizer, TEXT[:n], str, max_new_tokens=3, temperature=0) for n in (20, 400)]
        sizes[name] = [run.state_bytes for run in runs]
        assert runs[1].num_prompt_tokens > runs[0].num_prompt_tokens
    assert sizes["nala"][0] == sizes["nala"][1] > 0
    assert sizes["llama"][1] > 2 * sizes["llama"][0]


def test_cache_bytes_by_hand():
    config = LlamaConfig(**SHAPE)
    cache = DynamicCache(config=config)
    for layer in range(2):
        cache.update(torch.zeros(1, 2, 5, 16), torch.zeros(1, 2, 5, 16), layer)
    assert cache_bytes(cache) == 2 * 2 * (2 * 5 * 16) * 4


def test_train_lm_stops_resumes_and_reports(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    text = tmp_path / "text.parquet"
    Dataset.from_dict({"text": [f"{i} {TEXT}" for i in range(8)]}).to_parquet(text)
    overrides = [f"{section}={value}" for section, value in SHAPE.items()]
    command = ["train", "lm", "model.preset=tiny", *(f"model.overrides.{value}" for value in overrides)]
    command += [f"data.files={text}", "data.block_size=64", "tokenizer.vocab_size=280", "train.max_steps=3"]
    command += [f"train.output_dir={tmp_path / 'run'}", "train.use_cpu=true", "train.report_to=none"]
    training_step = LMTrainer.training_step

    def signalled(self, *args, **kwargs):
        if self.state.global_step == 1:
            signal.raise_signal(signal.SIGINT)
        return training_step(self, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(LMTrainer, "training_step", signalled)
        assert cli.main(command) == 130
    assert f"stopped at {tmp_path / 'run' / 'checkpoint-2'}; --resume goes on" in capsys.readouterr().err
    assert cli.main(command) == 1
    assert "holds a run: resume it" in capsys.readouterr().err
    assert cli.main([*command, "--resume", "train.logging_steps=3"]) == 0  # overrides on both sides
    assert f"{tmp_path / 'run' / 'model'}: " in capsys.readouterr().err
    for model, message in (
        (tmp_path / "run", f"is the folder of a run; its model is {tmp_path / 'run' / 'model'}"),
        (tmp_path / "nowhere", "there is no such folder"),
    ):
        assert cli.main(["generate", "--model", str(model), "--prompt", "x"]) == 1
        assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        cli.main([*command, "--resumee", "train.logging_steps=3"])
    assert "unrecognized arguments: --resumee" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (
            ["train", "lm", "train.learning_rat=1"],
            "error: unknown key train.learning_rat; the nearest known one",
        ),
        (["train", "lm", "train.seed=x"], "error: Field 'train.seed' expected int, got str (value: 'x')"),
        (
            ["train", "lm", "--config", "no-such.yaml"],
            "error: no-such.yaml is neither a file nor one of the recipes",
        ),
        (["generate", "--model", "./no-such-folder"], "no-such-folder"),
    ],
)
def test_errors_of_the_user_are_a_sentence(command, message, capsys):
    minimal = ["model.preset=tiny", "data.corpus=stdlib", "train.output_dir=out"]
    assert cli.main([*command, *minimal] if command[0] == "train" else command) == 1
    printed = capsys.readouterr().err
    assert message in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "-1", "temperature and top_k must not be negative"),
        ("--top-p", "2", "top_p must be above 0 and at most 1"),
        ("--max-new-tokens", "0", "`max_new_tokens` must be greater than 0"),
        ("--device", "abacus", "device must be one that torch finds here, such as 'cpu', got 'abacus'"),
        ("--device", "meta", "device must be one that torch finds here, such as 'cpu', got 'meta'"),
        ("--dtype", "int3", "dtype must be one of auto, float32, bfloat16, float16, got 'int3'"),
    ],
)
def test_generation_options_out_of_range(checkpoints, capsys, option, value, message):
    assert cli.main(["generate", "--model", checkpoints["nala"], option, value]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--temperature", "inf", "temperature and top_k must not be negative"),
        ("--seed", "-1", "seed must be between 0 and 2\\*\\*64 - 1, got -1"),
        ("--max-new-tokens", "-1", "`max_new_tokens` must be greater than 0"),
    ],
)
def test_sampling_options_out_of_range(checkpoints, option, value, message):
    model, tokenizer = load(checkpoints["nala"])
    options = {option.removeprefix("--").replace("-", "_"): float(value) if value == "inf" else int(value)}
    with pytest.raises(ValueError, match=message):
        stream(model, tokenizer, "one", str, **options)


@pytest.fixture(scope="module")
def broken(checkpoints, tmp_path_factory) -> dict[str, str]:
    """Folders that hold no language model with a tokenizer, each in its own way."""
    folder = tmp_path_factory.mktemp("broken")
    for name in ("no tokenizer", "broken weights", "bad field"):
        shutil.copytree(checkpoints["nala"], folder / name)
    for path in (folder / "no tokenizer").glob("tokenizer*"):
        path.unlink()
    (folder / "broken weights" / "model.safetensors").write_bytes(b"no weights" * 30)
    config = folder / "bad field" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "rms_norm_eps": -1}))
    (folder / "empty").mkdir()
    sizes = {"hidden_sizes": [8], "depths": [1], "num_attention_heads": [1], "mlp_ratios": [1.0]}
    vision = NaLaVisionConfig(**sizes, mixers=["linear"], layer_scale_init_values=None)
    NaLaForImageClassification(vision).save_pretrained(folder / "vision")
    return {path.name: str(path) for path in folder.iterdir()}


@pytest.mark.parametrize(
    "command", [["generate"], ["analyze", "norm", "--tokens", "40"]], ids=["generate", "analyze"]
)
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("no tokenizer", "a tokenizer cannot be loaded from"),
        ("broken weights", "a causal language model cannot be loaded from"),
        ("bad field", "rms_norm_eps must be finite and positive, got -1"),
        ("empty", "cannot be loaded from"),
        ("vision", "cannot be loaded from"),
        ("absent", "there is no such folder"),
    ],
)
def test_what_is_no_language_model_is_a_sentence(broken, command, name, message, capsys, tmp_path):
    options = ["--output", str(tmp_path)] if command[0] == "analyze" else []
    model = broken.get(name, str(tmp_path / name))
    assert cli.main([*command, "--model", model, *options]) == 1
    assert message in capsys.readouterr().err


def test_a_binary_file_is_no_text_to_analyze(checkpoints, capsys, tmp_path):
    path = tmp_path / "bytes"
    path.write_bytes(bytes(range(256)))
    command = ["analyze", "norm", "--model", checkpoints["nala"], "--output", str(tmp_path)]
    assert cli.main([*command, "--text", str(path)]) == 1
    assert f"--text must be a UTF-8 text, got {path}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ({"preset": "tinny"}, "no preset 'tinny'; did you mean 'tiny'"),
        (
            {"preset": "tiny", "overrides.rms_norm_eps": -1},
            "rms_norm_eps must be finite and positive, got -1",
        ),
        ({"config": "VISION"}, "model must be of the run's kind, got the architecture 'nala_vision'"),
        ({"pretrained": "VISION"}, "model must be of the run's kind, got the architecture 'nala_vision'"),
        ({"pretrained": "EMPTY"}, "model.pretrained: a configuration cannot be loaded from"),
    ],
)
def test_the_model_is_checked_before_data_are_read(broken, model, message, capsys, tmp_path, monkeypatch):
    monkeypatch.setattr("nalaformer_hf.training.lm.load_corpus", lambda *_: pytest.fail("data were read"))
    places = {"VISION": broken["vision"], "EMPTY": broken["empty"]}
    command = ["train", "lm", *(f"model.{name}={places.get(value, value)}" for name, value in model.items())]
    output_dir = tmp_path / "run"
    assert (
        cli.main([*command, "data.corpus=stdlib", f"train.output_dir={output_dir}", "train.use_cpu=true"])
        == 1
    )
    assert message in capsys.readouterr().err
    assert not output_dir.exists()


@pytest.mark.parametrize(("command", "extra"), [(["train", "lm"], "train"), (["demo"], "eval")])
def test_missing_extra_is_named(command, extra, capsys, monkeypatch):
    monkeypatch.setitem(console.EXTRAS, extra, ("no_such_module",))
    assert cli.main(command) == 1
    printed = capsys.readouterr().err
    assert "no_such_module" in printed
    assert f"pip install 'nalaformer-hf[{extra}]'" in printed
