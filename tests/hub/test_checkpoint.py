"""What `save_pretrained` writes, and what `from_pretrained` makes of files that are not quite that."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from hub_models import small_config
from hub_server import metadata_errors
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

import nalaformer_hf.modeling
from nalaformer_hf import (
    NaLaForCausalLM,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
)

MODELING = Path(nalaformer_hf.modeling.__file__).parent
PIPELINE_TAGS = {
    NaLaModel: "feature-extraction",
    NaLaForCausalLM: "text-generation",
    NaLaForSequenceClassification: "text-classification",
    NaLaForTokenClassification: "token-classification",
    NaLaForQuestionAnswering: "question-answering",
}
FACTS = {"optimizer steps": 400, "text": "two\nlines", "language": "en", "license": "apache-2.0"}


@pytest.mark.parametrize("model_class", PIPELINE_TAGS)
def test_checkpoint_is_self_contained(model_class: type, tmp_path: Path) -> None:
    model_class(small_config()).save_pretrained(tmp_path)
    files = {file.name for file in tmp_path.iterdir()}
    code = {file.name for file in MODELING.glob("*.py") if "vision" not in file.name} - {"__init__.py"}
    generation = {"generation_config.json"} if model_class is NaLaForCausalLM else set()
    assert files == code | generation | {"config.json", "model.safetensors", "README.md"}
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["auto_map"] == {
        "AutoConfig": "configuration_nala.NaLaConfig",
        "AutoModel": "modeling_nala.NaLaModel",
        "AutoModelForCausalLM": "modeling_nala.NaLaForCausalLM",
        "AutoModelForQuestionAnswering": "modeling_nala.NaLaForQuestionAnswering",
        "AutoModelForSequenceClassification": "modeling_nala.NaLaForSequenceClassification",
        "AutoModelForTokenClassification": "modeling_nala.NaLaForTokenClassification",
    }
    readme = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert not metadata_errors(readme)
    assert ModelCard(readme).data.pipeline_tag == PIPELINE_TAGS[model_class]


def test_card_describes_the_model(tmp_path: Path) -> None:
    layer_types = ["nala_attention", "full_attention"]
    model = NaLaForCausalLM(small_config(mixer="gated_delta", layer_types=layer_types, training_facts=FACTS))
    model.save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    lines = card.text.splitlines()
    assert f"- parameters: {sum(weight.numel() for weight in model.parameters()):,} in float32" in lines
    assert "- layers: 2, of which 1 softmax attention" in lines
    assert "- mixer: gated_delta, causal" in lines
    assert "- optimizer steps: 400" in lines
    assert "- text: two lines" in lines
    assert "a delta-rule state cannot be rolled back" in card.text
    assert not [line for line in lines if line.startswith(("- language", "- license"))]
    assert (card.data.language, card.data.license) == ("en", "apache-2.0")
    assert NaLaForCausalLM.from_pretrained(tmp_path).config.training_facts == FACTS


def test_card_claims_nothing_that_is_not_known(tmp_path: Path) -> None:
    NaLaForSequenceClassification(small_config(is_causal=False)).save_pretrained(tmp_path)
    card = ModelCard.load(tmp_path / "README.md")
    assert "No training facts were recorded with this checkpoint." in card.text
    assert "state" not in card.text
    assert card.data.license is None
    assert card.data.language is None


@pytest.mark.parametrize(
    "written", ["# Mine\n", "---\nlicense: mit\n---\nMine\r\n", "---\n[: not yaml\n---\nMine\n"]
)
def test_card_that_the_user_wrote_stays(written: str, tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    readme.write_bytes(written.encode())
    NaLaModel(small_config()).save_pretrained(tmp_path)
    assert readme.read_bytes() == written.encode()


def test_card_is_rewritten_until_it_is_edited(tmp_path: Path) -> None:
    readme = tmp_path / "README.md"
    model = NaLaForCausalLM(small_config())
    model.save_pretrained(tmp_path)
    # Metadata that was added is kept; other line endings are no edit.
    readme.write_bytes(
        readme.read_bytes().replace(b"---\n", b"---\nlicense: mit\n", 1).replace(b"\n", b"\r\n")
    )
    model.config.training_facts = {"optimizer steps": 400}
    model.save_pretrained(tmp_path)
    card = ModelCard.load(readme)
    assert card.data.license == "mit"
    assert "- optimizer steps: 400" in card.text
    edited = readme.read_text(encoding="utf-8").replace("## Limits", "## What it cannot do")
    readme.write_text(edited, encoding="utf-8")
    model.config.training_facts = {"optimizer steps": 800}
    model.save_pretrained(tmp_path)
    assert readme.read_text(encoding="utf-8") == edited


def test_class_of_the_users_own_maps_to_itself_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its file imports the package, so that the package's own modules are not carried, and not promised."""
    (tmp_path / "their_model.py").write_text(
        "from nalaformer_hf import NaLaForCausalLM\n\n\nclass TheirLM(NaLaForCausalLM):\n    pass\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import their_model

    monkeypatch.setitem(sys.modules, "their_model", their_model)
    their_model.TheirLM(small_config()).save_pretrained(tmp_path / "saved")
    auto_map = json.loads((tmp_path / "saved" / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": "configuration_nala.NaLaConfig",
        "AutoModelForCausalLM": "their_model.TheirLM",
    }
    assert (tmp_path / "saved" / "their_model.py").is_file()


@pytest.mark.parametrize("mixer", ["linear", "delta", "gated_delta"])
def test_missing_weights_are_made_anew_and_reported(mixer: str, tmp_path: Path) -> None:
    NaLaForCausalLM(small_config(mixer=mixer)).save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    kept = load_file(file)
    missing = {name for name in kept if name.startswith(("model.layers.1", "lm_head", "model.norm"))}
    for name in missing:
        del kept[name]
    save_file(kept | {"stranger": torch.ones(2)}, file, metadata={"format": "pt"})
    # What an uninitialised tensor of the same size would hold is likely to be these NaNs.
    rubbish = [torch.full_like(weight, torch.nan) for weight in kept.values() for _ in range(4)]
    del rubbish
    loaded, info = NaLaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == missing
    assert info["unexpected_keys"] == {"stranger"}
    weights = loaded.state_dict()
    assert all(torch.equal(weights[name], weight) for name, weight in kept.items())
    for name in missing:
        assert is_newly_made(name, weights[name]), name


def is_newly_made(name: str, weight: torch.Tensor) -> bool:
    """Whether the weight is one that a new model of `small_config` may have."""
    if name.endswith("A_log"):
        return bool(((weight >= 0) & (weight <= math.log(16))).all())
    if name.endswith("dt_bias"):
        steps = F.softplus(weight)
        return bool(((steps > 0.0009) & (steps < 0.11)).all())
    if weight.ndim == 1:
        return bool((weight == (0 if name.endswith("bias") else 1)).all())
    spread = 0.5 / math.sqrt(3) if "conv1d" in name else 0.3
    return 0.6 < weight.std().item() / spread < 1.6


def test_tied_weights_stay_tied(tmp_path: Path) -> None:
    model = NaLaForCausalLM(small_config(tie_word_embeddings=True))
    model.save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    loaded, info = NaLaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not info["missing_keys"]
    assert loaded.lm_head.weight is loaded.model.embeddings.weight
    assert torch.equal(loaded.lm_head.weight, model.lm_head.weight)


def test_shards_hold_the_same_and_are_replaced(tmp_path: Path) -> None:
    model = NaLaForCausalLM(small_config())
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 2
    loaded = NaLaForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(weight, loaded[name]) for name, weight in model.state_dict().items())
    model.save_pretrained(tmp_path, max_shard_size="50KB")
    assert 1 < len(list(tmp_path.glob("model-*.safetensors"))) < len(shards)


def test_loads_in_bfloat16(tmp_path: Path) -> None:
    model = NaLaForCausalLM(small_config(mixer="gated_delta"))
    model.save_pretrained(tmp_path)
    loaded = NaLaForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {weight.dtype for weight in loaded.parameters()} == {torch.bfloat16}
    ids = torch.arange(1, 9)[None]
    with torch.no_grad():
        logits = loaded(ids).logits
        assert torch.equal(logits, model.bfloat16()(ids).logits)
    assert logits.isfinite().all()
    loaded.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"
    assert "in bfloat16" in (tmp_path / "again" / "README.md").read_text(encoding="utf-8")


def test_nothing_is_pickled(tmp_path: Path) -> None:
    NaLaForCausalLM(small_config()).save_pretrained(tmp_path)
    assert {file.suffix for file in tmp_path.iterdir()} == {".json", ".md", ".py", ".safetensors"}
