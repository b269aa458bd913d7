"""Stream a continuation from a checkpoint, and measure it: `nalaformer generate`."""

import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, cast

import torch
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    Cache,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    TextStreamer,
)

from nalaformer_hf.loading import load_pretrained

DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class Continuation:
    """A continuation and what it took.

    Args:
        text: The new text.
        num_prompt_tokens: Tokens of the prompt.
        num_new_tokens: Tokens generated.
        tokens_per_second: Generated tokens a second after the first, which comes with the prompt; None for
            one.
        state_bytes: Size of the state that the model decodes from, at the end.
    """

    text: str
    num_prompt_tokens: int
    num_new_tokens: int
    tokens_per_second: float | None
    state_bytes: int


class _TimedStreamer(TextStreamer):
    """Hands text on as soon as its tokens are decided, and notes when each of them was."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, write: Callable[[str], object]) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.write = write
        self.times: list[float] = []
        self.parts: list[str] = []

    def put(self, value: torch.Tensor) -> None:
        if not self.next_tokens_are_prompt:
            self.times.append(time.perf_counter())
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        self.parts.append(text)
        self.write(text)


def load(
    model: str, *, device: str = "cpu", dtype: str = "auto"
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load a causal language model and its tokenizer through the Auto classes.

    Args:
        model: Folder or Hub name.
        device: Device for the model.
        dtype: "float32", "bfloat16" or "float16"; "auto" is the checkpoint's own.

    Raises:
        ValueError: The device does not exist here, the dtype is none of these, or one of the two cannot be
            loaded.
    """
    check_device_and_dtype(device, dtype)
    tokenizer = load_pretrained(AutoTokenizer, model, "a tokenizer")
    loaded = load_pretrained(AutoModelForCausalLM, model, "a causal language model", dtype=dtype)
    return loaded.to(device), tokenizer


def check_device_and_dtype(device: str, dtype: str) -> None:
    """Refuse a device that torch does not find here, and a dtype that is not one of `DTYPES`.

    Raises:
        ValueError: Either of the two.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    try:
        torch.empty(0, device=device).cpu()  # a meta tensor has no numbers
    except (RuntimeError, AssertionError) as error:
        raise ValueError(
            f"device must be one that torch finds here, such as 'cpu', got {device!r}"
        ) from error


def stream(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompt: str,
    write: Callable[[str], object],
    *,
    max_new_tokens: int = 128,
    temperature: float = 0.8,
    top_k: int = 50,
    top_p: float = 1.0,
    seed: int = 0,
) -> Continuation:
    """Continue a prompt and hand the text on token by token.

    Args:
        model: A causal language model.
        tokenizer: Its tokenizer.
        prompt: The text to continue. An empty one begins a document.
        write: Gets each piece of text as soon as it is decided.
        max_new_tokens: Upper limit; the model may end the document before.
        temperature: 0 takes the likeliest token each time.
        top_k: Sample from this many of the likeliest tokens; 0 means all.
        top_p: Sample from the likeliest tokens that have this probability together.
        seed: Seed of the sampling.

    Raises:
        ValueError: `prompt` is empty and the tokenizer has no token that begins a document, or a number is
            out of its range.
    """
    if not 0 <= temperature < math.inf or top_k < 0 or not 0 < top_p <= 1:
        raise ValueError(
            "temperature and top_k must not be negative, and top_p must be above 0 and at most 1,"
            f" got {temperature}, {top_k} and {top_p}"
        )
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed must be between 0 and 2**64 - 1, got {seed}")
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"] if prompt else _begin(tokenizer)
    streamer = _TimedStreamer(tokenizer, write)
    sampling = {"temperature": temperature, "top_k": top_k, "top_p": top_p} if temperature else {}
    torch.manual_seed(seed)
    output = cast("Any", model).generate(
        ids.to(model.device),
        streamer=streamer,
        max_new_tokens=max_new_tokens,
        do_sample=bool(sampling),
        return_dict_in_generate=True,
        use_cache=True,
        **sampling,
    )
    seconds = streamer.times[-1] - streamer.times[0]
    num_new = len(streamer.times)
    return Continuation(
        text="".join(streamer.parts),
        num_prompt_tokens=ids.shape[1],
        num_new_tokens=num_new,
        tokens_per_second=(num_new - 1) / seconds if num_new > 1 else None,
        state_bytes=cache_bytes(output.cache),
    )


def describe(continuation: Continuation) -> str:
    """Put the figures of a continuation into a line."""
    rate = continuation.tokens_per_second
    return (
        f"{continuation.num_new_tokens} tokens after {continuation.num_prompt_tokens}"
        + ("" if rate is None else f", {rate:.1f} tokens/s")
        + f", state {continuation.state_bytes:,} bytes"
    )


def write_stats(continuation: Continuation, path: Path) -> None:
    """Write a continuation and its figures to a JSON file."""
    path.write_text(json.dumps(asdict(continuation), indent=2), encoding="utf-8")


def cache_bytes(cache: Cache) -> int:
    """Return the number of bytes of all tensors that a cache holds, keys and values or recurrent states.

    A tensor that is held twice counts once, a view of one counts as the whole.
    """
    storages = {}
    for tensor in cache_tensors(cache):
        storage = tensor.untyped_storage()
        storages[storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())


def cache_tensors(cache: Cache) -> Iterator[torch.Tensor]:
    """Yield all tensors that a cache holds."""
    for layer in cache.layers:
        yield from _tensors(vars(layer))


def _tensors(value: object) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _begin(tokenizer: PreTrainedTokenizerBase) -> torch.Tensor:
    token = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    if token is None:
        raise ValueError("prompt must not be empty: the tokenizer has no token that begins a document")
    return torch.tensor([[token]])
