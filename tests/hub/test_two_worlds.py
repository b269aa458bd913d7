"""A checkpoint at its two ends: saved with the package, loaded and saved again without it, pushed."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hub_models import small_config, small_vision_config
from hub_outside import ROUNDS
from hub_probe import probe
from hub_pushing import EDIT
from hub_server import TOKEN, Hub, running_hub
from huggingface_hub import ModelCard
from safetensors.torch import load_file
from torch import Tensor
from transformers import PreTrainedModel

from nalaformer_hf import (
    NaLaForCausalLM,
    NaLaForImageClassification,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
    NaLaVisionModel,
)

pytestmark = pytest.mark.xdist_group("two_worlds")

HYBRID = {"layer_types": ["nala_attention", "full_attention"], "use_rotary": True}
CASES = {
    "causal-v1.0": (NaLaForCausalLM, {}),
    "tied.v2": (NaLaForCausalLM, {"tie_word_embeddings": True, "feature_form": "polarity"}),
    "delta-v1.0": (NaLaForCausalLM, {"mixer": "delta"}),
    "gated-delta": (NaLaForCausalLM, {"mixer": "gated_delta"}),
    "hybrid": (NaLaForCausalLM, HYBRID),
    "base": (NaLaModel, {}),
    "sequences": (NaLaForSequenceClassification, {"is_causal": False, "classifier_pooling": "mean"}),
    "tokens": (NaLaForTokenClassification, {"num_labels": 5}),
    "answers": (NaLaForQuestionAnswering, {}),
    "images-v1.0": (NaLaForImageClassification, {}),
    "image_base": (NaLaVisionModel, {"feature_form": "cosine", "stem": "patch"}),
}
# Name of the case: its repository.
PUSHED = {"causal-v1.0": "somebody/nala-v1.0", "images-v1.0": "somebody/nala-images-v1.0"}


def make_model(name: str) -> PreTrainedModel:
    model_class, fields = CASES[name]
    make_config = small_vision_config if model_class.main_input_name == "pixel_values" else small_config
    return model_class(make_config(**fields))


@dataclass
class Worlds:
    folder: Path
    hub: Hub
    expected: dict[str, dict[str, Tensor]]

    def matches(self, found: str, expected: str) -> None:
        """Compare a file that a program left with a model of ours, bit for bit."""
        tensors = load_file(self.folder / f"{found}.safetensors")
        assert tensors.keys() == self.expected[expected].keys()
        for name, tensor in tensors.items():
            assert torch.equal(tensor, self.expected[expected][name]), name

    def pushed(self, name: str, branch: str = "main") -> dict[str, bytes]:
        """The files of a repository."""
        return self.hub.repositories[f"somebody/{name}"][branch][-1].files

    def card(self, name: str) -> ModelCard:
        return ModelCard(self.pushed(name)["README.md"].decode())


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Worlds]:
    folder = tmp_path_factory.mktemp("worlds")
    torch.manual_seed(0)
    threads = torch.get_num_threads()
    made = {name: make_model(name) for name in CASES}
    expected = {name: probe(model) for name, model in made.items()}
    expected["base_of_causal"] = probe(made["causal-v1.0"].model)
    torch.set_num_threads(threads)
    for name, model in made.items():
        model.save_pretrained(folder / "round1" / name)
    (folder / "auto_classes.json").write_text(json.dumps({n: m._auto_class for n, m in made.items()}))
    (folder / "pushed.json").write_text(json.dumps(PUSHED))
    with running_hub() as hub:
        run_program("hub_pushing.py", folder, hub)
        run_program("hub_outside.py", folder, hub)
        yield Worlds(folder, hub, expected)


def run_program(name: str, folder: Path, hub: Hub) -> None:
    """Run in a process, a working folder and caches of its own, with the Hub that HF_ENDPOINT names."""
    cwd = folder / name.removesuffix(".py")
    cwd.mkdir()
    settings = ("PYTHONPATH", "HF_", "TRANSFORMERS_", "HUGGING")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(settings)} | {
        "HF_ENDPOINT": hub.url,
        "HF_HOME": str(cwd / "cache"),
        "HF_TOKEN": TOKEN,
        "HF_HUB_DISABLE_XET": "1",
        "NO_PROXY": "127.0.0.1",
    }
    program = Path(__file__).with_name(name)
    done = subprocess.run(
        [sys.executable, program, folder],
        cwd=cwd,
        env=environment,
        text=True,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("number", range(1, ROUNDS + 1))
def test_loads_without_the_package_bit_for_bit(worlds: Worlds, name: str, number: int) -> None:
    worlds.matches(f"outside/{name}-{number}", name)


@pytest.mark.parametrize("name", CASES)
def test_rounds_leave_the_checkpoint_as_it_was(worlds: Worlds, name: str) -> None:
    first = worlds.folder / "round1" / name
    last = worlds.folder / f"round{ROUNDS + 1}" / name
    assert {file.name for file in first.iterdir()} == {file.name for file in last.iterdir()}
    for file in first.iterdir():
        assert file.read_bytes() == (last / file.name).read_bytes(), file.name


@pytest.mark.parametrize("name", CASES)
def test_remote_copies_work_beside_each_other_and_beside_the_package(worlds: Worlds, name: str) -> None:
    worlds.matches(f"outside/{name}-joined", name)


def test_heads_share_a_checkpoint_without_the_package(worlds: Worlds) -> None:
    worlds.matches("outside/base_of_causal", "base_of_causal")
    worlds.matches("outside/causal_again", "causal-v1.0")
    worlds.matches("outside/packaged", "causal-v1.0")


def test_remote_code_needs_trust(worlds: Worlds) -> None:
    assert "trust_remote_code=True" in (worlds.folder / "outside" / "refusal.txt").read_text()


@pytest.mark.parametrize("found", ["loaded", "remote", "loaded_beside_remote", "sharded", "branch"])
def test_pushed_model_is_the_same(worlds: Worlds, found: str) -> None:
    worlds.matches(f"pushing/{found}", "causal-v1.0")


@pytest.mark.parametrize("name", PUSHED)
def test_pushed_model_loads_without_the_package(worlds: Worlds, name: str) -> None:
    worlds.matches(f"outside/{name}-pushed", name)


@pytest.mark.parametrize("found", ["images_loaded", "images_remote"])
def test_pushed_vision_model_is_the_same(worlds: Worlds, found: str) -> None:
    worlds.matches(f"pushing/{found}", "images-v1.0")


def test_push_uploads_the_whole_vision_checkpoint(worlds: Worlds) -> None:
    saved = {file.name for file in (worlds.folder / "round1" / "images-v1.0").iterdir()}
    assert "preprocessor_config.json" in saved
    assert worlds.pushed("nala-images-v1.0").keys() == saved
    assert worlds.card("nala-images-v1.0").data.pipeline_tag == "image-classification"


def test_pipeline_is_the_same_without_the_package(worlds: Worlds) -> None:
    inside, outside = (
        (worlds.folder / world / "pipeline.txt").read_text() for world in ("pushing", "outside")
    )
    assert inside.startswith("w3 w5")
    assert len(inside) > len("w3 w5")
    assert inside == outside


def test_push_uploads_the_whole_checkpoint(worlds: Worlds) -> None:
    saved = {file.name for file in (worlds.folder / "round1" / "causal-v1.0").iterdir()}
    tokenizer = {"tokenizer.json", "tokenizer_config.json"}
    assert worlds.pushed("nala-v1.0").keys() == saved | tokenizer
    titles = [commit.title for commit in worlds.hub.repositories["somebody/nala-v1.0"]["main"]]
    assert titles == ["initial commit", "Upload tokenizer", "Push the model"]
    assert len([name for name in worlds.pushed("sharded") if name.endswith(".safetensors")]) > 1
    assert not worlds.pushed("branched")
    assert worlds.pushed("branched", "dev").keys() == saved


def test_pushed_card_replaces_the_empty_one(worlds: Worlds) -> None:
    card = worlds.card("nala-v1.0")
    assert 'AutoModelForCausalLM.from_pretrained("somebody/nala-v1.0", trust_remote_code=True)' in card.text
    assert "# nala-v1.0" in card.text
    assert "More Information Needed" not in card.text
    assert {"nala", "mine"} <= set(card.data.tags)


def test_pushed_card_is_refreshed_until_it_is_edited(worlds: Worlds) -> None:
    assert "- optimizer steps: 123" in worlds.card("refreshed").text
    edited = worlds.card("edited").text
    assert edited.endswith(EDIT)
    assert "optimizer steps" not in edited


def test_licence_chosen_on_the_website_stays(worlds: Worlds) -> None:
    card = worlds.card("licensed")
    assert card.data.license == "mit"
    assert card.data.pipeline_tag == "text-generation"
    assert "- optimizer steps: 123" in card.text


def test_save_and_push_leaves_the_users_readme(worlds: Worlds) -> None:
    assert (worlds.folder / "written" / "README.md").read_text() == "# Mine\n"
    assert 'from_pretrained("somebody/written")' in worlds.card("written").text
    assert (worlds.folder / "fresh" / "README.md").read_bytes() == worlds.pushed("fresh")["README.md"]


def test_trainer_pushes_a_checkpoint_that_loads(worlds: Worlds) -> None:
    trained = load_file(worlds.folder / "pushing" / "trained.safetensors")
    loaded = load_file(worlds.folder / "pushing" / "trained_loaded.safetensors")
    assert all(torch.equal(tensor, loaded[name]) for name, tensor in trained.items())
    assert not torch.equal(trained["logits"], worlds.expected["causal-v1.0"]["logits"])
    saved = {file.name for file in (worlds.folder / "round1" / "causal-v1.0").iterdir()}
    assert saved <= worlds.pushed("trained").keys()
    card = worlds.card("trained")
    assert "Training hyperparameters" in card.text
    assert card.data.library_name == "transformers"
