"""Training by hand and by the Trainer: losses, accumulation, checkpointing, precision, adapters."""

import peft
import pytest
import torch
from tiny_models import FEW, VARIANTS, error, random_ids, tiny_model
from torch.nn.functional import cross_entropy
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorWithFlattening,
    Trainer,
    TrainingArguments,
)

from nalaformer_hf import NaLaForSequenceClassification, NaLaForTokenClassification


def gradients(model):
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def gradients_of(model, **arguments):
    model.zero_grad()
    model(**arguments).loss.backward()
    return gradients(model)


def assert_same_gradients(actual, expected, tolerance=1e-5):
    assert actual.keys() == expected.keys()
    assert {name: e for name in actual if (e := error(actual[name], expected[name])) > tolerance} == {}


def documents(lengths):
    return [{"input_ids": random_ids(1, length, seed=i)[0].tolist()} for i, length in enumerate(lengths)]


@pytest.fixture
def padding_collator(tokenizer):
    tokenizer.padding_side = "right"  # left padding would have each row's first token predicted from padding
    return DataCollatorForLanguageModeling(tokenizer, mlm=False)


def trainer_for(model, folder, collator, train=None, evaluation=None, **arguments):
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 2,
        "report_to": "none",
        "use_cpu": True,
        "seed": 0,
    }
    defaults |= {"save_strategy": "no", "disable_tqdm": True, "logging_steps": 1, "max_grad_norm": 0.0}
    arguments = TrainingArguments(str(folder), **(defaults | arguments))
    return Trainer(model, arguments, collator, train, evaluation)


@pytest.mark.parametrize("name", ["gated_delta", "linear-rotary-hybrid"])
def test_the_trainer_resumes(name, tmp_path, padding_collator):
    train = documents([9, 5, 7, 8])
    saving = {"save_strategy": "steps", "save_steps": 1}
    straight = trainer_for(tiny_model(name), tmp_path, padding_collator, train, **saving)
    straight.train()
    resumed = trainer_for(tiny_model(name), tmp_path, padding_collator, train)
    resumed.train(resume_from_checkpoint=str(tmp_path / "checkpoint-1"))
    expected = straight.model.state_dict()
    assert all(torch.equal(weight, expected[key]) for key, weight in resumed.model.state_dict().items())


@pytest.mark.parametrize("name", VARIANTS)
def test_loss_is_of_the_next_token(name):
    model, ids = tiny_model(name), random_ids(2, 9)
    labels = ids.clone()
    labels[0, 2:5] = -100
    outputs = model(ids, labels=labels)
    logits, targets = outputs.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()
    torch.testing.assert_close(outputs.loss, cross_entropy(logits, targets))


@pytest.mark.parametrize("name", VARIANTS)
@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.parametrize("packed", [False, True])
def test_gradient_checkpointing_changes_no_gradient(name, use_reentrant, packed):
    model, ids = tiny_model(name).train(), random_ids(1, 70)
    arguments = {"input_ids": ids, "labels": ids}
    if packed:
        arguments["position_ids"] = torch.cat([torch.arange(30), torch.arange(40)])[None]
    else:
        arguments["attention_mask"] = (torch.arange(70) > 8).long()[None]
    expected = gradients_of(model, **arguments)
    model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
    model.enable_input_require_grads()
    assert_same_gradients(gradients_of(model, **arguments), expected)


@pytest.mark.parametrize("name", FEW)
def test_trainer_with_padded_batches(name, tmp_path, padding_collator):
    model = tiny_model(name)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    data = documents([5, 9, 3, 14, 8, 2])
    trainer = trainer_for(
        model, tmp_path, padding_collator, data, data, eval_strategy="steps", eval_steps=3, learning_rate=0.01
    )
    trainer.compute_metrics = lambda result: {"shape": result.predictions.shape[-1]}
    untrained = trainer.evaluate()
    trainer.train()
    trained = trainer.evaluate()
    assert trained["eval_loss"] < untrained["eval_loss"]
    assert trained["eval_shape"] == 97
    unmoved = [key for key, value in model.state_dict().items() if torch.equal(value, before[key])]
    assert unmoved == []


@pytest.mark.parametrize("name", FEW)
def test_trainer_with_the_cache_on_evaluates(name, tmp_path, padding_collator):
    data = documents([5, 9, 3])
    trainer = trainer_for(tiny_model(name), tmp_path, padding_collator, data, data, use_cache=True)
    trainer.compute_metrics = lambda result: {"shape": result.predictions.shape[-1]}
    assert trainer.evaluate()["eval_shape"] == 97
    assert trainer.predict(data).predictions.shape == (3, 9, 97)


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("flash_keywords", [False, True])
def test_trainer_with_packed_batches(name, flash_keywords, tmp_path, padding_collator):
    """One packed batch of documents gives the loss and the step of the same documents padded."""
    data, results = documents([5, 9, 3, 14]), []
    flattening = DataCollatorWithFlattening(return_flash_attn_kwargs=flash_keywords)
    for collator in (flattening, padding_collator):
        model = tiny_model(name)
        trainer = trainer_for(
            model,
            tmp_path,
            collator,
            data,
            max_steps=1,
            per_device_train_batch_size=4,
            optim="sgd",
            learning_rate=0.1,
        )
        results.append((trainer.train().training_loss, model.state_dict()))
    (packed_loss, packed), (padded_loss, padded) = results
    assert packed_loss == pytest.approx(padded_loss, rel=1e-5)
    for key, value in padded.items():
        torch.testing.assert_close(packed[key], value)


