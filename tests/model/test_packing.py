"""Packed rows: no document sees another one, however the caller says where they end."""

import itertools

import pytest
import torch
from tiny_models import FEW, HYBRIDS, VARIANTS, error, random_ids, tiny_model
from transformers import DataCollatorWithFlattening, DynamicCache

TOLERANCE = 1e-5
LENGTHS = [5, 1, 70, 2]
BOUNDS = [0, 5, 6, 76, 78]


def documents():
    return [random_ids(1, length, seed=i) for i, length in enumerate(LENGTHS)]


def packed_arguments(how):
    """The one row of all documents, and what tells where they end."""
    restarting = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    bounds = torch.tensor(BOUNDS, dtype=torch.int32)
    owners = torch.repeat_interleave(torch.arange(4), torch.tensor(LENGTHS))[None].int()
    flash = {"cu_seq_lens_q": bounds, "cu_seq_lens_k": bounds, "max_length_q": 70, "max_length_k": 70}
    return {
        "positions": {"position_ids": restarting},
        "bounds": {"cu_seq_lens_q": bounds},
        "bounds with an empty document": {"cu_seq_lens_q": torch.tensor([0, 0, 5, 6, 6, 76, 78, 78])},
        "owners": {"seq_idx": owners},
        "flash keywords": {"position_ids": restarting, **flash},
        "bounds and ones": {"cu_seq_lens_q": bounds, "attention_mask": torch.ones(1, 78)},
    }[how]


HOW = ["positions", "bounds", "bounds with an empty document", "owners", "flash keywords", "bounds and ones"]


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("how", HOW)
def test_packed_documents_equal_separate_ones(name, how):
    model = tiny_model(name)
    packed = model(torch.cat(documents(), dim=1), **packed_arguments(how)).logits
    expected = torch.cat([model(document).logits for document in documents()], dim=1)
    assert error(packed, expected) < TOLERANCE


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("how", ["positions", "bounds"])
def test_no_gradient_crosses_documents(name, how):
    model = tiny_model(name)
    embeds = model.get_input_embeddings()(torch.cat(documents(), dim=1)).detach().requires_grad_()
    logits = model(inputs_embeds=embeds, **packed_arguments(how)).logits
    for start, end in itertools.pairwise(BOUNDS):
        loss = logits[:, start:end].square().mean()
        (gradient,) = torch.autograd.grad(loss, embeds, retain_graph=True)
        inside = torch.zeros(78, dtype=torch.bool)
        inside[start:end] = True
        assert (gradient[0, ~inside] == 0).all()
        assert (gradient[0, inside] != 0).any(-1).all()


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("how", ["position_ids", "seq_idx"])
def test_each_row_of_a_batch_may_be_packed(name, how):
    model, ids = tiny_model(name), random_ids(3, 12)
    ends = [4, 12, 7]
    positions = torch.stack([torch.cat([torch.arange(end), torch.arange(12 - end)]) for end in ends])
    owners = torch.stack([(torch.arange(12) >= end).int() for end in ends])
    logits = model(ids, **{how: positions if how == "position_ids" else owners}).logits
    for row, end in enumerate(ends):
        parts = [ids[row : row + 1, :end], ids[row : row + 1, end:]]
        expected = torch.cat([model(part).logits[0] for part in parts if part.shape[1]])
        assert error(logits[row], expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", HYBRIDS)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_bounds_rule_whatever_the_positions_are(name, implementation):
    """Positions that go on across documents: rotary is relative, so the documents are as alone."""
    model = tiny_model(name)
    model.set_attn_implementation(implementation)
    arguments = {"cu_seq_lens_q": torch.tensor(BOUNDS), "position_ids": torch.arange(78)[None]}
    packed = model(torch.cat(documents(), dim=1), **arguments).logits
    expected = torch.cat([model(document).logits for document in documents()], dim=1)
    assert error(packed, expected) < TOLERANCE


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "linear-rotary", "linear-hybrid", "linear-rotary-hybrid"])
@pytest.mark.parametrize("how", HOW)
def test_packed_documents_of_an_encoder(name, how):
    model = tiny_model(name, is_causal=False)
    packed = model(torch.cat(documents(), dim=1), **packed_arguments(how)).logits
    expected = torch.cat([model(document).logits for document in documents()], dim=1)
    assert error(packed, expected) < TOLERANCE


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("flash_keywords", [False, True])
def test_flattening_collator(name, flash_keywords):
    model = tiny_model(name)
    features = [{"input_ids": document[0].tolist()} for document in documents()]
    batch = DataCollatorWithFlattening(return_tensors="pt", return_flash_attn_kwargs=flash_keywords)(features)
    outputs = model(**batch)
    total, count = 0.0, 0
    for document in documents():
        predicted = document.shape[1] - 1
        if predicted:
            total += model(document, labels=document).loss * predicted
            count += predicted
    torch.testing.assert_close(outputs.loss, total / count)
    assert outputs.cache is None


