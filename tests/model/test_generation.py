"""Generation: every way of decoding gives the tokens that decoding without a cache gives."""

import threading

import pytest
import torch
from tiny_models import (
    ALL_NALA,
    DELTA,
    FEW,
    LINEAR,
    VARIANTS,
    cache_bytes,
    error,
    random_ids,
    tiny_model,
)
from transformers import DynamicCache, StaticCache, TextIteratorStreamer, pipeline


def generate(model, ids, length, **options):
    """Greedy, unless the options say otherwise."""
    options = {"do_sample": False, "max_new_tokens": length, **options}
    return model.generate(ids, **options)


@pytest.mark.parametrize("name", VARIANTS)
def test_greedy_with_cache_equals_without(name):
    model, ids = tiny_model(name), random_ids(2, 5)
    with_cache = generate(model, ids, 64, use_cache=True)
    assert with_cache.shape == (2, 69)
    assert torch.equal(with_cache, generate(model, ids, 64, use_cache=False))


@pytest.mark.parametrize("name", VARIANTS)
def test_beams_with_cache_equal_without(name):
    model, ids = tiny_model(name), random_ids(2, 5)
    options = {"num_beams": 4, "num_return_sequences": 2}
    with_cache = generate(model, ids, 16, use_cache=True, **options)
    assert with_cache.shape == (4, 21)
    assert torch.equal(with_cache, generate(model, ids, 16, use_cache=False, **options))


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIANTS)
def test_long_beams_with_cache_equal_without(name):
    model, ids = tiny_model(name), random_ids(2, 5)
    with_cache = generate(model, ids, 64, num_beams=4, use_cache=True)
    assert torch.equal(with_cache, generate(model, ids, 64, num_beams=4, use_cache=False))


@pytest.mark.parametrize("name", FEW)
def test_sampling_with_a_seed(name):
    model, ids = tiny_model(name), random_ids(2, 5)
    options = {"do_sample": True, "temperature": 1.5, "num_return_sequences": 3}
    runs = []
    for use_cache in (True, False):
        torch.manual_seed(7)
        runs.append(generate(model, ids, 20, use_cache=use_cache, **options))
    assert torch.equal(*runs)
    assert len({tuple(row.tolist()) for row in runs[0]}) == 6


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_of_the_steps_are_those_of_one_pass(name):
    model, ids = tiny_model(name), random_ids(2, 5)
    outputs = generate(model, ids, 20, return_dict_in_generate=True, output_logits=True)
    with torch.no_grad():
        expected = model(outputs.sequences).logits[:, 4:-1]
    assert error(torch.stack(outputs.logits, dim=1), expected) < 1e-5


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("size", [1, 5, 100])
def test_prefill_in_pieces(name, size):
    model, ids = tiny_model(name), random_ids(2, 23)
    assert torch.equal(generate(model, ids, 8, prefill_chunk_size=size), generate(model, ids, 8))


@pytest.mark.parametrize("name", FEW)
def test_prefill_of_padded_rows_in_pieces(name):
    model, ids = tiny_model(name), random_ids(2, 23)
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    in_pieces = generate(model, ids, 8, attention_mask=mask, prefill_chunk_size=4)
    assert torch.equal(in_pieces, generate(model, ids, 8, attention_mask=mask))


@pytest.mark.parametrize("name", VARIANTS)
def test_left_padded_rows_generate_as_alone(name):
    model = tiny_model(name)
    prompts = [random_ids(1, length, seed=length) for length in (3, 11, 7)]
    ids, mask = torch.zeros(3, 11, dtype=torch.long), torch.zeros(3, 11, dtype=torch.long)
    for row, prompt in enumerate(prompts):
        ids[row, -prompt.shape[1] :], mask[row, -prompt.shape[1] :] = prompt, 1
    together = generate(model, ids, 20, attention_mask=mask)[:, 11:]
    alone = [generate(model, prompt, 20)[:, prompt.shape[1] :] for prompt in prompts]
    assert torch.equal(together, torch.cat(alone))


@pytest.mark.parametrize("name", FEW)
def test_left_padded_beams(name):
    model, ids = tiny_model(name), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    together = generate(model, ids, 12, attention_mask=mask, num_beams=3)[1, 9:]
    assert torch.equal(together, generate(model, ids[1:, 4:], 12, num_beams=3)[0, 5:])


