"""`config.chunk_loss`: the loss and the gradients of the plain form, without all logits at once."""

import pytest
import torch
from tiny_models import VOCAB, error, random_ids, tiny_config, tiny_model

from nalaformer_hf.modeling import loss_nala

TOLERANCE = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2e-2}


@pytest.fixture(autouse=True)
def _small_pieces(monkeypatch):
    monkeypatch.setattr(loss_nala, "CHUNK_LOGITS", 7 * VOCAB)


def pair(name: str = "linear", **fields):
    """The same model with the plain loss and with the chunked one."""
    return tiny_model(name, **fields), tiny_model(name, chunk_loss=True, **fields)


def labelled(batch: int = 2, length: int = 17):
    ids = random_ids(batch, length)
    labels = ids.clone()
    labels[0, :6], labels[1, 12] = -100, -100
    return ids, labels


def loss_and_gradients(model, ids, labels, autocast=False, **kwargs):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        output = model(ids, labels=labels, **kwargs)
    assert (output.logits is None) == model.config.chunk_loss
    gradients = torch.autograd.grad(output.loss, list(model.parameters()))
    return output.loss.detach(), torch.cat([gradient.flatten() for gradient in gradients])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("tied", [False, True])
def test_equals_the_plain_loss(tied, dtype):
    results = [loss_and_gradients(model.to(dtype), *labelled()) for model in pair(tie_word_embeddings=tied)]
    (loss, gradients), (chunked, chunked_gradients) = results
    assert chunked.dtype == loss.dtype
    # The library takes the loss in fp32 whatever the model's dtype.
    assert error(chunked, loss) <= 5e-7
    assert error(chunked_gradients, gradients) <= max(TOLERANCE[dtype], 2e-6)


@pytest.mark.parametrize(
    "kwargs",
    [
        {"num_items_in_batch": 40},
        {"num_items_in_batch": torch.tensor(9.0)},
        {"shift_labels": random_ids(2, 17, seed=5)},
    ],
)
def test_keywords_of_the_loss(kwargs):
    plain, chunked = (loss_and_gradients(model, *labelled(), **kwargs) for model in pair())
    assert error(chunked[0], plain[0]) <= 5e-7
    assert error(chunked[1], plain[1]) <= TOLERANCE[torch.float32]


def test_under_autocast():
    plain, chunked = (loss_and_gradients(model, *labelled(), autocast=True) for model in pair())
    assert error(chunked[0], plain[0]) <= 5e-7
    assert error(chunked[1], plain[1]) <= TOLERANCE[torch.bfloat16]


def test_with_gradient_checkpointing_of_the_blocks():
    plain, chunked = (model.train() for model in pair())
    chunked.activation_checkpointing_enable()
    results = [loss_and_gradients(model, *labelled(), use_cache=False) for model in (plain, chunked)]
    assert error(results[1][1], results[0][1]) <= TOLERANCE[torch.float32]


def test_nothing_to_predict_is_as_in_the_plain_form():
    ids = random_ids(2, 5)
    losses = [model(ids, labels=torch.full_like(ids, -100)).loss for model in pair()]
    assert all(loss.isnan() for loss in losses)


def test_no_labels_no_change():
    plain, chunked = pair()
    ids = random_ids(2, 9)
    assert torch.equal(chunked(ids).logits, plain(ids).logits)
    assert chunked(ids, logits_to_keep=1).logits.shape == (2, 1, VOCAB)


@pytest.mark.parametrize("kept", [1, torch.tensor([0, 2])])
def test_logits_to_keep_is_refused(kept):
    _, chunked = pair()
    with pytest.raises(ValueError, match="logits_to_keep: chunk_loss leaves no logits"):
        chunked(random_ids(2, 9), labels=random_ids(2, 9), logits_to_keep=kept)


def test_never_holds_all_logits():
    """No tensor of logits is larger than a piece's, or than the head's weights, (32, VOCAB) transposed."""
    _, model = pair()
    ids, labels = labelled(4, 64)
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.ndim and result.shape[-1] == VOCAB:
                sizes.append(result.numel())
            return result

    with Sizes():
        model(ids, labels=labels).loss.backward()
    assert 7 * VOCAB in sizes
    assert max(sizes) <= 32 * VOCAB


def test_the_field_is_checked():
    with pytest.raises(TypeError, match="chunk_loss"):
        tiny_config(chunk_loss="yes")
