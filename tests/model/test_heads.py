"""The heads: classification of rows and tokens, question answering, and what they read of a padded row."""

import pytest
import torch
from tiny_models import FEW, LINEAR, VARIANTS, error, random_ids, tiny_config, tiny_model
from torch.nn.functional import cross_entropy
from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from nalaformer_hf import (
    NaLaConfig,
    NaLaForCausalLM,
    NaLaForQuestionAnswering,
    NaLaForSequenceClassification,
    NaLaForTokenClassification,
    NaLaModel,
)

AUTO_CLASSES = {
    AutoModel: NaLaModel,
    AutoModelForCausalLM: NaLaForCausalLM,
    AutoModelForSequenceClassification: NaLaForSequenceClassification,
    AutoModelForTokenClassification: NaLaForTokenClassification,
    AutoModelForQuestionAnswering: NaLaForQuestionAnswering,
}
LEFT = [[0, 0, 0, 1, 1, 1, 1], [0, 1, 1, 1, 1, 1, 1]]
RIGHT = [[1, 1, 1, 1, 0, 0, 0], [1, 1, 1, 1, 1, 1, 0]]
INTERIOR = [[1, 0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 1, 1, 1]]


@torch.no_grad()
@pytest.mark.parametrize(("auto_class", "model_class"), AUTO_CLASSES.items())
def test_auto_classes_need_no_remote_code(auto_class, model_class, tmp_path):
    model = tiny_model("gated_delta", model_class)
    assert type(auto_class.from_config(tiny_config())) is model_class
    model.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is NaLaConfig
    loaded = auto_class.from_pretrained(tmp_path)
    assert type(loaded) is model_class
    ids = random_ids(1, 6)
    assert torch.equal(loaded(ids)[0], model(ids)[0])


@torch.no_grad()
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("pooling", ["last", "mean"])
@pytest.mark.parametrize("mask", [LEFT, RIGHT, INTERIOR], ids=["left", "right", "interior"])
@pytest.mark.parametrize("told_by", ["mask", "padding ids"])
def test_classification_reads_real_tokens_only(name, pooling, mask, told_by):
    model = tiny_model(name, NaLaForSequenceClassification, classifier_pooling=pooling, num_labels=3)
    ids, mask = random_ids(2, 7), torch.tensor(mask)
    arguments = {"attention_mask": mask}
    if told_by == "padding ids":
        ids, arguments = ids * mask, {}
    alone = [model(row[real.bool()][None]).logits for row, real in zip(ids, mask, strict=True)]
    assert error(model(ids, **arguments).logits, torch.cat(alone)) < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_is_of_the_last_hidden_state(pooling):
    model = tiny_model("linear", NaLaForSequenceClassification, classifier_pooling=pooling)
    ids = random_ids(2, 7)
    hidden_states = model.model(ids).last_hidden_state
    pooled = hidden_states[:, -1] if pooling == "last" else hidden_states.mean(1)
    assert error(model(ids).logits, model.score(pooled)) < 1e-6


@torch.no_grad()
def test_classification_of_a_fully_masked_row_is_finite():
    for pooling in ("last", "mean"):
        model = tiny_model("linear", NaLaForSequenceClassification, classifier_pooling=pooling)
        assert torch.isfinite(model(torch.zeros(2, 5, dtype=torch.long)).logits).all()


@torch.no_grad()
def test_classification_continues_a_cache():
    model, ids = tiny_model("linear", NaLaForSequenceClassification), random_ids(1, 9)
    cache = model(ids[:, :6], use_cache=True).cache
    assert error(model(ids[:, 6:], cache=cache).logits, model(ids).logits) < 1e-5
    cache = model(ids[:, :6].repeat(2, 1), use_cache=True).cache
    with pytest.raises(ValueError, match="attention_mask: 2 rows need one"):
        model(ids[:, 6:].repeat(2, 1), cache=cache)
    mask = torch.ones(2, 9)
    mask[0, 8] = 0
    continued = model(ids[:, 6:].repeat(2, 1), cache=cache, attention_mask=mask).logits
    assert error(continued[0], model(ids[:, :8]).logits[0]) < 1e-5
    assert error(continued[1], model(ids).logits[0]) < 1e-5


