"""Weights that accelerate keeps elsewhere, and brings only to the module that is called."""

import pytest
import torch
from accelerate import cpu_offload, disk_offload
from tiny_models import VARIANTS, random_ids, tiny_model
from transformers import AutoModelForCausalLM


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_weights_offloaded_to_memory(name):
    model, ids = tiny_model(name), random_ids(2, 20)
    expected = model(ids).logits, model.generate(ids, max_new_tokens=5, do_sample=False)
    cpu_offload(model, execution_device=torch.device("cpu"))
    assert model.lm_head.weight.is_meta
    assert torch.equal(model(ids).logits, expected[0])
    assert torch.equal(model.generate(ids, max_new_tokens=5, do_sample=False), expected[1])


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "gated_delta-hybrid"])
def test_weights_offloaded_to_disk(name, tmp_path):
    model, ids = tiny_model(name), random_ids(2, 20)
    expected = model(ids).logits
    model.save_pretrained(tmp_path / "model", max_shard_size="20KB")
    kept = {f"model.{part}": "cpu" for part, _ in model.model.named_children()}
    del kept["model.layers"]
    places = {
        **kept,
        "model.layers.0": "disk",
        "model.layers.1": "cpu",
        "model.norm": "disk",
        "lm_head": "disk",
    }
    loaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "model", device_map=places, offload_folder=tmp_path / "weights"
    )
    assert loaded.model.layers[0].attn.o_norm.weight.is_meta
    assert torch.equal(loaded(ids).logits, expected)
    disk_offload(model, str(tmp_path / "all"), execution_device=torch.device("cpu"))
    assert torch.equal(model(ids).logits, expected)
