"""The cache: steps and pieces equal one pass; rows move, tokens are taken back, gradients flow through."""

import copy
import inspect
from itertools import pairwise

import pytest
import torch
from tiny_models import ALL_NALA, DELTA, FEW, LINEAR, VARIANTS, cache_bytes, error, random_ids, tiny_model
from transformers import DynamicCache, StaticCache
from transformers.cache_utils import DynamicLayer

from nalaformer_hf.modeling.cache_nala import NaLaCacheLayer

# Of the largest |logit|, in fp32.
TOLERANCE = 1e-5


def in_pieces(model, ids, bounds, cache=None):
    """Logits of the pieces that `bounds` cuts out of the tokens, one cached call after the other."""
    logits = []
    for start, end in pairwise(bounds):
        outputs = model(ids[:, start:end], cache=cache, use_cache=True)
        cache = outputs.cache
        logits.append(outputs.logits)
    return torch.cat(logits, dim=1), cache


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize(
    "bounds",
    [[0, 40, *range(41, 81)], [0, 3, 4, 33, 80], [0, 1, 2, 80], [0, 64, 80]],
    ids=["steps", "pieces", "tokens-then-pass", "chunk-then-rest"],
)
def test_cached_calls_equal_one_pass(name, bounds):
    model, ids = tiny_model(name), random_ids(2, 80)
    logits, cache = in_pieces(model, ids, bounds)
    assert error(logits, model(ids).logits) < TOLERANCE
    assert int(cache.get_seq_length()) == 80


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_static_cache_equals_one_pass(name):
    model, ids = tiny_model(name), random_ids(2, 20)
    cache = StaticCache(config=model.config, max_cache_len=32)
    logits, _ = in_pieces(model, ids, [0, 12, 13, 14, 20], cache)
    assert error(logits, model(ids).logits) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_cache_does_not_grow(name):
    model = tiny_model(name)
    _, cache = in_pieces(model, random_ids(1, 10), [0, 10])
    at_ten_tokens = cache_bytes(cache)
    _, cache = in_pieces(model, random_ids(1, 1000), [0, 990, *range(991, 1001)])
    assert cache_bytes(cache) == at_ten_tokens > 0


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_state_is_fp32_in_a_bf16_model(name):
    model = tiny_model(name).to(torch.bfloat16)
    _, cache = in_pieces(model, random_ids(1, 12), [0, 10, 11, 12])
    layers = [layer for layer in cache.layers if isinstance(layer, NaLaCacheLayer)]
    assert {layer.state.dtype for layer in layers} == {torch.float32}
    assert {layer.window.dtype for layer in layers if layer.window is not None} <= {torch.bfloat16}


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("move", ["reorder", "repeat", "select"])
def test_rows_can_be_moved(name, move):
    model, ids, next_ids = tiny_model(name), random_ids(3, 9), random_ids(4, 5, seed=1)
    _, cache = in_pieces(model, ids, [0, 7, 8, 9])
    if move == "reorder":
        rows = torch.tensor([2, 0, 0])
        cache.reorder_cache(rows)
    elif move == "repeat":
        rows = torch.tensor([0, 0, 1, 1, 2, 2])
        cache.batch_repeat_interleave(2)
    else:
        rows = torch.tensor([1])
        cache.batch_select_indices(rows)
    next_ids = random_ids(len(rows), 5, seed=1)
    logits, _ = in_pieces(model, next_ids, [0, 1, 5], cache)
    expected = model(torch.cat([ids[rows], next_ids], dim=1)).logits[:, 9:]
    assert error(logits, expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize(
    ("bounds", "removed"),
    [
        ([5, 13], 3),  # inside one pass
        ([5, 13], 8),  # a whole pass
        ([5, 6, 7, 8, 9], 2),  # several one-token passes
        ([5, 6, 9, 10], 3),  # into the middle of an earlier pass
        ([5, 6, 7], 1),
        ([5, 6], 1),  # the convolution's window reaches before the pass
        ([0, 4, 5], 3),  # down to fewer tokens than the window
        ([0, 6], 6),  # to nothing
    ],
)
def test_crop_goes_back_exactly(name, bounds, removed):
    model, ids = tiny_model(name), random_ids(2, 30)
    start, end = bounds[0], bounds[-1]
    cache = DynamicCache(config=model.config)
    if start:
        in_pieces(model, ids, [0, start], cache)
    cache.activate_past_recording()
    in_pieces(model, ids, bounds, cache)
    cache.crop(-removed)
    kept = end - removed
    assert int(cache.get_seq_length()) == kept
    others = random_ids(2, 6, seed=1)
    logits, _ = in_pieces(model, others, [0, 1, 6], cache)
    expected = model(torch.cat([ids[:, :kept], others], dim=1)).logits[:, kept:]
    assert error(logits, expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", LINEAR)
def test_crop_again_and_again(name):
    model, ids, drafts = tiny_model(name), random_ids(1, 40), random_ids(1, 40, seed=1)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    logits = []
    for start in range(0, 40, 4):
        in_pieces(
            model, torch.cat([ids[:, start : start + 2], drafts[:, start : start + 3]], 1), [0, 1, 5], cache
        )
        cache.crop(-3)
        logits.append(model(ids[:, start + 2 : start + 4], cache=cache).logits)
        cache.crop(0)
    expected = torch.cat([model(ids).logits[:, start + 2 : start + 4] for start in range(0, 40, 4)], dim=1)
    assert error(torch.cat(logits, dim=1), expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "linear-rotary", "linear-no-conv"])
@pytest.mark.parametrize("removed", [1, 2, 4, 6])
def test_crop_takes_back_the_callers_last_tokens_whatever_the_padding(name, removed):
    model, ids = tiny_model(name), random_ids(3, 8)
    mask = torch.tensor([[0, 0, 1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 1, 0, 0, 0], [1, 0, 1, 1, 0, 1, 0, 1]])
    kept = 8 - removed
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(ids, attention_mask=mask, cache=cache)
    cache.crop(-removed)
    never_seen = model(ids[:, :kept], attention_mask=mask[:, :kept], use_cache=True).cache
    for cropped, fresh in zip(cache.layers, never_seen.layers, strict=True):
        assert error(cropped.state, fresh.state) < TOLERANCE
        if fresh.window is not None:
            assert error(cropped.window, fresh.window) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "linear-hybrid"])
