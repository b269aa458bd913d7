"""The converter: all five variants there and back, and what it refuses."""

import argparse

import pytest
import torch
from published import TINY, VARIANTS, official_keys, published_state
from safetensors.torch import load_file, save_file
from slow_reference import SlowNaLaFormer

from nalaformer_hf import NaLaForImageClassification, NaLaVisionConfig, cli
from nalaformer_hf.convert import from_published, read_checkpoint, to_published


@pytest.fixture
def state() -> dict[str, torch.Tensor]:
    return published_state(SlowNaLaFormer(**TINY), 1)


@pytest.mark.parametrize("name", VARIANTS)
def test_published_names_shapes_and_counts_of_the_presets(name):
    """And each preset is the published variant: its parameters, its drop path."""
    config = NaLaVisionConfig.from_preset(name.lower())
    with torch.device("meta"):
        model = NaLaForImageClassification(config)
    published = {key: [list(value.shape), str(value.dtype)[6:]] for key, value in to_published(model).items()}
    official = official_keys()[name]
    assert published == {key: [shape, dtype] for key, shape, dtype, _ in official["keys"]}
    assert model.num_parameters() == official["num_parameters"]
    rates = [block.drop_path_rate for stage in model.model.layers for block in stage.blocks]
    assert rates == pytest.approx(official["drop_path"], abs=1e-6)


def test_there_and_back_changes_nothing(state):
    returned = to_published(from_published(state))
    assert returned.keys() == state.keys()
    assert all(torch.equal(returned[key], value) for key, value in state.items())


def test_sizes_come_from_the_tensors():
    arguments = {
        "dims": [8, 24, 32],
        "depths": [1, 3, 2],
        "num_heads": [2, 3, 1],
        "mlp_ratios": [2.0, 3.3333333333333335, 1.5],
        "projection_dim": 12,
        "num_classes": 3,
        "mixers": ("softmax", "linear", "linear"),
    }
    slow = SlowNaLaFormer(**arguments).eval()
    with pytest.raises(ValueError, match="do not tell the mixers of 3 stages"):
        from_published(slow.state_dict())
    config = NaLaVisionConfig(
        hidden_sizes=[8, 24, 32],
        depths=[1, 3, 2],
        num_attention_heads=[2, 3, 1],
        mlp_ratios=[2.0, 80 / 24, 1.5],
        mixers=list(arguments["mixers"]),
        layer_scale_init_values=None,
        projection_dim=12,
        num_labels=3,
    )
    images = torch.randn(2, 3, 37, 50)
    with torch.no_grad():
        logits = from_published(slow.state_dict(), config)(images).logits
        torch.testing.assert_close(logits, slow(images), rtol=0, atol=1e-5)


def test_the_presets_are_recognised():
    with torch.device("meta"):
        b = NaLaForImageClassification(NaLaVisionConfig.from_preset("b", num_labels=5))
    state = {key: torch.zeros(()).expand(value.shape) for key, value in to_published(b).items()}
    angles = {key: value for key, value in to_published(b).items() if key.endswith("angle")}
    config = from_published(state | angles).config
    assert (config.drop_path_rate, config.layer_scale_init_values) == (0.4, [1.0, 1.0, 1e-6, 1e-6])
    assert config.num_labels == 5


def test_other_names_and_shapes_are_listed(state):
    state["layers.0.stranger"] = state.pop("layers.1.blocks.0.attn.ln.bias")
    state["layers.2.blocks.0.ffn.fc2.weight"] = state["layers.2.blocks.0.ffn.fc2.weight"].T
    state["layers.3.RoPE.angle"] = state["layers.3.RoPE.angle"] * 2
    with pytest.raises(ValueError, match="state_dict") as caught:
        from_published(state)
    message = str(caught.value)
    assert "missing: layers.1.blocks.0.attn.ln.bias;" in message
    assert "unknown: layers.0.stranger;" in message
    assert "layers.2.blocks.0.ffn.fc2.weight (224, 64) (wanted (64, 224))" in message
    assert "linspace(0, 1, D/4), each twice: layers.3.RoPE.angle." in message


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_checkpoint_that_was_cast_is_taken(state, dtype):
    cast = {key: value.to(dtype) if value.is_floating_point() else value for key, value in state.items()}
    weight = from_published(cast).head.weight
    assert torch.equal(weight.flatten(), cast["head.weight"].float().flatten())