@pytest.mark.parametrize("name", FEW)
def test_a_row_that_ends_early_leaves_the_others_alone(name):
    model, ids = tiny_model(name), random_ids(3, 5)
    free = generate(model, ids, 20)
    eos = free[0, 8].item()
    stopped = generate(model, ids, 20, eos_token_id=eos)
    for row, expected in zip(stopped, free, strict=True):
        end = next((i for i in range(5, 25) if expected[i] == eos), 24) + 1
        assert torch.equal(row[:end], expected[:end])
        assert (row[end:] == 0).all()


@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("only_new", [False, True])
def test_continuation_from_a_returned_cache(name, padded, only_new):
    model, ids = tiny_model(name), random_ids(2, 9)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, :4] = 0
    first = generate(model, ids, 6, attention_mask=mask, return_dict_in_generate=True)
    question = random_ids(2, 5, seed=1)
    everything = torch.cat([first.sequences, question], dim=1)
    full_mask = torch.cat([mask, torch.ones(2, 11, dtype=torch.long)], dim=1)
    # The last token that was generated has not been through the model yet.
    given = everything[:, 14:] if only_new else everything
    continued = generate(model, given, 8, attention_mask=full_mask, cache=first.cache)
    expected = generate(model, everything, 8, attention_mask=full_mask)
    assert torch.equal(continued[:, -8:], expected[:, -8:])


@pytest.mark.parametrize("name", FEW)
def test_static_cache(name):
    model, ids = tiny_model(name), random_ids(2, 9)
    assert torch.equal(generate(model, ids, 20, cache_implementation="static"), generate(model, ids, 20))
    cache = StaticCache(config=model.config, max_cache_len=40)
    for seed in (1, 2):
        ids = random_ids(2, 9, seed=seed)
        cache.reset()
        assert torch.equal(generate(model, ids, 20, cache=cache), generate(model, ids, 20))


@pytest.mark.parametrize("name", FEW)
def test_static_cache_with_padding_and_beams(name):
    model, ids = tiny_model(name), random_ids(2, 9)
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    options = {"attention_mask": mask, "num_beams": 2}
    static = generate(model, ids, 10, cache_implementation="static", **options)
    assert torch.equal(static, generate(model, ids, 10, **options))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FEW)
@pytest.mark.parametrize("implementation", ["offloaded", "offloaded_static"])
def test_offloaded_cache(name, implementation):
    model, ids = tiny_model(name).cuda(), random_ids(2, 9).cuda()
    offloaded = generate(model, ids, 20, cache_implementation=implementation)
    assert torch.equal(offloaded, generate(model, ids, 20))


@pytest.mark.parametrize("name", LINEAR)
def test_prompt_lookup_equals_greedy(name):
    model = tiny_model(name)
    ids = random_ids(1, 8).repeat(1, 3)
    looked_up = generate(model, ids, 48, prompt_lookup_num_tokens=5)
    assert torch.equal(looked_up, generate(model, ids, 48))


@pytest.mark.parametrize("name", LINEAR)
@pytest.mark.parametrize("assistant", ["itself", "smaller", "hybrid"])
def test_assisted_decoding_equals_greedy(name, assistant):
    model, ids = tiny_model(name), random_ids(1, 12)
    assistant_model = {
        "itself": model,
        "smaller": tiny_model(num_hidden_layers=1),
        "hybrid": tiny_model("linear-hybrid"),
    }[assistant]
    assert torch.equal(generate(model, ids, 40, assistant_model=assistant_model), generate(model, ids, 40))


def test_assisted_decoding_of_a_softmax_model_by_a_nala_model():
    model = tiny_model(layer_types=["full_attention"] * 2)
    ids = random_ids(1, 12)
    assert torch.equal(generate(model, ids, 30, assistant_model=tiny_model()), generate(model, ids, 30))


@pytest.mark.parametrize("name", LINEAR)
def test_a_cache_continues_after_assisted_decoding(name):
    model, ids = tiny_model(name), random_ids(1, 8).repeat(1, 3)
    first = generate(model, ids, 20, prompt_lookup_num_tokens=5, return_dict_in_generate=True)
    mask = torch.ones_like(first.sequences)  # a generated token may be the padding's
    continued = generate(model, first.sequences, 10, attention_mask=mask, cache=first.cache)
    assert torch.equal(continued, generate(model, ids, 30))


