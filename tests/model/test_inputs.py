"""What a call may be given: old names with a warning, and refusals that name the argument."""

import pytest
import torch
from tiny_models import FEW, error, random_ids, tiny_model

from nalaformer_hf import NaLaForSequenceClassification, NaLaForTokenClassification, NaLaModel

HEADS = [NaLaModel, NaLaForSequenceClassification, NaLaForTokenClassification]


@torch.no_grad()
@pytest.mark.parametrize("old_name", ["past_key_values", "cache_params"])
@pytest.mark.parametrize("name", FEW)
def test_old_cache_names_work_with_a_warning(name, old_name):
    model, ids = tiny_model(name), random_ids(1, 8)
    cache = model(ids[:, :5], use_cache=True).cache
    with pytest.warns(FutureWarning, match=f"`{old_name}` is deprecated.*Use `cache` instead"):
        logits = model(ids[:, 5:], **{old_name: cache}).logits
    assert error(logits, model(ids).logits[:, 5:]) < 1e-5


@pytest.mark.parametrize("old_name", ["past_key_values", "cache_params"])
@pytest.mark.parametrize("model_class", [None, NaLaModel, NaLaForSequenceClassification])
def test_both_cache_names_at_once_are_refused(model_class, old_name):
    model = tiny_model() if model_class is None else tiny_model("linear", model_class)
    cache = tiny_model()(random_ids(1, 5), use_cache=True).cache
    with pytest.raises(ValueError, match=f"Both `{old_name}` and `cache` are set"):
        model(random_ids(1, 1), cache=cache, **{old_name: cache})


@pytest.mark.parametrize("model_class", [None, *HEADS])
@pytest.mark.parametrize("keyword", ["attention_masks", "cache_position", "cu_seqlens"])
def test_an_unknown_keyword_is_refused(model_class, keyword):
    model = tiny_model() if model_class is None else tiny_model("linear", model_class)
    with pytest.raises(TypeError, match=rf"unexpected keyword '{keyword}'; .*known: "):
        model(random_ids(1, 4), **{keyword: None})