def test_a_copied_recording_rolls_back_on_its_own(name):
    model, ids = tiny_model(name), random_ids(1, 12)
    _, cache = in_pieces(model, ids, [0, 6])
    cache.activate_past_recording()
    in_pieces(model, ids[:, 6:], range(5), cache)
    branch = copy.deepcopy(cache)
    branch.crop(-3)
    assert (int(cache.get_seq_length()), int(branch.get_seq_length())) == (10, 7)
    for recorded, start in ((cache, 10), (branch, 7)):
        assert error(model(ids[:, start:], cache=recorded).logits, model(ids).logits[:, start:]) < TOLERANCE


@torch.no_grad()
def test_crop_is_exact_under_autocast():
    model, ids = tiny_model("linear"), random_ids(1, 12)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, cache = in_pieces(model, ids, [0, 8])
        cache.activate_past_recording()
        in_pieces(model, ids[:, 8:], [0, 1, 2, 3, 4], cache)
        cache.crop(-2)
        _, fresh = in_pieces(model, ids, [0, 8, 9, 10])
    for cropped, expected in zip(cache.layers, fresh.layers, strict=True):
        assert torch.equal(cropped.state, expected.state)


@torch.no_grad()
def test_a_recorded_token_costs_less_than_a_state():
    model, cache = tiny_model("linear"), None
    _, cache = in_pieces(model, random_ids(1, 4), [0, 4])
    cache.activate_past_recording()
    in_pieces(model, random_ids(1, 6), range(7), cache)
    for layer in cache.layers:
        states = {id(x) for x in (layer.state, layer.base[0])}
        assert len(layer.records) == 6
        for record in layer.records:
            tokens = inspect.getclosurevars(record.replay).nonlocals["tokens"]
            assert not states & {id(x) for x in tokens}
            assert sum(x.numel() for x in (tokens.q, tokens.k, tokens.v)) < layer.state.numel()


