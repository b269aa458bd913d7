"""lm-eval's model "nala": the numbers of the plain backend for any batch size, with fewer tokens read."""

import logging

import pytest
import torch
from eval_models import VARIANTS, choice_requests, instances, make_tokenizer, tiny_model
from lm_eval.evaluator import evaluate, simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from tolerances import LOGLIKELIHOOD
from transformers import LlamaConfig, LlamaForCausalLM

from nalaformer_hf.eval import tree_scoring
from nalaformer_hf.eval.language_model import GIB, NaLaLM
from nalaformer_hf.eval.lm_harness import load_sample_tasks
from nalaformer_hf.eval.prefix_tree import Request
from nalaformer_hf.eval.tree_scoring import TreeScorer
from nalaformer_hf.generation import cache_bytes

TOKENIZER = make_tokenizer()


def nala_lm(model, tokenizer=TOKENIZER, **arguments) -> NaLaLM:
    return NaLaLM(model, tokenizer=tokenizer, **{"batch_size": 4, **arguments})


def assert_same_scores(actual, expected):
    assert [greedy for _, greedy in actual] == [greedy for _, greedy in expected]
    assert [value for value, _ in actual] == pytest.approx(
        [value for value, _ in expected], abs=LOGLIKELIHOOD
    )


def tokens_read(model) -> list[int]:
    """Grows by the size of the input of each forward pass from now on."""
    sizes: list[int] = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    return sizes


@pytest.mark.parametrize("name", VARIANTS)
def test_scores_equal_the_plain_backend_at_any_batch_size(name):
    model, requests = tiny_model(name), choice_requests()
    expected = HFLM(model, tokenizer=TOKENIZER, batch_size=1).loglikelihood(requests, disable_tqdm=True)
    for batch_size in (1, 3, 16, "auto"):
        actual = nala_lm(model, batch_size=batch_size).loglikelihood(requests, disable_tqdm=True)
        assert_same_scores(actual, expected)


def test_shared_prefixes_are_read_once_unless_turned_off():
    model, requests = tiny_model("linear"), choice_requests()
    sizes = tokens_read(model)
    read = {}
    for reuse in (True, False):
        sizes.clear()
        nala_lm(model, batch_size=1, state_reuse=reuse).loglikelihood(requests, disable_tqdm=True)
        read[reuse] = sum(sizes)
    sizes.clear()
    HFLM(model, tokenizer=TOKENIZER, batch_size=1).loglikelihood(requests, disable_tqdm=True)
    assert read[False] == sum(sizes)
    assert read[True] < 0.5 * read[False]


def test_a_cache_is_built_only_where_a_state_is_continued():
    model = tiny_model("linear")
    built = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: built.append(kwargs["use_cache"]), with_kwargs=True
    )
    alone = instances("loglikelihood", [("the red stone", " sings"), ("a blue river", " walks under")])
    nala_lm(model).loglikelihood(alone, disable_tqdm=True)
    assert built == [False]


@pytest.mark.parametrize("name", ["linear", "gated_delta-hybrid"])
def test_held_states_stay_within_their_memory(name, monkeypatch):
    model, requests = tiny_model(name), choice_requests()
    expected = nala_lm(model).loglikelihood(requests, disable_tqdm=True)
    held = []

    def measured(cache) -> int:
        held.append(cache_bytes(cache))
        return held[-1]

    monkeypatch.setattr(tree_scoring, "cache_bytes", measured)
    row_bytes = 60_000
    lm = nala_lm(model, batch_size=2, state_memory=2 * row_bytes / GIB)
    assert_same_scores(lm.loglikelihood(requests, disable_tqdm=True), expected)
    assert max(held) <= 2 * row_bytes


@pytest.mark.parametrize("name", ["linear", "gated_delta-hybrid"])
@pytest.mark.parametrize("limit", [50_000, 200_000])
def test_the_first_states_and_growing_ones_stay_within_the_memory(name, limit, monkeypatch):
    generator = torch.Generator().manual_seed(0)

    def tokens(length: int) -> list[int]:
        return torch.randint(2, 300, (length,), generator=generator).tolist()

    middles = [header + tokens(400) for header in [tokens(40) for _ in range(12)] for _ in range(2)]
    requests = [Request(middle, tokens(3)) for middle in middles for _ in range(3)]
    most = []
    take = TreeScorer._take

    def measured(self, nodes, held_bytes, *rest):
        most.append(held_bytes)
        return take(self, nodes, held_bytes, *rest)

    monkeypatch.setattr(TreeScorer, "_take", measured)
    TreeScorer(tiny_model(name), batch_size=16, max_state_bytes=limit).score(requests)
    assert 0 < max(most) <= limit