@pytest.mark.parametrize("name", DELTA)
def test_a_delta_assistant_is_refused_before_any_work(name):
    model, assistant, calls = tiny_model(), tiny_model(name), []
    for either in (model, assistant):
        either.register_forward_pre_hook(lambda *_: calls.append(1))
    with pytest.raises(ValueError, match="assistant_model must have a state that can be rolled back"):
        generate(model, random_ids(1, 12), 5, assistant_model=assistant)
    assert not calls


@pytest.mark.parametrize("name", DELTA)
@pytest.mark.parametrize("helped_by", ["prompt lookup", "assistant"])
def test_delta_mixers_refuse_assistance_before_any_work(name, helped_by):
    model, calls = tiny_model(name), []
    model.register_forward_pre_hook(lambda *_: calls.append(1))
    helper = {"prompt_lookup_num_tokens": 3}
    if helped_by == "assistant":
        helper = {"assistant_model": tiny_model()}
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        generate(model, random_ids(1, 12), 5, **helper)
    assert not calls


@pytest.mark.parametrize("name", FEW)
def test_from_one_token_and_from_none(name):
    model = tiny_model(name)
    one = torch.tensor([[1]])
    expected = generate(model, one, 12, use_cache=False)
    assert torch.equal(generate(model, one, 12), expected)
    assert torch.equal(generate(model, None, 12), expected)  # begins with bos


@pytest.mark.parametrize("name", FEW)
def test_from_embeddings(name):
    model, ids = tiny_model(name), random_ids(2, 7)
    embeds = model.get_input_embeddings()(ids)
    expected = generate(model, ids, 12)
    assert torch.equal(generate(model, None, 12, inputs_embeds=embeds), expected[:, 7:])
    assert torch.equal(generate(model, ids, 12, inputs_embeds=embeds), expected)


@pytest.mark.parametrize("name", FEW)
def test_guidance_keeps_two_caches_apart(name):
    model, ids = tiny_model(name), random_ids(1, 7)
    guided = [
        generate(model, ids, 12, guidance_scale=1.5, use_cache=use_cache) for use_cache in (True, False)
    ]
    assert torch.equal(*guided)
    assert not torch.equal(guided[0], generate(model, ids, 12))


@pytest.mark.parametrize("name", ALL_NALA)
def test_state_after_generation_has_the_size_of_the_first(name):
    model = tiny_model(name)
    sizes = [
        cache_bytes(generate(model, random_ids(1, 4), length, return_dict_in_generate=True).cache)
        for length in (2, 40)
    ]
    assert sizes[0] == sizes[1] > 0


def test_two_generations_in_threads_do_not_mix():
    model, results = tiny_model(), {}

    def run(seed):
        results[seed] = generate(model, random_ids(1, 6, seed=seed), 20)

    threads = [threading.Thread(target=run, args=(seed,)) for seed in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, result in results.items():
        assert torch.equal(result, generate(model, random_ids(1, 6, seed=seed), 20))


def test_an_unknown_keyword_is_refused():
    with pytest.raises(ValueError, match=r"not used by the model: \['attention_masks'\]"):
        generate(tiny_model(), random_ids(1, 5), 3, attention_masks=torch.ones(1, 5))


def test_a_cache_made_without_the_config_is_refused():
    with pytest.raises(ValueError, match="cache: layer 0 must be a NaLa layer"):
        generate(tiny_model(), random_ids(1, 5), 3, cache=DynamicCache())


@pytest.mark.parametrize("name", FEW)
def test_streaming(name, tokenizer):
    model, ids = tiny_model(name), random_ids(1, 5)
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True)
    thread = threading.Thread(target=generate, args=(model, ids, 20), kwargs={"streamer": streamer})
    thread.start()
    pieces = [piece for piece in streamer if piece]
    thread.join()
    assert len(pieces) == 20
    assert "".join(pieces).split() == tokenizer.decode(generate(model, ids, 20)[0, 5:]).split()


@pytest.mark.parametrize("name", FEW)
def test_pipeline(name, tokenizer):
    model = tiny_model(name)
    generator = pipeline("text-generation", model=model, tokenizer=tokenizer)
    prompts = ["w5 w6 w7", "w9 w8 w10 w11 w12 w13"]
    options = {"max_new_tokens": 10, "do_sample": False, "return_full_text": False}
    together = generator(prompts, batch_size=2, **options)
    for prompt, (answer,) in zip(prompts, together, strict=True):
        ids = tokenizer(prompt, return_tensors="pt").input_ids
        alone = generate(model, ids, 10)[0, ids.shape[1] :]
        assert answer["generated_text"] == tokenizer.decode(alone, skip_special_tokens=True)
