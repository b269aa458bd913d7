"""Tiny models, a tokenizer and invented requests for the tests of the evaluation.

Weights are large (std 0.4): at the usual 0.02 scores hardly move when a state is lost.
"""

import random
from typing import Any

import torch
from lm_eval.api.instance import Instance
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from nalaformer_hf import NaLaConfig, NaLaForCausalLM
from nalaformer_hf.training.tokenizer import END_OF_TEXT, train_tokenizer

HYBRID = ["nala_attention", "full_attention"]
VARIANTS: dict[str, dict[str, Any]] = {
    "linear": {"mixer": "linear"},
    "linear-rotary-hybrid": {"mixer": "linear", "use_rotary": True, "layer_types": HYBRID},
    "delta": {"mixer": "delta", "use_short_conv": False},
    "gated_delta": {"mixer": "gated_delta"},
    "gated_delta-hybrid": {"mixer": "gated_delta", "layer_types": HYBRID[::-1]},
}
WORDS = ["red", "green", "blue", "stone", "river", "cloud", "walks", "sings", "over", "under", "the", "a"]


def make_tokenizer(*, adds_bos: bool = False) -> PreTrainedTokenizerFast:
    tokenizer = train_tokenizer(iter([" ".join(WORDS) + "\n"] * 20), 300)
    if adds_bos:
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
            single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, tokenizer.bos_token_id)]
        )
    return tokenizer


def tiny_model(name: str, **fields: Any) -> NaLaForCausalLM:
    torch.manual_seed(1)
    base = {
        "vocab_size": 300,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "initializer_range": 0.4,
        "bos_token_id": 0,
        "eos_token_id": 0,
        "pad_token_id": 1,
    }
    return NaLaForCausalLM(NaLaConfig(**{**base, **VARIANTS[name], **fields})).eval()


def phrase(rng: random.Random, length: int) -> str:
    return " ".join(rng.choices(WORDS, k=length))


def choice_requests(seed: int = 0) -> list[Instance]:
    """Headers, contexts with several continuations, and odd ones: one token, equal, nested, empty."""
    rng = random.Random(seed)
    headers = [phrase(rng, 12) + ". ", phrase(rng, 9) + ". ", ""]
    pairs = []
    for i in range(9):
        context = headers[i % 3] + phrase(rng, rng.randrange(2, 16))
        start = " " + phrase(rng, 4) if i % 2 else ""
        pairs += [(context, f"{start} {phrase(rng, rng.randrange(1, 7))}") for _ in range(3)]
    context = pairs[0][0]
    pairs += [(context, " red"), (context, " blue"), pairs[4], (context[:9], context[9:]), ("", " the river")]
    return instances("loglikelihood", pairs)


def instances(kind: Any, arguments: list[tuple]) -> list[Instance]:
    return [Instance(kind, {}, pair, number) for number, pair in enumerate(arguments)]