@pytest.mark.parametrize("reuse", [True, False])
def test_nothing_to_score_is_no_error(reuse):
    lm = nala_lm(tiny_model("linear"), state_reuse=reuse)
    assert lm.loglikelihood([], disable_tqdm=True) == []
    assert lm.loglikelihood_rolling([], disable_tqdm=True) == []
    assert lm.loglikelihood_rolling(instances("loglikelihood_rolling", [("",)]), True) == [0.0]


def test_auto_halves_the_batch_when_memory_runs_out():
    model, requests = tiny_model("linear"), choice_requests()
    expected = nala_lm(model).loglikelihood(requests, disable_tqdm=True)
    rows = []

    def fail_above_three(module, args, kwargs):
        rows.append(len(kwargs["input_ids"]))
        if rows[-1] > 3:
            raise torch.OutOfMemoryError("CUDA out of memory.")

    model.model.register_forward_pre_hook(fail_above_three, with_kwargs=True)
    actual = nala_lm(model, batch_size="auto").loglikelihood(requests, disable_tqdm=True)
    assert_same_scores(actual, expected)
    assert max(rows) > 3
    assert rows[-1] <= 3
    with pytest.raises(torch.OutOfMemoryError):
        nala_lm(model, batch_size=16).loglikelihood(requests, disable_tqdm=True)


def long_text() -> str:
    return " ".join(request.args[0] for request in choice_requests(seed=1))


@pytest.mark.parametrize("reuse", [True, False])
@pytest.mark.parametrize("adds_bos", [True, False])
def test_rolling_conditions_on_one_beginning(adds_bos, reuse, monkeypatch):
    monkeypatch.setattr("nalaformer_hf.eval.prefix_tree.plan.__kwdefaults__", {"min_saving": 16, "piece": 50})
    model, tokenizer = tiny_model("gated_delta"), make_tokenizer(adds_bos=adds_bos)
    texts = [long_text(), "the red stone", "a", f"{tokenizer.bos_token} the red"]
    lm = nala_lm(model, tokenizer, state_reuse=reuse)
    actual = lm.loglikelihood_rolling(instances("loglikelihood_rolling", [(t,) for t in texts]), True)
    for text, value in zip(texts, actual, strict=True):
        ids = torch.tensor([[0, *tokenizer(text, add_special_tokens=False)["input_ids"]]])
        with torch.no_grad():
            log_probs = model(ids[:, :-1]).logits.log_softmax(-1)
        expected = log_probs.gather(-1, ids[:, 1:, None]).sum().item()
        assert value == pytest.approx(expected, rel=1e-5)


def test_inputs_are_cut_only_if_asked(caplog):
    model = tiny_model("linear", max_position_embeddings=8)
    requests = choice_requests()
    whole = HFLM(model, tokenizer=TOKENIZER, batch_size=1, max_length=1000)
    cut = HFLM(model, tokenizer=TOKENIZER, batch_size=1, max_length=40)
    with caplog.at_level(logging.WARNING):
        actual = nala_lm(model).loglikelihood(requests, disable_tqdm=True)
    assert "max_position_embeddings is 8: nothing is cut" in caplog.text
    assert_same_scores(actual, whole.loglikelihood(requests, disable_tqdm=True))
    actual = nala_lm(model, max_length=40).loglikelihood(requests, disable_tqdm=True)
    assert_same_scores(actual, cut.loglikelihood(requests, disable_tqdm=True))
    with pytest.raises(
        ValueError, match=r"max_length must be at least the \d+ tokens of a continuation, got 3"
    ):
        nala_lm(model, max_length=3).loglikelihood(requests, disable_tqdm=True)


@pytest.mark.parametrize("name", ["linear", "gated_delta-hybrid"])
@pytest.mark.parametrize("batch_size", [3, "auto"])
def test_generation_does_not_depend_on_the_batch(name, batch_size):
    model = tiny_model(name, max_position_embeddings=16)
    arguments = {"until": ["stone"], "max_gen_toks": 12, "do_sample": False}
    prompts = [request.args[0] for request in choice_requests()[::4]]
    requests = instances("generate_until", [(prompt, arguments) for prompt in prompts if prompt])
    lm = nala_lm(model, batch_size=batch_size, max_batch_size=4)
    expected = [nala_lm(model, batch_size=1).generate_until([r], disable_tqdm=True)[0] for r in requests]
    assert lm.generate_until(requests, disable_tqdm=True) == expected
    assert len(set(expected)) > 1