def test_a_misspelt_keyword_is_told_the_nearest():
    with pytest.raises(TypeError, match="did you mean 'cu_seq_lens_q'"):
        tiny_model()(random_ids(1, 4), cu_seqlens_q=None)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "give either input_ids or inputs_embeds, got none"),
        ({"input_ids": random_ids(1, 4), "inputs_embeds": torch.zeros(1, 4, 32)}, "got both"),
        ({"input_ids": random_ids(1, 4)[0]}, r"input_ids must be integers \(batch, tokens\).*\(4,\)"),
        ({"input_ids": torch.zeros(1, 4)}, r"input_ids must be integers .*torch.float32"),
        ({"input_ids": torch.zeros(1, 0, dtype=torch.long)}, "input_ids must .* at least one token"),
        ({"input_ids": random_ids(1, 4).bool()}, "input_ids must be integers .*torch.bool"),
        ({"input_ids": torch.zeros(0, 4, dtype=torch.long)}, r"input_ids must .* at least one .*\(0, 4\)"),
        ({"inputs_embeds": torch.zeros(0, 4, 32)}, r"inputs_embeds must .* at least one .*\(0, 4, 32\)"),
        (
            {"inputs_embeds": torch.zeros(1, 4, 32).double()},
            "inputs_embeds must be torch.float32 like the model, unless under autocast, got torch.float64",
        ),
        ({"inputs_embeds": torch.zeros(1, 4, 16)}, r"inputs_embeds must be floats \(batch, tokens, 32\)"),
        ({"inputs_embeds": torch.zeros(4, 32)}, "inputs_embeds must be floats"),
        ({"inputs_embeds": torch.zeros(1, 0, 32)}, "inputs_embeds must .* at least one token"),
        ({"inputs_embeds": torch.zeros(1, 4, 32).int()}, "inputs_embeds must be floats .*torch.int32"),
        (
            {"input_ids": random_ids(2, 4), "position_ids": torch.arange(5)[None]},
            r"position_ids must be .*\(2 or 1, 4\)",
        ),
        ({"input_ids": random_ids(2, 4), "position_ids": torch.arange(4)}, "position_ids must be integers"),
        (
            {"input_ids": random_ids(2, 4), "position_ids": torch.zeros(2, 4)},
            "position_ids must be .*torch.float32",
        ),
        (
            {"input_ids": random_ids(2, 4), "position_ids": torch.ones(2, 4).bool()},
            "position_ids must be .*torch.bool",
        ),
    ],
)
@pytest.mark.parametrize("model_class", [NaLaModel, NaLaForSequenceClassification])
def test_tokens_and_positions_are_checked(model_class, arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_model("linear", model_class)(**arguments)


@pytest.mark.parametrize("model_class", [NaLaModel, NaLaForSequenceClassification])
@pytest.mark.parametrize(
    "name", ["input_ids", "inputs_embeds", "attention_mask", "position_ids", "cu_seq_lens_q", "seq_idx"]
)
def test_what_is_no_tensor_is_refused(model_class, name):
    arguments = {} if name == "inputs_embeds" else {"input_ids": random_ids(1, 3)}
    with pytest.raises(TypeError, match=f"{name} must be a tensor, got list"):
        tiny_model("linear", model_class)(**{**arguments, name: [[0, 1, 1]]})


def test_a_mask_per_layer_type_is_checked():
    model, ids = tiny_model("linear-hybrid"), random_ids(1, 3)
    with pytest.raises(
        ValueError,
        match="attention_mask must have the keys full_attention, nala_attention, got nala_attention",
    ):
        model(ids, attention_mask={"nala_attention": None})
    with pytest.raises(TypeError, match=r"attention_mask\['nala_attention'\] must be a tensor, got list"):
        model(ids, attention_mask={"nala_attention": [1, 1, 1], "full_attention": None})


@torch.no_grad()
def test_embeddings_of_another_dtype_are_taken_under_autocast():
    model, embeds = tiny_model(), torch.randn(1, 4, 32)
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(inputs_embeds=embeds.bfloat16()).logits
    assert error(logits.float(), model(inputs_embeds=embeds).logits) < 0.1


@pytest.mark.parametrize(
    ("count", "kind", "message"),
    [
        (-1, ValueError, "logits_to_keep must be at least 0, got -1"),
        (True, TypeError, "logits_to_keep must be a number or a tensor of indices, got bool"),
        ([0, 2], TypeError, "logits_to_keep must be a number or a tensor of indices, got list"),
    ],
)
def test_logits_to_keep_is_checked(count, kind, message):
    with pytest.raises(kind, match=message):
        tiny_model()(random_ids(1, 4), logits_to_keep=count)


def test_an_id_outside_the_vocabulary_is_refused():
    with pytest.raises(IndexError):
        tiny_model()(torch.tensor([[97]]))


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_outputs_as_tuple(name):
    model, ids = tiny_model(name), random_ids(1, 5)
    logits, cache = model(ids, use_cache=True, return_dict=False)
    assert torch.equal(logits, model(ids).logits)
    assert int(cache.get_seq_length()) == 5


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_logits_to_keep(name):
    model, ids = tiny_model(name), random_ids(2, 9)
    logits = model(ids).logits
    assert error(model(ids, logits_to_keep=2).logits, logits[:, -2:]) < 1e-6
    picked = torch.tensor([0, 4])
    assert error(model(ids, logits_to_keep=picked).logits, logits[:, picked]) < 1e-6


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
def test_use_cache_follows_the_config(name):
    ids = random_ids(1, 5)
    assert tiny_model(name)(ids).cache is not None
    assert tiny_model(name, use_cache=False)(ids).cache is None
    assert tiny_model(name)(ids, use_cache=False).cache is None


@torch.no_grad()
@pytest.mark.parametrize("name", ["delta", "gated_delta-hybrid"])
def test_a_delta_model_cannot_be_called_as_an_encoder(name):
    with pytest.raises(ValueError, match="is_causal=False needs the 'linear' mixer"):
        tiny_model(name)(random_ids(1, 5), is_causal=False, use_cache=False)