def test_classification_must_know_the_real_tokens():
    model = tiny_model("linear", NaLaForSequenceClassification, pad_token_id=None)
    with pytest.raises(
        ValueError, match=r"attention_mask: 2 rows need one, or config\.pad_token_id and input_ids"
    ):
        model(random_ids(2, 5))
    with pytest.raises(ValueError, match="attention_mask: 2 rows need one"):
        model(inputs_embeds=torch.zeros(2, 5, 32))
    assert model(random_ids(1, 5)).logits.shape == (1, 2)


@pytest.mark.parametrize(
    ("num_labels", "labels", "problem"),
    [
        (3, torch.tensor([0, 2]), "single_label_classification"),
        (1, torch.tensor([0.5, -1.0]), "regression"),
        (3, torch.tensor([[0.0, 1.0, 1.0], [1.0, 0.0, 0.0]]), "multi_label_classification"),
    ],
)
def test_classification_losses(num_labels, labels, problem):
    model = tiny_model("linear", NaLaForSequenceClassification, num_labels=num_labels)
    outputs = model(random_ids(2, 5), labels=labels)
    assert model.config.problem_type == problem
    outputs.loss.backward()
    assert outputs.logits.shape == (2, num_labels)
    assert all(torch.isfinite(p.grad).all() for p in model.parameters())


@pytest.mark.parametrize("name", FEW)
def test_token_classification(name):
    model = tiny_model(name, NaLaForTokenClassification, num_labels=5)
    ids, labels = random_ids(2, 7), torch.randint(5, (2, 7))
    labels[0, :3] = -100
    outputs = model(ids, labels=labels)
    assert outputs.logits.shape == (2, 7, 5)
    expected = cross_entropy(outputs.logits.flatten(0, 1), labels.flatten())
    torch.testing.assert_close(outputs.loss, expected)
    assert error(outputs.logits, model.score(model.model(ids).last_hidden_state)) < 1e-6


@pytest.mark.parametrize("name", FEW)
def test_question_answering(name):
    model, ids = tiny_model(name, NaLaForQuestionAnswering), random_ids(2, 7)
    starts, ends = torch.tensor([1, 2]), torch.tensor([3, 6])
    outputs = model(ids, start_positions=starts, end_positions=ends)
    expected = (cross_entropy(outputs.start_logits, starts) + cross_entropy(outputs.end_logits, ends)) / 2
    torch.testing.assert_close(outputs.loss, expected)
    assert model.get_input_embeddings() is model.model.embeddings
    assert model.resize_token_embeddings(101).num_embeddings == 101
    assert model(torch.tensor([[100]])).start_logits.shape == (1, 1)


@torch.no_grad()
@pytest.mark.parametrize("name", VARIANTS)
def test_hidden_states(name):
    model, ids = tiny_model(name), random_ids(2, 7)
    outputs = model(ids, output_hidden_states=True)
    assert len(outputs.hidden_states) == 3
    assert torch.equal(outputs.hidden_states[0], model.model.embeddings(ids))
    assert torch.equal(outputs.logits, model.lm_head(outputs.hidden_states[-1]))
    assert model(ids).hidden_states is None


@torch.no_grad()
@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("padded", [False, True])
def test_attentions_are_the_weights_that_the_mixer_applies(name, is_causal, padded):
    model, ids = tiny_model(name, is_causal=is_causal), random_ids(2, 9)
    model.set_attn_implementation("eager")
    mask = torch.ones_like(ids)
    if padded:
        mask[0, [0, 4, 5]] = 0
    values, outputs = {}, {}
    for i, block in enumerate(model.model.layers):
        if block.layer_type == "nala_attention":
            block.attn._mix = _recording(block.attn._mix, values, outputs, i)
    attentions = model(ids, attention_mask=mask, output_attentions=True, use_cache=False).attentions
    assert [x.shape for x in attentions] == [(2, 2, 9, 9)] * 2
    for i, weights in enumerate(attentions):
        for row, real in zip(weights, mask.bool(), strict=True):
            rows = row[:, real][:, :, real]
            assert (row[:, real][:, :, ~real] == 0).all()
            if is_causal:
                assert torch.equal(rows, rows.tril())
            if not (i in values and model.config.use_rotary):
                torch.testing.assert_close(rows.sum(-1), torch.ones(2, int(real.sum())))
    for i, value in values.items():
        # The mixer sees padding leftmost.
        order = mask.argsort(dim=1, stable=True)
        weights = (
            attentions[i].take_along_dim(order[:, None, :, None], 2).take_along_dim(order[:, None, None], 3)
        )
        mixed = torch.einsum("bhts,bshv->bthv", weights, value)
        real = mask.bool().take_along_dim(order, 1)
        assert error(mixed[real], outputs[i][real]) < 1e-5


