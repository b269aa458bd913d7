import peft
import pytest
import torch
from tiny_models import random_ids, tiny_model
from torch import nn

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.modeling import pieces_nala
from nalaformer_hf.modeling.block_nala import NaLaBlock
from nalaformer_hf.modeling.pieces_nala import in_pieces


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces_nala, "ROWS", 8)


def test_tokens_are_taken_a_few_at_a_time(short_pieces):
    x, y, seen = torch.randn(3, 10, 4), torch.randn(3, 10, 2, 2), []

    def function(a, b):
        seen.append((tuple(a.shape), tuple(b.shape)))
        return a + b.flatten(-2)

    torch.testing.assert_close(in_pieces(function, x, y, calls=()), x + y.flatten(-2), rtol=0, atol=0)
    assert seen == [((1, 8, 4), (1, 8, 2, 2))] * 3 + [((1, 6, 4), (1, 6, 2, 2))]


@pytest.mark.parametrize("shape", [(1, 16, 4), (2, 8, 4), (1, 1, 4)])
def test_few_tokens_are_taken_as_they_are(short_pieces, shape):
    seen = []
    in_pieces(lambda x: seen.append(x) or x, x := torch.randn(shape), calls=())
    assert seen[0] is x


@pytest.mark.parametrize("mixer", ["linear", "gated_delta"])
def test_a_model_in_pieces_has_the_same_loss_and_gradients(monkeypatch, mixer):
    torch.manual_seed(0)
    model = NaLaForCausalLM(NaLaConfig.from_preset("tiny", vocab_size=64, mixer=mixer)).double()
    ids = torch.randint(64, (3, 21))

    def gradients():
        loss = model(input_ids=ids, labels=ids).loss
        return loss, *torch.autograd.grad(loss, list(model.parameters()))

    whole = gradients()
    monkeypatch.setattr(pieces_nala, "ROWS", 8)
    calls, add_mlp = [], NaLaBlock._add_mlp
    monkeypatch.setattr(NaLaBlock, "_add_mlp", lambda *x: calls.append(1) or add_mlp(*x))
    for actual, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert len(calls) == 8 * len(model.model.layers)  # 63 tokens


@pytest.mark.parametrize("place", ["norm", "layers.0.attn_norm", "layers.0.mlp", "layers.0.attn.o_norm"])
def test_a_hook_sees_all_tokens_at_once(short_pieces, place):
    model, seen = tiny_model(), []
    part: nn.Module = model.model.get_submodule(place)
    part.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2]))
    model(random_ids(3, 21))
    assert seen == [(3, 21)]


@torch.no_grad()
def test_rows_with_adapters_of_their_own(short_pieces):
    settings = peft.LoraConfig(target_modules=["o_proj", "down_proj"], init_lora_weights=False)
    model = peft.get_peft_model(tiny_model(), settings, adapter_name="first").eval()
    model.add_adapter("second", settings)
    ids, names = random_ids(3, 21), ["second", "first", "second"]
    rows = [model(ids[i : i + 1], adapter_names=names[i : i + 1]).logits for i in range(3)]
    torch.testing.assert_close(model(ids, adapter_names=names).logits, torch.cat(rows))