@pytest.mark.parametrize("name", FEW)
def test_accumulated_batches_equal_one(name, tmp_path, padding_collator):
    """With uneven numbers of labels, each token must weigh the same."""
    data, results = documents([14, 2, 3, 2]), []
    for batch_size, steps in ((4, 1), (1, 4)):
        model = tiny_model(name)
        trainer = trainer_for(
            model,
            tmp_path,
            padding_collator,
            data,
            max_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.1,
        )
        results.append((trainer.train().training_loss, model.state_dict()))
    (loss, one), (accumulated_loss, accumulated) = results
    assert accumulated_loss == pytest.approx(loss, rel=1e-5)
    for key, value in one.items():
        torch.testing.assert_close(accumulated[key], value)


@pytest.mark.parametrize("head", [NaLaForSequenceClassification, NaLaForTokenClassification])
def test_accumulated_batches_of_the_other_heads_equal_one(head, tmp_path):
    label = {NaLaForSequenceClassification: 1, NaLaForTokenClassification: [0, 1, 0, 1, 1, 0]}[head]
    data = [{**document, "labels": label} for document in documents([6, 6, 6, 6])]

    def collator(rows):
        return {key: torch.tensor([row[key] for row in rows]) for key in rows[0]}

    results = []
    for batch_size, steps in ((4, 1), (2, 2)):
        model = tiny_model("linear", head)
        for dropout in (x for x in model.modules() if isinstance(x, torch.nn.Dropout)):
            dropout.p = 0.0
        trainer = trainer_for(
            model,
            tmp_path,
            collator,
            data,
            max_steps=1,
            per_device_train_batch_size=batch_size,
            gradient_accumulation_steps=steps,
            optim="sgd",
            learning_rate=0.1,
        )
        trainer.train()
        results.append(model.state_dict())
    for key, value in results[0].items():
        torch.testing.assert_close(results[1][key], value)


@pytest.mark.parametrize("name", VARIANTS)
def test_autocast_stays_near_fp32(name):
    model, ids = tiny_model(name, initializer_range=0.1), random_ids(2, 70)
    expected = model(ids, labels=ids)
    expected.loss.backward()
    exact = gradients(model)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(ids, labels=ids)
    outputs.loss.backward()
    assert outputs.loss.item() == pytest.approx(expected.loss.item(), rel=0.01)
    assert error(outputs.logits.float(), expected.logits) < 0.1
    for key, gradient in gradients(model).items():
        assert torch.isfinite(gradient).all()
        cosine = torch.cosine_similarity(gradient.flatten(), exact[key].flatten(), dim=0)
        assert cosine > 0.9, key


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("tied", [False, True])
def test_lora(name, tied, tmp_path):
    base, ids = tiny_model(name, tie_word_embeddings=tied), random_ids(2, 12)
    untrained = base(ids).logits.detach()
    settings = peft.LoraConfig(
        task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj", "o_proj"], init_lora_weights=True
    )
    model = peft.get_peft_model(base, settings)
    assert torch.equal(model(ids).logits, untrained)
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    for _ in range(3):
        model(ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
    trained = model(ids).logits.detach()
    assert error(trained, untrained) > 1e-2
    generated = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False)
    uncached = model.generate(input_ids=ids, max_new_tokens=8, do_sample=False, use_cache=False)
    assert torch.equal(generated, uncached)
    model.save_pretrained(tmp_path)
    reloaded = peft.PeftModel.from_pretrained(tiny_model(name, tie_word_embeddings=tied), tmp_path).eval()
    assert torch.equal(reloaded(ids).logits, trained)
    assert error(reloaded.merge_and_unload()(ids).logits, trained) < 1e-5


@pytest.mark.parametrize("name", ["linear", "gated_delta"])
def test_an_output_norm_trained_beside_an_adapter(name):
    base, ids = tiny_model(name), random_ids(2, 12)
    untrained = base(ids).logits.detach()
    settings = peft.LoraConfig(target_modules=["q_proj"], modules_to_save=["o_norm"])
    model = peft.get_peft_model(base, settings)
    assert torch.equal(model(ids).logits, untrained)
    model(ids, labels=ids).loss.backward()
    norms = [p for part, p in model.named_parameters() if "o_norm.modules_to_save" in part]
    assert norms
    assert all(p.grad is not None for p in norms)


def test_lora_through_the_trainer(tmp_path, padding_collator):
    model = peft.get_peft_model(
        tiny_model(), peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj"])
    )
    data = documents([5, 9, 3, 14, 8, 2])
    trainer = trainer_for(model, tmp_path, padding_collator, data, data, activation_checkpointing=True)
    trainer.train()
    assert torch.isfinite(torch.tensor(trainer.evaluate()["eval_loss"]))