def _recording(mix, values, outputs, i):
    """The mixer, keeping what it was given as v and what it gave."""

    def mix_and_keep(tokens, *past):
        output = mix(tokens, *past)
        values[i], outputs[i] = tokens.v.float(), output[0]
        return output

    return mix_and_keep


@torch.no_grad()
def test_attentions_that_cannot_be_given_are_refused():
    ids = random_ids(1, 5)
    for name in ("delta", "gated_delta"):
        with pytest.raises(
            ValueError, match=r"output_attentions: the '.*delta' mixer has no attention weights"
        ):
            tiny_model(name)(ids, output_attentions=True)
    with pytest.raises(ValueError, match="only with attn_implementation='eager', got 'sdpa'"):
        tiny_model("linear-hybrid", attn_implementation="sdpa")(ids, output_attentions=True)
    model = tiny_model()
    with pytest.raises(ValueError, match="output_attentions: explicit weights of packed sequences"):
        model(ids, cu_seq_lens_q=torch.tensor([0, 2, 5]), output_attentions=True)
    cache = model(ids, use_cache=True).cache
    with pytest.raises(ValueError, match="output_attentions needs the keys of all tokens"):
        model(ids, cache=cache, output_attentions=True)


@torch.no_grad()
@pytest.mark.parametrize("name", ["linear", "gated_delta", "linear-hybrid"])
def test_output_attentions_off_gives_none(name):
    assert tiny_model(name)(random_ids(1, 5), output_attentions=False).attentions is None


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_one_row_of_mask_serves_all_rows(pooling):
    model = tiny_model("linear", NaLaForSequenceClassification, num_labels=4, classifier_pooling=pooling)
    ids, mask = random_ids(3, 7), torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=mask.expand(3, -1)).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits, expected)


@torch.no_grad()
def test_one_row_of_mask_serves_all_rows_of_a_hybrid():
    model = tiny_model("linear-hybrid")
    ids, mask = random_ids(3, 7), torch.tensor([[0, 1, 1, 1, 1, 1, 1]])
    expected = model(ids, attention_mask=mask.expand(3, -1)).logits
    torch.testing.assert_close(model(ids, attention_mask=mask).logits[:, 1:], expected[:, 1:])


@pytest.mark.parametrize("packed", ["cu_seq_lens_q", "seq_idx", "position_ids"])
def test_classification_of_packed_rows_is_refused(packed):
    bounds = torch.tensor([0, 2, 5])
    arguments = {"seq_idx": torch.tensor([[0, 0, 1, 1, 1]]), "position_ids": torch.tensor([[0, 1, 0, 1, 2]])}
    with pytest.raises(ValueError, match="one label a row needs one sequence a row, got packed ones"):
        tiny_model("linear", NaLaForSequenceClassification)(
            random_ids(1, 5), **{packed: arguments.get(packed, bounds)}
        )


def test_classification_takes_no_mask_per_layer_type():
    with pytest.raises(TypeError, match="attention_mask must be a tensor, got dict"):
        tiny_model("linear", NaLaForSequenceClassification)(
            random_ids(1, 5), attention_mask={"nala_attention": torch.ones(1, 5)}
        )


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", VARIANTS)
def test_shapes_without_memory(name):
    with torch.device("meta"):
        model, ids = tiny_model(name), torch.ones(2, 7, dtype=torch.long)
        assert model(ids).logits.shape == (2, 7, model.config.vocab_size)
        assert model(inputs_embeds=model.get_input_embeddings()(ids)).logits.is_meta