def test_another_variant_is_refused(state):
    with pytest.raises(ValueError, match=r"another variant: hidden_sizes \[32, 64, 128, 384\], tensors \[16"):
        from_published(state, NaLaVisionConfig())
    with pytest.raises(
        ValueError, match=r"no published vision checkpoint; .* lacks patch_embed.proj.0.weight"
    ):
        from_published({"some.weight": torch.ones(1)})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"stem": "patch"}, "stem='conv' only, got 'patch'"),
        ({"use_lepe": False}, "use_lepe=True only, got False"),
        ({"use_output_gate": False}, "use_output_gate=True only"),
        ({"projection_dim": None}, "projection head"),
    ],
)
def test_a_model_with_other_parts_has_no_published_names(change, message):
    with torch.device("meta"):
        model = NaLaForImageClassification(NaLaVisionConfig(**change))
    with pytest.raises(ValueError, match=message):
        to_published(model)


def test_training_checkpoint_is_read_safely(state, tmp_path):
    ema = {key: value + 1 for key, value in state.items()}
    file = tmp_path / "checkpoint.pth"
    torch.save({"model": state, "model_ema": ema, "args": argparse.Namespace(lr=1e-3), "epoch": 3}, file)
    assert torch.equal(read_checkpoint(file)["head.bias"], state["head.bias"])
    assert torch.equal(read_checkpoint(file, "model_ema")["head.bias"], ema["head.bias"])
    torch.save(state, tmp_path / "bare.pth")
    assert read_checkpoint(tmp_path / "bare.pth").keys() == state.keys()
    with pytest.raises(ValueError, match="has no 'model_ema'; it has neither"):
        read_checkpoint(tmp_path / "bare.pth", "model_ema")


class Harmful:
    def __reduce__(self):
        return (print, ("executed",))


def test_code_in_a_checkpoint_is_not_executed(tmp_path, capsys):
    torch.save({"model": Harmful()}, tmp_path / "bad.pth")
    with pytest.raises(ValueError, match="no weights that can be read safely"):
        read_checkpoint(tmp_path / "bad.pth")
    (tmp_path / "bad.safetensors").write_bytes(b"no")
    with pytest.raises(ValueError, match="no weights that can be read safely"):
        read_checkpoint(tmp_path / "bad.safetensors")
    torch.save({"model": [1, 2]}, tmp_path / "list.pth")
    with pytest.raises(ValueError, match="must hold a state dict"):
        read_checkpoint(tmp_path / "list.pth")
    assert "executed" not in capsys.readouterr().out


def test_command_converts_there_and_back(state, tmp_path, capsys):
    source, folder, back = tmp_path / "published.safetensors", tmp_path / "ours", tmp_path / "back.pth"
    save_file(state, source)
    assert cli.main(["convert", str(source), str(folder), "--mixers", *["linear"] * 4]) == 0
    model = NaLaForImageClassification.from_pretrained(folder)
    assert model.config.mixers == ["linear"] * 4
    assert (folder / "preprocessor_config.json").is_file()
    assert cli.main(["convert", str(folder), str(back)]) == 0
    returned = read_checkpoint(back)
    assert all(torch.equal(returned[key], value) for key, value in state.items())
    assert cli.main(["convert", str(folder), str(tmp_path / "back.safetensors")]) == 0
    assert load_file(tmp_path / "back.safetensors").keys() == state.keys()
    capsys.readouterr()
    assert cli.main(["convert", str(source), str(tmp_path / "no"), "--weights", "model_ema"]) == 1
    assert "has no 'model_ema'" in capsys.readouterr().err
    assert cli.main(["convert", str(folder), str(tmp_path / "back.bin")]) == 1
    assert "destination must end in .safetensors or .pth" in capsys.readouterr().err
    assert not (tmp_path / "no").exists()
