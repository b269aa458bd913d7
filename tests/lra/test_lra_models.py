"""The encoders: three kinds of attention of one size, and the head for two documents."""

import pytest
import torch
from lra_runs import TINY

from nalaformer_hf.training.errors import ConfigError
from nalaformer_hf.training.lra_config import LRADataSection, LRAModelSection
from nalaformer_hf.training.lra_models import DocumentPairClassifier, make_lra_model
from nalaformer_hf.training.settings import recipe_names

ATTENTIONS = ("nala", "elu", "softmax")


def make(attention="nala", task="listops", **overrides):
    source = "pairs" if task == "retrieval" else None
    section = LRAModelSection(attention=attention, overrides=TINY | overrides)
    return make_lra_model(section, LRADataSection(task=task, source=source)).eval()


def make_pair_classifier(**overrides) -> DocumentPairClassifier:
    model = make(task="retrieval", initializer_range=0.3, **overrides)
    assert isinstance(model, DocumentPairClassifier)
    return model


def random_pairs(length=12) -> torch.Tensor:
    return torch.randint(1, 257, (3, 2, length))


def test_attentions_have_one_size_and_differ():
    models = {name: make(name, hidden_size=64, intermediate_size=128) for name in ATTENTIONS}
    sizes = {name: model.num_parameters() for name, model in models.items()}
    assert sizes["nala"] == sizes["elu"]
    assert sizes["softmax"] == pytest.approx(sizes["nala"], rel=0.02)
    assert [model.config.feature_form for model in models.values()][:2] == ["cosine", "elu"]
    kinds = [set(model.config.layer_types) for model in models.values()]
    assert kinds == [{"nala_attention"}, {"nala_attention"}, {"full_attention"}]
    assert not any(model.config.is_causal for model in models.values())


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_order_beyond_the_convolution_matters(attention):
    """Two tokens change places, far from each other and amid equal ones."""
    ids = torch.full((1, 60), 3)
    ids[0, 10], ids[0, 50] = 1, 2
    mask, model = torch.ones_like(ids), make(attention, initializer_range=0.3)
    swapped = ids.clone()
    swapped[0, 10], swapped[0, 50] = 2, 1
    before, after = (model(input_ids=x, attention_mask=mask).logits for x in (ids, swapped))
    assert (before - after).abs().max() > 1e-3 * before.abs().max()


@torch.no_grad()
def test_pair_classifier_is_an_mlp_on_the_combined_encodings():
    model, ids = make_pair_classifier(), random_pairs()
    mask = torch.ones_like(ids)
    encoded = [model.model(ids[:, i], attention_mask=mask[:, i]).last_hidden_state.mean(1) for i in (0, 1)]
    u, v = encoded
    first, _, last = model.score
    hidden = (torch.cat([u, v, u * v, u - v], 1) @ first.weight.T + first.bias).clamp(min=0)
    logits = model(ids, mask).logits
    torch.testing.assert_close(logits, hidden @ last.weight.T + last.bias, rtol=1e-4, atol=1e-5)
    labels = torch.tensor([0, 1, 1])
    loss = -logits.log_softmax(-1)[torch.arange(3), labels].mean()
    torch.testing.assert_close(model(ids, mask, labels).loss, loss)


@torch.no_grad()
@pytest.mark.parametrize("attention", ATTENTIONS)
def test_padding_of_a_document_does_not_matter(attention):
    model, ids = make(attention, task="retrieval", initializer_range=0.3), random_pairs()
    ids[0, 0, 5:] = 0
    ids[1, 1, 9:] = 0
    mask = ids != 0
    alone = model(ids[1:2, :, :], mask[1:2]).logits
    longer = torch.nn.functional.pad(ids, (0, 7))
    torch.testing.assert_close(model(longer, longer != 0).logits[1:2], alone, rtol=1e-4, atol=1e-5)


def test_pair_classifier_is_saved_and_loaded(tmp_path):
    model, ids = make_pair_classifier(), random_pairs()
    model.save_pretrained(tmp_path)
    loaded = DocumentPairClassifier.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.equal(loaded(ids, ids != 0).logits, model(ids, ids != 0).logits)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"hiden_size": 8}, "unknown key model.overrides.hiden_size; .* model.overrides.hidden_size"),
        ({"is_causal": True}, "model.overrides cannot set is_causal: it follows from the task"),
        ({"feature_form": "relu"}, "model.overrides cannot set feature_form"),
        ({"hidden_size": 15}, "model: hidden_size must be a multiple of num_attention_heads"),
    ],
)
def test_overrides_that_do_not_fit_are_refused(overrides, message):
    with pytest.raises(ConfigError, match=message):
        make(**overrides)


def test_there_is_a_recipe_for_each_task():
    assert recipe_names("lra") == ["image", "listops", "listops-small", "pathfinder", "retrieval", "text"]
