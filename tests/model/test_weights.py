"""Weights: how they begin, and that saving, loading, tying and resizing keep them."""

import math

import pytest
import torch
from tiny_models import FEW, VARIANTS, random_ids, tiny_config, tiny_model
from transformers import AutoModelForCausalLM

from nalaformer_hf import NaLaForCausalLM


def test_initial_weights():
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "vocab_size": 1000}
    config = tiny_config("gated_delta-hybrid", initializer_range=0.02, conv_size=4, **sizes)
    model = NaLaForCausalLM(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("A_log", "dt_bias")):
            continue
        if "norm" in name:
            assert (parameter == 1).all(), name
        elif "conv1d" in name:
            assert parameter.abs().max() <= 0.5
            assert parameter.std().item() == pytest.approx(0.5 / math.sqrt(3), rel=0.1), name
        else:
            assert parameter.std().item() == pytest.approx(0.02, rel=0.1), name
            assert abs(parameter.mean().item()) < 0.002, name
    layer = model.model.layers[0].attn
    assert ((layer.A_log.exp() >= 1) & (layer.A_log.exp() <= 16)).all()
    steps = torch.nn.functional.softplus(layer.dt_bias)
    assert ((steps >= 0.00099) & (steps <= 0.1001)).all()
    assert len(set(layer.A_log.tolist())) == len(set(layer.dt_bias.tolist())) == 8


def test_initial_loss_is_that_of_guessing():
    ids = random_ids(4, 64)
    for name in VARIANTS:
        loss = tiny_model(name, initializer_range=0.02)(ids, labels=ids).loss
        assert loss.item() == pytest.approx(math.log(97), rel=0.02), name


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("tied", [False, True])
def test_saving_and_loading_keep_every_weight(name, tied, tmp_path):
    model, ids = tiny_model(name, tie_word_embeddings=tied), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    loaded, report = NaLaForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    assert loaded.state_dict().keys() == model.state_dict().keys()
    for key, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[key], value), key
    assert (loaded.lm_head.weight is loaded.model.embeddings.weight) == tied
    for key, value in model.named_buffers():
        assert torch.equal(dict(loaded.named_buffers())[key], value), key
    assert torch.equal(loaded(ids).logits, model(ids).logits)


@pytest.mark.parametrize("name", FEW)
def test_loading_in_bf16_keeps_rotary_angles(name, tmp_path):
    model, ids = tiny_model(name), random_ids(2, 20)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert {buffer.dtype for buffer in loaded.buffers()} <= {torch.float32}
    assert torch.equal(loaded(ids).logits, model.to(torch.bfloat16)(ids).logits)


def test_a_model_made_on_the_meta_device_is_filled():
    with torch.device("meta"):
        model = NaLaForCausalLM(tiny_config("gated_delta-hybrid"))
    assert {p.device.type for p in model.parameters()} == {"meta"}
    model = model.to_empty(device="cpu")
    for tensor in (*model.parameters(), *model.buffers()):
        tensor.data.fill_(float("nan"))
    for module in model.modules():
        module._is_hf_initialized = False
    for parameter in model.parameters():
        parameter._is_hf_initialized = False
    model.init_weights()
    assert all(torch.isfinite(x).all() for x in (*model.parameters(), *model.buffers()))
    fresh = tiny_model("gated_delta-hybrid")
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.model.rotary_emb.inv_freq)
    assert torch.isfinite(model(random_ids(1, 9)).logits).all()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings(name, tied, tmp_path):
    model, ids = tiny_model(name, tie_word_embeddings=tied), random_ids(2, 20)
    logits = model(ids).logits.detach()
    model.resize_token_embeddings(110)
    assert model.config.vocab_size == 110
    assert (model.lm_head.weight is model.model.embeddings.weight) == tied
    assert model.lm_head.weight.shape == model.model.embeddings.weight.shape == (110, 32)
    torch.testing.assert_close(model(ids).logits[..., :97], logits)
    new = torch.tensor([[5, 109, 100]])
    model(new, labels=new).loss.backward()
    model.save_pretrained(tmp_path)
    assert torch.equal(NaLaForCausalLM.from_pretrained(tmp_path)(new).logits, model(new).logits)


def test_the_embedding_of_padding_learns_where_it_is_a_real_token():
    """Many tokenizers pad with the end-of-text token, which stands in real text too."""
    model = tiny_model(pad_token_id=3, eos_token_id=3)
    ids = torch.tensor([[5, 3, 7]])
    model(ids, labels=ids).loss.backward()
    assert (model.model.embeddings.weight.grad[3] != 0).all()
    assert model.model.embeddings.weight[3].abs().max() > 0


def test_padding_may_lie_outside_the_vocabulary():
    tiny_model(pad_token_id=97)
