"""The configuration of a training run: files, overrides, and what is refused in words."""

import pytest

from nalaformer_hf.training.config import load_config
from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.settings import recipe_names

MINIMAL = {"model": {"preset": "tiny"}, "data": {"corpus": "stdlib"}, "train": {"output_dir": "out"}}


def test_file_and_overrides(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text("model: {preset: tiny}\ndata: {files: a.txt}\ntrain: {output_dir: out, max_steps: 5}\n")
    config = load_config(
        path,
        [
            "train.learning_rate=1e-3",
            "data.files=[b.txt, c.txt]",
            "train.max_steps=7",
            "train.max_grad_norm=2",
        ],
    )
    assert config.train["learning_rate"] == 1e-3
    assert config.train["max_steps"] == 7
    assert config.train["max_grad_norm"] == 2.0
    assert isinstance(config.train["max_grad_norm"], float)
    assert config.data.files == ["b.txt", "c.txt"]
    assert config.model.preset == "tiny"
    assert load_config(config.to_dict()) == config


def test_a_strategy_of_no_needs_no_quotes(tmp_path):
    overrides = ["model.preset=tiny", f"train.output_dir={tmp_path}", "train.eval_strategy=no"]
    config = load_config({"data": {"files": ["text"]}, "train": {"eval_strategy": "steps"}}, overrides)
    assert config.training_arguments().eval_strategy == "no"


def test_every_training_argument_is_reachable(tmp_path):
    config = load_config(
        MINIMAL, [f"train.output_dir={tmp_path}", "train.optim=adafactor", "train.use_cpu=true"]
    )
    arguments = config.training_arguments()
    assert arguments.optim == "adafactor"
    assert arguments.report_to == ["tensorboard"]


def test_sequences_per_step_sets_the_accumulation(tmp_path):
    overrides = [f"train.output_dir={tmp_path}", "train.use_cpu=true", "train.per_device_train_batch_size=4"]
    assert (
        load_config(MINIMAL, [*overrides, "data.sequences_per_step=12"])
        .training_arguments()
        .gradient_accumulation_steps
        == 3
    )
    with pytest.raises(ConfigError, match=r"sequences_per_step must be a multiple of 4.*got 10"):
        load_config(MINIMAL, [*overrides, "data.sequences_per_step=10"]).training_arguments()


@pytest.mark.parametrize(
    ("override", "error", "message"),
    [
        ("train.learning_rat=1", ConfigError, r"unknown key train\.learning_rat.*train\.learning_rate"),
        ("data.file=a", ConfigError, r"unknown key data\.file; .*data\.files"),
        ("modle.preset=tiny", ConfigError, "unknown key modle; the nearest known one is key model"),
        ("train.learning_rate=fast", TypeError, r"train\.learning_rate.*expected float, got str.*fast"),
        ("train.max_steps=1.5", TypeError, r"train\.max_steps.*expected int, got float"),
        ("train.max_steps=true", TypeError, r"train\.max_steps.*expected int, got bool"),
        ("data.corpus=wikipedia", TypeError, r"data\.corpus.*stdlib"),
        ("data=stdlib", TypeError, "section data must be a mapping"),
        ("data.files=a.txt", ConfigError, r"exactly one of data\.files, data\.hub, data\.corpus"),
        ("model.preset=null", ConfigError, r"exactly one of model\.preset.*got none"),
        ("data.hub_config=en", ConfigError, r"data\.hub_config belongs to data\.hub"),
        ("data.heldout_fraction=1.0", ConfigError, r"between 0 and 1, got 1\.0"),
        ("data.block_size=1", ConfigError, r"data\.block_size must be at least 2, got 1"),
        ("data.shuffle_buffer=5", ConfigError, r"data\.shuffle_buffer needs data\.streaming"),
        ("data.streaming=true", ConfigError, r"data\.streaming cannot be combined with data\.corpus"),
        ("tokenizer.vocab_size=100", ConfigError, r"tokenizer\.vocab_size must be at least 258"),
        ("train.output_dir=null", ConfigError, r"train\.output_dir must name the folder"),
        ("train.remove_unused_columns=true", ConfigError, r"train\.remove_unused_columns must be false"),
        ("train.learning_rate", ConfigError, "form key=value"),
    ],
)
def test_refusals(override, error, message):
    with pytest.raises(error, match=message):
        load_config(MINIMAL, [override])


def test_stream_needs_max_steps_and_a_bounded_heldout_part():
    values = {"model": {"preset": "tiny"}, "data": {"hub": "some/set", "streaming": True}}
    values["train"] = {"output_dir": "out"}
    with pytest.raises(ConfigError, match=r"data\.heldout_documents must be set"):
        load_config(values)
    with pytest.raises(ConfigError, match=r"train\.max_steps must be set"):
        load_config(values, ["data.heldout_documents=10"])


def test_recipe_that_does_not_exist():
    with pytest.raises(ConfigError, match="neither a file nor one of the recipes"):
        load_config("340m-quadratic")


@pytest.mark.parametrize("name", recipe_names("lm"))
def test_recipe_is_the_published_one(name, tmp_path):
    config = load_config(name, [f"train.output_dir={tmp_path}", "train.bf16=false", "train.use_cpu=true"])
    arguments = config.training_arguments()
    tokens = config.data.sequences_per_step * config.data.block_size
    assert tokens == 2**19
    assert 15e9 - tokens < arguments.max_steps * tokens <= 15e9 + tokens
    assert arguments.warmup_steps * tokens == pytest.approx(0.5e9, rel=1e-3)
    assert (arguments.learning_rate, arguments.weight_decay, arguments.max_grad_norm) == (3e-4, 0.01, 1.0)
    assert arguments.lr_scheduler_type == "cosine_with_min_lr"
    assert arguments.lr_scheduler_kwargs == {"min_lr": 3e-5}


@pytest.mark.parametrize(
    "content", [bytes(range(256)), b"- a\n- b\n", b"a: [b\n"], ids=["bytes", "list", "broken"]
)
def test_a_file_that_is_no_configuration_is_refused(content, tmp_path):
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match="the configuration cannot be read: "):
        load_config(path)
