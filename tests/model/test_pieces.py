import pytest
import torch
from torch import nn

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.modeling import pieces_nala
from nalaformer_hf.modeling.pieces_nala import in_pieces


@pytest.fixture
def short_pieces(monkeypatch):
    monkeypatch.setattr(pieces_nala, "ROWS", 8)


def test_tokens_are_taken_a_few_at_a_time(short_pieces):
    x, y, seen = torch.randn(3, 10, 4), torch.randn(3, 10, 2, 2), []

    def function(a, b):
        seen.append((tuple(a.shape), tuple(b.shape)))
        return a + b.flatten(-2)

    torch.testing.assert_close(in_pieces(function, x, y), x + y.flatten(-2), rtol=0, atol=0)
    assert seen == [((1, 8, 4), (1, 8, 2, 2))] * 3 + [((1, 6, 4), (1, 6, 2, 2))]


@pytest.mark.parametrize("shape", [(1, 16, 4), (2, 8, 4), (1, 1, 4)])
def test_few_tokens_are_taken_as_they_are(short_pieces, shape):
    seen = []
    in_pieces(lambda x: seen.append(x) or x, x := torch.randn(shape))
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
    calls = []
    norm: nn.Module = model.model.norm
    norm.register_forward_hook(lambda *_: calls.append(1))
    for actual, expected in zip(gradients(), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12)
    assert len(calls) == 8  # 63 tokens
