"""The law of causality: no output depends on a later token."""

import pytest
import torch
from tiny_models import VARIANTS, random_ids, tiny_model


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("changed", [0, 1, 40, 64, 65, 79])
def test_a_later_token_changes_no_earlier_bit(name, changed):
    model, ids = tiny_model(name), random_ids(2, 80)
    others = ids.clone()
    others[:, changed] = 1
    before, after = model(ids).logits, model(others).logits
    assert torch.equal(before[:, :changed], after[:, :changed])
    assert not torch.equal(before[:, changed], after[:, changed])
    assert not torch.equal(before[:, -1], after[:, -1])


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("position", [0, 30, 63])
def test_no_gradient_comes_from_a_later_token(name, position):
    model = tiny_model(name)
    embeds = model.get_input_embeddings()(random_ids(1, 70)).detach().requires_grad_()
    (gradient,) = torch.autograd.grad(model(inputs_embeds=embeds).logits[:, position].sum(), embeds)
    assert (gradient[:, position + 1 :] == 0).all()
    assert (gradient[:, : position + 1] != 0).any(-1).all()


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_how_many_tokens_follow_does_not_matter(name):
    model, ids = tiny_model(name), random_ids(1, 130)
    reference = model(ids).logits
    for length in (1, 2, 63, 64, 65, 129):
        logits = model(ids[:, :length]).logits
        assert (logits - reference[:, :length]).abs().max() < 1e-5 * reference.abs().max()
