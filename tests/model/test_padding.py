"""Padding anywhere in a row changes no real token, and no row that shares its batch."""

import itertools

import pytest
import torch
from tiny_models import DELTA, FEW, HYBRIDS, LINEAR, VARIANTS, error, random_ids, tiny_model
from transformers import DynamicCache

TOLERANCE = 1e-5
MASKS = {
    "left": [[0, 0, 0, 0, 1, 1, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1, 1, 1, 1]],
    "right": [[1, 1, 1, 1, 1, 1, 0, 0, 0, 0], [1, 1, 1, 1, 1, 1, 1, 1, 1, 0]],
    "interior": [[1, 0, 1, 1, 0, 0, 1, 1, 0, 1], [0, 1, 1, 1, 1, 0, 1, 1, 1, 1]],
}
KINDS = sorted(MASKS)


def alone(model, ids, mask):
    """Logits of each row's real tokens, run without the others and without padding."""
    return [model(row[real.bool()][None]).logits[0] for row, real in zip(ids, mask, strict=True)]


def assert_rows(logits, mask, expected):
    for row, real, reference in zip(logits, mask, expected, strict=True):
        assert error(row[real.bool()], reference) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_padded_rows_equal_unpadded_ones(name, kind):
    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS[kind])
    assert_rows(model(ids, attention_mask=mask).logits, mask, alone(model, ids, mask))


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("bounds", [[0, 4, 5, 6, 10], range(11)], ids=["pieces", "tokens"])
def test_padded_rows_in_cached_pieces(name, kind, bounds):
    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS[kind])
    cache, logits = DynamicCache(config=model.config), []
    for start, end in itertools.pairwise(bounds):
        logits.append(model(ids[:, start:end], attention_mask=mask[:, :end], cache=cache).logits)
    assert_rows(torch.cat(logits, dim=1), mask, alone(model, ids, mask))


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_decoding_goes_on_after_padding(name, kind):
    model, ids, mask = tiny_model(name), random_ids(2, 14), torch.tensor(MASKS[kind])
    mask = torch.cat([mask, torch.ones(2, 4, dtype=torch.long)], dim=1)
    cache = model(ids[:, :10], attention_mask=mask[:, :10], use_cache=True).cache
    steps = [
        model(ids[:, i : i + 1], attention_mask=mask[:, : i + 1], cache=cache).logits for i in range(10, 14)
    ]
    assert_rows(torch.cat(steps, dim=1), mask[:, 10:], [x[-4:] for x in alone(model, ids, mask)])


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "delta-no-conv", "gated_delta"])
def test_layers_without_positions_need_no_mask_once_the_padding_is_past(name):
    model, ids, mask = tiny_model(name), random_ids(2, 11), torch.tensor(MASKS["interior"])
    cache = model(ids[:, :10], attention_mask=mask, use_cache=True).cache
    step = model(ids[:, 10:], cache=cache).logits
    mask = torch.cat([mask, torch.ones(2, 1, dtype=torch.long)], dim=1)
    assert_rows(step, mask[:, 10:], [x[-1:] for x in alone(model, ids, mask)])


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_one_row_is_masked_too(name):
    model, ids, mask = tiny_model(name), random_ids(1, 10), torch.tensor(MASKS["left"])[:1]
    assert_rows(model(ids, attention_mask=mask).logits, mask, alone(model, ids, mask))


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_stands_at_padding_does_not_matter(name, kind):
    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS[kind])
    others = torch.where(mask.bool(), ids, random_ids(2, 10, seed=1))
    first, second = (model(x, attention_mask=mask).logits[mask.bool()] for x in (ids, others))
    assert torch.equal(first, second)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("kind", KINDS)
def test_padding_gets_no_gradient(name, kind):
    model, mask = tiny_model(name), torch.tensor(MASKS[kind])
    embeds = model.get_input_embeddings()(random_ids(2, 10)).detach()
    embeds[~mask.bool()] = 1e4
    embeds.requires_grad_()
    logits = model(inputs_embeds=embeds, attention_mask=mask).logits
    (gradient,) = torch.autograd.grad(logits[mask.bool()].square().mean(), embeds)
    assert torch.isfinite(gradient).all()
    assert (gradient[~mask.bool()] == 0).all()
    assert (gradient[mask.bool()] != 0).any(-1).all()


