"""`is_causal=False`: an encoder, in which every token sees every real one."""

import pytest
import torch
from tiny_models import error, random_ids, tiny_model

from nalaformer_hf import NaLaForSequenceClassification, NaLaModel

ENCODERS = ["linear", "linear-no-conv", "linear-rotary", "linear-hybrid", "linear-rotary-hybrid"]


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_first_token_sees_the_last(name):
    model, ids = tiny_model(name, NaLaModel, is_causal=False), random_ids(2, 70)
    others = ids.clone()
    others[:, -1] = 1
    before, after = model(ids).last_hidden_state, model(others).last_hidden_state
    assert (before != after).any(-1).all()


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear-no-conv", "linear-rotary-hybrid"])
def test_without_convolution_an_encoder_is_equivariant(name):
    """Reversing the tokens, and with them the positions, reverses the outputs."""
    model, ids = tiny_model(name, NaLaModel, is_causal=False), random_ids(2, 30)
    positions = torch.arange(30)[None]
    forward = model(ids, position_ids=positions, attention_mask=torch.ones_like(ids)).last_hidden_state
    backward = model(ids.flip(1), position_ids=positions.flip(1), attention_mask=torch.ones_like(ids))
    assert error(backward.last_hidden_state.flip(1), forward) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("columns", [[0, 1, 2], [7, 8, 9], [0, 4, 9]], ids=["left", "right", "interior"])
def test_padding_does_not_matter(name, implementation, columns):
    model, ids = tiny_model(name, NaLaModel, is_causal=False), random_ids(2, 10)
    model.set_attn_implementation(implementation)
    mask = torch.ones_like(ids)
    mask[0, columns] = 0
    hidden_states = model(ids, attention_mask=mask).last_hidden_state
    for row in range(2):
        real = mask[row].bool()
        alone = model(ids[row, real][None]).last_hidden_state[0]
        assert error(hidden_states[row, real], alone) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("name", ENCODERS)
def test_a_decoder_can_be_called_as_an_encoder(name):
    decoder, encoder = tiny_model(name, NaLaModel), tiny_model(name, NaLaModel, is_causal=False)
    ids = random_ids(2, 10)
    called = decoder(ids, is_causal=False, use_cache=False).last_hidden_state
    assert torch.equal(called, encoder(ids).last_hidden_state)
    assert decoder.config.is_causal
    assert not torch.equal(called, decoder(ids).last_hidden_state)


@pytest.mark.parametrize("name", ENCODERS)
def test_gradients_reach_every_token(name):
    model = tiny_model(name, NaLaForSequenceClassification, is_causal=False, classifier_pooling="mean")
    embeds = model.get_input_embeddings()(random_ids(2, 70)).detach().requires_grad_()
    mask = torch.ones(2, 70)
    mask[0, :9] = 0
    model(inputs_embeds=embeds, attention_mask=mask, labels=torch.tensor([0, 1])).loss.backward()
    assert (embeds.grad[mask.bool()] != 0).any(-1).all()
    assert (embeds.grad[~mask.bool()] == 0).all()
    assert all((p.grad != 0).any() and torch.isfinite(p.grad).all() for p in model.model.layers.parameters())


def test_next_token_loss_of_an_encoder_is_refused():
    model, ids = tiny_model(is_causal=False), random_ids(1, 5)
    with pytest.raises(ValueError, match="labels: the loss of the next token needs a causal model"):
        model(ids, labels=ids)
    with pytest.raises(ValueError, match="labels: the loss of the next token needs a causal model"):
        tiny_model()(ids, labels=ids, is_causal=False)


@pytest.mark.parametrize("use_cache", [True, False])
def test_an_encoder_does_not_generate(use_cache):
    with pytest.raises(ValueError, match="generate needs a causal model, got is_causal=False"):
        tiny_model(is_causal=False).generate(random_ids(1, 5), max_new_tokens=3, use_cache=use_cache)