def test_lm_evals_cache_keeps_what_is_scored(tmp_path, monkeypatch):
    model, cache = tiny_model("gated_delta"), str(tmp_path / "scores")
    arguments = {"tasks": load_sample_tasks(), "task_manager": TaskManager(include_defaults=False)}
    arguments |= {"bootstrap_iters": 0, "log_samples": False}
    asked, answered = [], []
    score = TreeScorer.score

    def counted(self, requests, on_answer):
        asked.append(len(requests))
        return score(self, requests, lambda *answer: (answered.append(answer), on_answer(*answer)))

    monkeypatch.setattr(TreeScorer, "score", counted)
    expected = simple_evaluate(nala_lm(model), **arguments)["results"]
    answered.clear()

    def interrupt(*_):
        if answered:
            raise KeyboardInterrupt

    hook = model.model.register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        simple_evaluate(nala_lm(model), use_cache=cache, **arguments)
    hook.remove()
    num_kept = len(answered)
    resumed = simple_evaluate(nala_lm(model), use_cache=cache, **arguments)["results"]
    again = simple_evaluate(nala_lm(model), use_cache=cache, **arguments)["results"]
    assert num_kept > 0
    assert asked == [asked[0], asked[0], asked[0] - num_kept]
    for results in (resumed, again):
        assert results["python_lines"]["acc,none"] == expected["python_lines"]["acc,none"]
        perplexity = expected["python_words"]["perplexity,none"]
        assert results["python_words"]["perplexity,none"] == pytest.approx(perplexity, rel=1e-4)


def test_other_models_are_scored_as_ever_and_the_log_says_so(caplog):
    shape = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 48}
    llama = LlamaForCausalLM(LlamaConfig(vocab_size=300, max_position_embeddings=64, **shape)).eval()
    with caplog.at_level(logging.WARNING):
        lm = nala_lm(llama)
    assert "No state reuse: it needs a causal model of type nala, this one is of type llama" in caplog.text
    requests = choice_requests()[:6]
    plain = HFLM(llama, tokenizer=TOKENIZER, batch_size=4)
    assert lm.loglikelihood(requests, True) == plain.loglikelihood(requests, True)
    assert lm.max_length == plain.max_length == 64
    texts = instances("loglikelihood_rolling", [("the red stone",)])
    assert lm.loglikelihood_rolling(texts, True) == plain.loglikelihood_rolling(texts, True)


@pytest.mark.parametrize(
    ("argument", "value"),
    [
        ("state_memory", 0),
        ("state_memory", "abc"),
        ("state_memory", float("inf")),
        ("max_length", 0),
        ("max_length", "abc"),
        ("max_length", 2.5),
    ],
)
def test_arguments_are_checked(argument, value):
    with pytest.raises(ValueError, match=rf"{argument} must be a positive number of .*, got {value!r}"):
        nala_lm(tiny_model("linear"), **{argument: value})


@pytest.mark.parametrize("batch_size", [0, -1])
def test_a_batch_of_no_rows_is_refused(batch_size):
    with pytest.raises(ValueError, match=f"batch_size must be at least 1, got {batch_size}"):
        nala_lm(tiny_model("linear"), batch_size=batch_size).loglikelihood(choice_requests()[:2], True)


def test_a_tokenizer_without_a_beginning_needs_one():
    tokenizer = make_tokenizer()
    tokenizer.bos_token = tokenizer.eos_token = None
    with pytest.raises(ValueError, match="neither a BOS nor an EOS token to begin with; pass"):
        nala_lm(tiny_model("linear"), tokenizer)
    nothing = instances("loglikelihood", [("", "the red stone")])
    actual = nala_lm(tiny_model("linear"), tokenizer, prefix_token_id=0).loglikelihood(nothing, True)
    assert_same_scores(actual, nala_lm(tiny_model("linear")).loglikelihood(nothing, True))


def test_tasks_score_as_with_the_plain_backend():
    model = tiny_model("linear")
    tasks = TaskManager(include_defaults=False).load(load_sample_tasks())
    results = [
        evaluate(lm, tasks, bootstrap_iters=0, log_samples=False)["results"]
        for lm in (nala_lm(model), HFLM(model, tokenizer=TOKENIZER, batch_size=4))
    ]
    assert results[0]["python_lines"]["acc,none"] == results[1]["python_lines"]["acc,none"]
    words = [result["python_words"]["perplexity,none"] for result in results]
    assert words[0] == pytest.approx(words[1], rel=1e-4)