@pytest.mark.parametrize("name", VARIANTS)
def test_a_fully_masked_row_is_finite_and_alone(name):
    model, ids = tiny_model(name), random_ids(3, 8)
    mask = torch.ones_like(ids)
    mask[1] = 0
    outputs = model(ids, attention_mask=mask, use_cache=True)
    assert torch.isfinite(outputs.logits).all()
    outputs.logits[mask.bool()].square().mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())
    with torch.no_grad():
        assert error(outputs.logits[::2], model(ids[::2]).logits) < TOLERANCE
        # The row begins with its first real token.
        later = random_ids(3, 3, seed=1)
        mask = torch.cat([mask, torch.ones_like(later)], dim=1)
        logits = model(later, attention_mask=mask, cache=outputs.cache).logits
        assert error(logits[1], model(later[1:2]).logits[0]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("dtype", [torch.bool, torch.int32, torch.float32])
def test_masks_of_any_dtype(name, dtype):
    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS["left"])
    expected = model(ids, attention_mask=mask).logits
    assert torch.equal(model(ids, attention_mask=mask.to(dtype)).logits, expected)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_rows_do_not_see_each_other(name):
    model, ids = tiny_model(name), random_ids(4, 70)
    together = model(ids).logits
    for row in range(4):
        assert error(together[row], model(ids[row : row + 1]).logits[0]) < TOLERANCE
    order = torch.tensor([2, 0, 3, 1])
    assert error(model(ids[order]).logits, together[order]) < TOLERANCE


@pytest.mark.parametrize("name", ["linear", "delta", "linear-hybrid"])
def test_a_4d_mask_is_refused(name):
    with pytest.raises(
        ValueError, match=r"attention_mask must be \(batch, past \+ new tokens\).*got shape \(2, 1, 4, 4\)"
    ):
        tiny_model(name)(random_ids(2, 4), attention_mask=torch.ones(2, 1, 4, 4))


@pytest.mark.parametrize("name", ["linear", "gated_delta", "linear-rotary-hybrid"])
@pytest.mark.parametrize("shape", [(2, 3), (3, 4), (4,)])
def test_a_mask_of_the_wrong_shape_is_refused(name, shape):
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, past \+ new tokens\)"):
        tiny_model(name)(random_ids(2, 4), attention_mask=torch.ones(shape))


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_a_mask_that_does_not_cover_the_past_is_refused(name):
    model = tiny_model(name)
    cache = model(random_ids(1, 6), use_cache=True).cache
    with pytest.raises(ValueError, match=r"attention_mask must be \(batch, past \+ new tokens\)"):
        model(random_ids(1, 2), attention_mask=torch.ones(1, 2), cache=cache)
    for length in (3, 7, 9):
        with pytest.raises(ValueError, match=f"must cover the 6 past and 2 new tokens, got {length} columns"):
            model(random_ids(1, 2), attention_mask=torch.ones(1, length), cache=cache)


@torch.no_grad()
@pytest.mark.parametrize("name", [*LINEAR, *DELTA])
@pytest.mark.parametrize("kind", KINDS)
def test_masks_by_layer_type(name, kind):
    from transformers.masking_utils import create_masks_for_generate

    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS[kind])
    embeds = model.get_input_embeddings()(ids)
    by_type = create_masks_for_generate(model.config, embeds, mask, cache=None)
    assert set(by_type) == set(model.config.layer_types)
    positions = (mask.cumsum(1) - 1).clamp_min(0)
    logits = model(ids, attention_mask=by_type, position_ids=positions).logits
    assert_rows(logits, mask, alone(model, ids, mask))


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_hybrids_by_attention_implementation(name, implementation):
    model, ids, mask = tiny_model(name), random_ids(2, 10), torch.tensor(MASKS["interior"])
    model.set_attn_implementation(implementation)
    assert_rows(model(ids, attention_mask=mask).logits, mask, alone(model, ids, mask))
