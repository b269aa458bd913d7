"""Run with the package and HF_ENDPOINT: push in every way there is, and load what was pushed.

Usage: python hub_pushing.py FOLDER, with the checkpoints causal-v1.0 and images-v1.0 in FOLDER/round1. Writes
FOLDER/pushing/*.
"""

import sys
from pathlib import Path

from hub_probe import write_continuation, write_probe
from huggingface_hub import HfApi
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageClassification,
    AutoTokenizer,
    PreTrainedTokenizerFast,
    Trainer,
    TrainingArguments,
)
from transformers.dynamic_module_utils import get_class_from_dynamic_module

import nalaformer_hf
from nalaformer_hf import NaLaForCausalLM, NaLaForImageClassification

EDIT = "\nWhat the user wrote beside it.\n"


def push_and_load(model: NaLaForCausalLM, out: Path) -> None:
    """Tokenizer first, as many do; then both worlds in one process."""
    repo_id = "somebody/nala-v1.0"
    words = {f"w{i}": i for i in range(model.config.vocab_size)}
    tokenizer = Tokenizer(models.WordLevel(words, "w0"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).push_to_hub(repo_id)
    model.push_to_hub(repo_id, commit_message="Push the model", tags=["mine"])
    assert AutoTokenizer.from_pretrained(repo_id)("w3 w5")["input_ids"] == [3, 5]
    loaded = AutoModelForCausalLM.from_pretrained(repo_id)
    assert type(loaded) is nalaformer_hf.NaLaForCausalLM
    write_probe(loaded, out / "loaded.safetensors")
    write_continuation(repo_id, out / "pipeline.txt")
    remote_class = get_class_from_dynamic_module("modeling_nala.NaLaForCausalLM", repo_id)
    assert remote_class is not NaLaForCausalLM
    write_probe(remote_class.from_pretrained(repo_id), out / "remote.safetensors")
    write_probe(loaded, out / "loaded_beside_remote.safetensors")


def push_images(model: NaLaForImageClassification, out: Path) -> None:
    """A vision model, loaded with the package and with the code that was pushed."""
    repo_id = "somebody/nala-images-v1.0"
    model.push_to_hub(repo_id)
    loaded = AutoModelForImageClassification.from_pretrained(repo_id)
    assert type(loaded) is NaLaForImageClassification
    write_probe(loaded, out / "images_loaded.safetensors")
    assert AutoImageProcessor.from_pretrained(repo_id).crop_size["height"] == model.config.image_size
    remote_class = get_class_from_dynamic_module("modeling_nala_vision.NaLaForImageClassification", repo_id)
    assert remote_class is not NaLaForImageClassification
    write_probe(remote_class.from_pretrained(repo_id), out / "images_remote.safetensors")


def push_with_cards(model: NaLaForCausalLM) -> None:
    """Repositories whose README.md was edited, or holds nothing but a licence."""
    api = HfApi()
    model.push_to_hub("edited")
    readme = Path(api.hf_hub_download("somebody/edited", "README.md")).read_text()
    api.upload_file(
        path_or_fileobj=(readme + EDIT).encode(), path_in_repo="README.md", repo_id="somebody/edited"
    )
    api.create_repo("licensed")
    api.upload_file(
        path_or_fileobj=b"---\nlicense: mit\n---\n", path_in_repo="README.md", repo_id="somebody/licensed"
    )
    model.push_to_hub("refreshed")
    model.config.training_facts = {"optimizer steps": 123}
    for name in ("edited", "licensed", "refreshed"):
        model.push_to_hub(name)
    model.config.training_facts = None


def push_from_folder(model: NaLaForCausalLM, folder: Path) -> None:
    """`save_pretrained(push_to_hub=True)`, without and with a README.md of the user's."""
    model.save_pretrained(folder / "fresh", push_to_hub=True, repo_id="somebody/fresh")
    (folder / "written").mkdir()
    (folder / "written" / "README.md").write_text("# Mine\n")
    model.save_pretrained(folder / "written", push_to_hub=True)


def push_elsewhere(model: NaLaForCausalLM, out: Path) -> None:
    """Shards, and a branch."""
    model.push_to_hub("sharded", max_shard_size="50KB")
    write_probe(AutoModelForCausalLM.from_pretrained("somebody/sharded"), out / "sharded.safetensors")
    model.push_to_hub("branched", revision="dev")
    branch = AutoModelForCausalLM.from_pretrained("somebody/branched", revision="dev")
    write_probe(branch, out / "branch.safetensors")


def push_from_trainer(model: NaLaForCausalLM, folder: Path, out: Path) -> None:
    """The Trainer saves the model and writes a card of its own."""
    rows = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 4
    arguments = TrainingArguments(
        output_dir=str(folder / "trained"),
        max_steps=1,
        report_to="none",
        use_cpu=True,
        hub_model_id="somebody/trained",
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    trainer.push_to_hub()
    trained = trainer.model
    trained.config.use_cache = True
    write_probe(trained, out / "trained.safetensors")
    write_probe(AutoModelForCausalLM.from_pretrained("somebody/trained"), out / "trained_loaded.safetensors")


def main(folder: Path) -> None:
    """Push in every way."""
    out = folder / "pushing"
    model = AutoModelForCausalLM.from_pretrained(folder / "round1" / "causal-v1.0")
    push_and_load(model, out)
    push_with_cards(model)
    push_from_folder(model, folder)
    push_elsewhere(model, out)
    push_from_trainer(model, folder, out)
    images = AutoModelForImageClassification.from_pretrained(folder / "round1" / "images-v1.0")
    push_images(images, out)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