@torch.no_grad()
@pytest.mark.parametrize("name", DELTA)
def test_crop_of_a_delta_state_is_refused(name):
    model = tiny_model(name)
    cache = DynamicCache(config=model.config)
    cache.activate_past_recording()
    model(random_ids(1, 5), cache=cache)
    assert not cache.is_croppable
    with pytest.raises(ValueError, match=r"crop: .*delta mixers cannot be rolled back"):
        cache.crop(-1)


@torch.no_grad()
def test_crop_refuses_what_it_cannot_do():
    model, ids = tiny_model(), random_ids(1, 5)
    cache = model(ids, use_cache=True).cache
    assert cache.is_croppable
    with pytest.raises(ValueError, match=r"remove 1 tokens, but 0 were recorded.*activate_past_recording"):
        cache.crop(-1)
    cache.activate_past_recording()
    model(ids[:, :2], cache=cache)
    with pytest.raises(ValueError, match="remove 3 tokens, but 2 were recorded"):
        cache.crop(-3)
    with pytest.raises(ValueError, match="tokens_to_remove must be 0 or negative, got 2"):
        cache.crop(2)
    assert int(cache.get_seq_length()) == 7


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_flow_through_the_cached_state(name):
    model, ids = tiny_model(name), random_ids(2, 12)
    model.train()
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    (expected,) = torch.autograd.grad(model(inputs_embeds=embeds).logits.square().mean(), embeds)
    first = model(inputs_embeds=embeds[:, :5], use_cache=True)
    second = model(inputs_embeds=embeds[:, 5:6], cache=first.cache)
    third = model(inputs_embeds=embeds[:, 6:], cache=second.cache or first.cache)
    logits = torch.cat([x.logits for x in (first, second, third)], dim=1)
    (actual,) = torch.autograd.grad(logits.square().mean(), embeds)
    assert error(actual, expected) < 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_after_a_prefill_without_gradients(name):
    model, ids = tiny_model(name), random_ids(2, 12)
    embeds = model.get_input_embeddings()(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embeds).logits[:, 5:]
    (expected,) = torch.autograd.grad(logits.square().mean(), embeds)
    with torch.no_grad():
        cache = model(inputs_embeds=embeds[:, :5], use_cache=True).cache
    bounds = [5, 6, 7, 12]
    logits = [model(inputs_embeds=embeds[:, i:j], cache=cache).logits for i, j in pairwise(bounds)]
    (actual,) = torch.autograd.grad(torch.cat(logits, dim=1).square().mean(), embeds)
    assert (actual[:, :5] == 0).all()
    assert error(actual[:, 5:], expected[:, 5:]) < 1e-4


@pytest.mark.parametrize("name", FEW)
def test_a_second_backward_through_a_cached_state(name):
    model, ids = tiny_model(name), random_ids(1, 12)
    cache = model(ids[:, :6], use_cache=True).cache
    loss = sum(model(ids[:, i : i + 1], cache=cache).logits.square().mean() for i in (6, 7))
    loss.backward(retain_graph=True)
    once = {name: p.grad.clone() for name, p in model.named_parameters()}
    loss.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, 2 * once[name])


@pytest.mark.parametrize("name", FEW)
def test_decoding_without_gradients_leaves_the_graph_of_the_prefill_alone(name):
    model, ids = tiny_model(name), random_ids(1, 12)
    prefill = model(ids[:, :6], use_cache=True)
    with torch.no_grad():
        logits, _ = in_pieces(model, ids[:, 6:], range(7), prefill.cache)
        assert error(logits, model(ids).logits[:, 6:]) < TOLERANCE
    prefill.logits.square().mean().backward()


