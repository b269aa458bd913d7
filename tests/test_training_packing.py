"""Packing: every token predicted once, no label across a boundary, no leak between documents."""

import numpy as np
import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen3NextConfig

from nalaformer_hf import NaLaConfig
from nalaformer_hf.training.blocks import FEATURES, pad_blocks
from nalaformer_hf.training.packing import (
    IGNORED,
    PackingCollator,
    needs_flattening,
    pack_documents,
)

PAD = 0
DOCUMENTS = [[1, 5, 6, 7, 2], [1, 2], [1, *range(10, 25), 2], [1, 8, 2], [1, *range(30, 33), 2]]
SHAPE = {
    "vocab_size": 64,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "intermediate_size": 48,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "nala": NaLaConfig(**SHAPE, mixer="linear"),
    "nala-delta": NaLaConfig(**SHAPE, mixer="gated_delta"),
    "nala-hybrid": NaLaConfig(**SHAPE, layer_types=["nala_attention", "full_attention"]),
}


def test_blocks_by_hand():
    blocks = list(pack_documents([[1, 5, 6, 7, 2], [1, 8, 2], [1, 9, 2]], block_size=7))
    # The second document is cut; its rest is predicted from the last token before the cut.
    assert blocks == [
        {"input_ids": [1, 5, 6, 7, 2, 1, 8], "lengths": [5, 2]},
        {"input_ids": [8, 2, 1, 9, 2], "lengths": [2, 3]},
    ]


@pytest.mark.parametrize("block_size", [2, 3, 5, 8, 64])
@pytest.mark.parametrize("flatten", [False, True])
def test_every_token_is_predicted_once(block_size, flatten):
    packed = Dataset.from_list(list(pack_documents(DOCUMENTS, block_size)), features=FEATURES)
    blocks = list(pad_blocks(packed, 3))
    assert len(blocks) % 3 == 0
    batch = PackingCollator(block_size, PAD, flatten=flatten)(blocks)
    labels = batch["labels"].flatten()
    assert labels.numel() == batch["input_ids"].numel() == len(blocks) * block_size
    predicted = [token for document in DOCUMENTS for token in document[1:]]
    assert labels[labels != IGNORED].tolist() == predicted
    begins = batch["position_ids"].flatten() == 0
    assert (labels[begins] == IGNORED).all()
    assert torch.equal(labels[labels != IGNORED], batch["input_ids"].flatten()[labels != IGNORED])


def test_both_layouts_hold_the_same():
    blocks = list(pack_documents(DOCUMENTS, 8))
    rows = PackingCollator(8, PAD, flatten=False)(blocks)
    flat = PackingCollator(8, PAD, flatten=True)(blocks)
    for name in ("input_ids", "labels", "position_ids"):
        assert torch.equal(rows[name].flatten(), flat[name].flatten()), name
    begins = np.flatnonzero(flat["position_ids"][0] == 0)
    assert flat["cu_seq_lens_q"].tolist() == [*begins, flat["input_ids"].numel()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("flatten", [False, True])
def test_nothing_leaks_between_documents(name, flatten):
    """Packed logits are those of each document alone, whatever stands before it."""
    model = AutoModelForCausalLM.from_config(CONFIGS[name]).eval()
    blocks = list(pack_documents(DOCUMENTS, 16))
    batch = PackingCollator(16, PAD, flatten=flatten)(blocks)
    labels = batch.pop("labels").flatten()
    with torch.no_grad():
        packed = model(**batch, use_cache=False).logits.flatten(0, 1)
        alone = torch.cat(
            [
                model(input_ids=torch.tensor([piece["input_ids"]]), use_cache=False).logits[0]
                for block in blocks
                for piece in PackingCollator(16, PAD, flatten=True)._pieces(block)
            ]
        )
    is_real = torch.roll(labels, -1) != IGNORED  # the logits that a label is compared with
    assert is_real.sum() == sum(len(document) - 1 for document in DOCUMENTS)
    torch.testing.assert_close(packed[is_real], alone[is_real], rtol=1e-4, atol=1e-4)


def test_layout_follows_the_attention():
    assert not any(
        needs_flattening(AutoModelForCausalLM.from_config(config).config) for config in CONFIGS.values()
    )
    flash = LlamaConfig(**SHAPE)
    flash._attn_implementation = "flash_attention_2"
    assert needs_flattening(flash)
    assert needs_flattening(Qwen3NextConfig(layer_types=["linear_attention"], num_hidden_layers=1))