@torch.no_grad()
def test_packed_rows_leave_no_cache():
    model, ids = tiny_model(), torch.cat(documents(), dim=1)
    assert model(ids, use_cache=True, cu_seq_lens_q=torch.tensor(BOUNDS)).cache is None
    for arguments in (
        {"cu_seq_lens_q": torch.tensor(BOUNDS)},
        {"seq_idx": torch.zeros(1, 78, dtype=torch.int)},
    ):
        with pytest.raises(
            ValueError, match="cu_seq_lens_q, seq_idx: packed sequences cannot continue a cache"
        ):
            model(ids, cache=DynamicCache(config=model.config), **arguments)


@pytest.mark.parametrize(
    ("bounds", "message"),
    [
        ([0, 5, 77], r"must rise from 0 to the 78 tokens, got \[0, 5, 77\]"),
        ([0, 5, 79], "must rise from 0 to the 78 tokens"),
        ([1, 78], "must rise from 0"),
        ([0, 9, 5, 78], "must rise from 0"),
        ([78], r"must be \(sequences \+ 1,\), at least two, got shape \(1,\)"),
        ([[0, 78]], r"must be \(sequences \+ 1,\), at least two, got shape \(1, 2\)"),
    ],
)
def test_bounds_that_do_not_fit_are_refused(bounds, message):
    with pytest.raises(ValueError, match=f"cu_seq_lens_q {message}"):
        tiny_model()(torch.cat(documents(), dim=1), cu_seq_lens_q=torch.tensor(bounds))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bool, torch.int16])
def test_bounds_of_another_dtype_are_refused(dtype):
    with pytest.raises(TypeError, match=f"cu_seq_lens_q must be int32 or int64, got {dtype}"):
        tiny_model()(random_ids(1, 4), cu_seq_lens_q=torch.tensor([0, 4]).to(dtype))


def test_bounds_of_more_than_one_row_are_refused():
    with pytest.raises(ValueError, match=r"cu_seq_lens_q needs one packed row \(batch 1\), got batch 2"):
        tiny_model()(random_ids(2, 4), cu_seq_lens_q=torch.tensor([0, 4, 8]))


def test_owners_that_do_not_fit_are_refused():
    with pytest.raises(
        ValueError, match=r"seq_idx must be integers \(2 or 1, 4\), got torch.int32 of shape \(2, 3\)"
    ):
        tiny_model()(random_ids(2, 4), seq_idx=torch.zeros(2, 3, dtype=torch.int))


@pytest.mark.parametrize("how", ["bounds", "owners"])
def test_padding_beside_bounds_is_refused(how):
    mask = torch.ones(1, 78)
    mask[0, 0] = 0
    with pytest.raises(ValueError, match="attention_mask: packed sequences have no padding"):
        tiny_model()(torch.cat(documents(), dim=1), attention_mask=mask, **packed_arguments(how))