@pytest.mark.parametrize("name", FEW)
def test_inference_mode_and_no_grad_share_a_cache(name):
    model, ids = tiny_model(name), random_ids(1, 12)
    with torch.inference_mode():
        _, cache = in_pieces(model, ids, [0, 6, 7])
    with torch.no_grad():
        logits, cache = in_pieces(model, ids[:, 7:], [0, 1, 3], cache)
        expected = model(ids).logits
    with torch.inference_mode():
        rest, _ = in_pieces(model, ids[:, 10:], [0, 1, 2], cache)
    assert error(torch.cat([logits, rest], 1), expected[:, 7:]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_a_copied_cache_goes_its_own_way(name):
    model, ids = tiny_model(name), random_ids(1, 12)
    _, cache = in_pieces(model, ids, [0, 6])
    branch = copy.deepcopy(cache)
    in_pieces(model, random_ids(1, 4, seed=1), [0, 1, 4], branch)
    logits, _ = in_pieces(model, ids[:, 6:], [0, 1, 6], cache)
    assert error(logits, model(ids).logits[:, 6:]) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ALL_NALA)
def test_a_reset_cache_starts_anew(name):
    model, ids = tiny_model(name), random_ids(3, 12)
    _, cache = in_pieces(model, random_ids(1, 7, seed=1), [0, 6, 7])
    cache.reset()
    assert int(cache.get_seq_length()) == 0
    logits, _ = in_pieces(model, ids, [0, 1, 7, 12], cache)
    assert error(logits, model(ids).logits) < TOLERANCE


@torch.no_grad()
def test_a_length_once_read_stays():
    model, ids = tiny_model(), random_ids(1, 12)
    _, cache = in_pieces(model, ids, [0, 6])
    before = cache.get_seq_length()
    in_pieces(model, ids[:, 6:], [0, 1, 2], cache)
    assert (int(before), int(cache.get_seq_length())) == (6, 8)


@torch.no_grad()
def test_a_cache_of_another_batch_is_refused():
    model = tiny_model()
    _, cache = in_pieces(model, random_ids(1, 6), [0, 6])
    with pytest.raises(ValueError, match=r"cache: holds 1 rows, got a batch of 3; .*batch_repeat_interleave"):
        model(random_ids(3, 1), cache=cache)


@pytest.mark.parametrize("name", ["linear", "linear-hybrid", "linear-rotary-hybrid"])
def test_a_cache_made_without_the_config_is_refused(name):
    with pytest.raises(
        ValueError, match=r"cache: layer \d must be a NaLa layer.*DynamicCache\(config=model.config\)"
    ):
        tiny_model(name)(random_ids(1, 4), cache=DynamicCache())


def test_what_is_no_cache_is_refused():
    with pytest.raises(TypeError, match=r"cache must be a transformers Cache.*got tuple"):
        tiny_model()(random_ids(1, 4), cache=((None, None),))


def test_an_encoder_has_no_cache():
    model = tiny_model(is_causal=False)
    assert model(random_ids(1, 4), use_cache=True).cache is None
    with pytest.raises(ValueError, match="cache: is_causal=False leaves no state"):
        model(random_ids(1, 4), cache=DynamicCache(config=model.config))


def test_layers_of_a_hybrid_cache():
    cache = DynamicCache(config=tiny_model("linear-hybrid").config)
    assert [type(layer) for layer in cache.layers] == [NaLaCacheLayer, DynamicLayer]


@torch.no_grad()
@pytest.mark.parametrize("conv_size", [1, 2, 7])
def test_any_convolution_size(conv_size):
    model, ids = tiny_model(conv_size=conv_size), random_ids(2, 20)
    logits, cache = in_pieces(model, ids, [0, 3, 4, 5, 12, 20])
    assert error(logits, model(ids).logits) < TOLERANCE
    assert (cache.layers[0].window is None) == (conv_size == 1)


@pytest.mark.parametrize(
    ("made_by", "given_to"),
    [
        ("linear-no-conv", "linear"),
        ("linear", "linear-no-conv"),
        ("linear", "gated_delta"),
        ("gated_delta", "linear"),
    ],
)
def test_a_cache_of_another_config_is_refused(made_by, given_to):
    ids = random_ids(1, 6)
    cache = tiny_model(made_by)(ids, use_cache=True).cache
    with pytest.raises(ValueError, match=r"cache: a state of .* filled by a model of another config"):
        tiny_model(given_to)(ids, cache=cache)
