"""The model "nala" of lm-eval: its Hugging Face backend, with shared prefixes of the requests read once."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from tqdm import tqdm

from nalaformer_hf.eval.prefix_tree import Request
from nalaformer_hf.eval.tree_scoring import Answer, TreeScorer

# A request as lm-eval has it: (context, continuation) as text or None, the tokens of both.
TokenRequest = tuple[tuple[str, str] | None, list[int], list[int]]

NAME = "nala"  # in lm-eval
# Stands for "no limit" where lm-eval wants a number.
UNLIMITED = 2**31 - 1
GIB = 2**30
# Its decorator hides the class from type checkers.
Backend: Any = HFLM

logger = logging.getLogger(__name__)


@register_model(NAME)
class NaLaLM(Backend):
    """lm-eval's `HFLM` for NaLa models, with state reuse.

    Prompts, tokens and scores are those of `HFLM`, with these differences:

    - Requests are arranged in a prefix tree, and each shared prefix is read once: a few-shot header, the
      context of several continuations. Log-likelihoods agree with `HFLM` within rounding (1e-4 in fp32), for
      any batch size.
    - Inputs are not cut at `max_position_embeddings`: the state has constant size, and what a model does
      beyond its training length is part of its score. Pass `max_length` to cut, as `HFLM` always does.
    - A rolling perplexity conditions on one beginning; `HFLM` doubles it where the tokenizer adds one.

    Models of other kinds, and encoders (`is_causal=False`), are scored as by `HFLM`; the log says so.

    Args:
        pretrained: Folder or Hub name, or a model.
        state_reuse: False turns it off: one plain forward pass a request, as in `HFLM`.
        state_memory: GiB for the states that wait for their continuations.
        max_length: Cut inputs to this many tokens, from the left.
        **kwargs: As for `HFLM`.

    Raises:
        ValueError: `state_memory` or `max_length` is no positive number, or the tokenizer has no token to
            begin with.
    """

    def __init__(
        self,
        pretrained: Any,
        *,
        state_reuse: bool = True,
        state_memory: float = 2.0,
        max_length: int | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(state_memory, int | float) or not 0 < state_memory < math.inf:
            raise ValueError(f"state_memory must be a positive number of GiB, got {state_memory!r}")
        if max_length is not None and (not isinstance(max_length, int) or max_length < 1):
            raise ValueError(f"max_length must be a positive number of tokens, got {max_length!r}")
        super().__init__(pretrained, max_length=max_length, **kwargs)
        if self.prefix_token_id is None:
            raise ValueError(
                "pretrained: its tokenizer has neither a BOS nor an EOS token to begin with;"
                " pass prefix_token_id=N, the number of another token"
            )
        self.is_nala = self.config.model_type == "nala" and self.config.is_causal
        self.state_reuse = state_reuse and self.is_nala
        self.state_memory = state_memory
        self.longest_prompt = 0
        if state_reuse and not self.is_nala:
            logger.warning(
                "No state reuse: it needs a causal model of type nala, this one is of type %s%s.",
                self.config.model_type,
                "" if getattr(self.config, "is_causal", True) else " with is_causal=False",
            )

    def _get_backend(self, config: Any, backend: str = "default", **kwargs: Any) -> None:
        is_nala = getattr(config, "model_type", None) == "nala"  # which lm-eval warns that it does not know
        super()._get_backend(config, "causal" if is_nala and backend == "default" else backend, **kwargs)

    def _create_model(self, *args: Any, **kwargs: Any) -> None:
        try:
            super()._create_model(*args, **kwargs)
        except TypeError as error:  # of an argument that neither the model nor its config knows
            raise ValueError(f"model_args: {error}") from error

    @property
    def max_length(self) -> int:
        """Tokens that an input is cut to: what was asked for, or no limit."""
        if self.is_nala and not self._max_length:
            return UNLIMITED
        return super().max_length

    def _loglikelihood_tokens(
        self,
        requests: list[TokenRequest],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        if not self.state_reuse:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        progress = tqdm(
            total=len(requests),
            disable=disable_tqdm or self.rank != 0,
            desc="Running loglikelihood requests, shared prefixes once",
        )

        def on_answer(number: int, answer: Answer) -> None:
            progress.update()
            if (text := requests[number][0]) is not None:
                self.cache_hook.add_partial("loglikelihood", text, answer)

        with progress:
            return self._score([self._cut(context, target) for _, context, target in requests], on_answer)

    def _score(self, requests: Sequence[Request], on_answer: Callable[[int, Answer], object]) -> list[Answer]:
        """Score by prefix tree, in the wanted precision."""
        self._say_if_longer(max((len(request.tokens) for request in requests), default=0))
        scorer = TreeScorer(
            self.model,
            batch_size=self.max_batch_size if self.batch_size == "auto" else self.batch_size,
            may_shrink=self.batch_size == "auto",
            max_state_bytes=int(self.state_memory * GIB),
            softmax_dtype=self.softmax_dtype,
        )
        with torch.autocast(
            self.device.type, self.mixed_precision_dtype, enabled=self.mixed_precision_dtype is not None
        ):
            return scorer.score(requests, on_answer)

    def _cut(self, context: list[int], target: list[int]) -> Request:
        """A request whose input is at most `max_length` tokens."""
        if len(target) > self.max_length:
            raise ValueError(
                f"max_length must be at least the {len(target)} tokens of a continuation,"
                f" got {self.max_length}"
            )
        return Request(context[-(self.max_length + 1 - len(target)) :], target)

    def _say_if_longer(self, length: int) -> None:
        trained = self.config.max_position_embeddings
        if self.max_length == UNLIMITED and length > trained:
            logger.warning(
                "The longest input has %d tokens, max_position_embeddings is %d: nothing is cut, where"
                " lm-eval's hf model would cut. Pass max_length=%d for its numbers.",
                length,
                trained,
                trained,
            )

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, each after one token of beginning.

        Args:
            requests: Each with a text.
            disable_tqdm: Show no progress bar.

        Returns:
            One log-likelihood a text; the cache has each as soon as it is known.
        """
        if not self.is_nala:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        texts = [request.args[0] for request in requests]
        windows = [self._windows(text) for text in texts]
        totals = [0.0] * len(texts)
        with tqdm(
            total=len(texts), disable=disable_tqdm or self.rank != 0, desc="Running rolling requests"
        ) as progress:

            def on_total(owner: int, total: float) -> None:
                totals[owner] = total
                progress.update()
                self.cache_hook.add_partial("loglikelihood_rolling", (texts[owner],), total)

            if self.state_reuse:
                self._roll(windows, on_total)
            else:
                self._roll_plainly(windows, on_total)
        return totals

    def _roll(self, windows: list[list[Request]], on_total: Callable[[int, float], object]) -> None:
        """Score the windows of all texts at once, and sum them by text."""
        owners = [owner for owner, parts in enumerate(windows) for _ in parts]
        missing, totals = [len(parts) for parts in windows], [0.0] * len(windows)

        def on_answer(number: int, answer: Answer) -> None:
            owner = owners[number]
            totals[owner] += answer[0]
            missing[owner] -= 1
            if not missing[owner]:
                on_total(owner, totals[owner])

        self._score([window for parts in windows for window in parts], on_answer)

    def _roll_plainly(self, windows: list[list[Request]], on_total: Callable[[int, float], object]) -> None:
        """Score the windows of each text as `HFLM` does."""
        for owner, parts in enumerate(windows):
            requests: list[TokenRequest] = [(None, list(context), list(target)) for context, target in parts]
            answers = super()._loglikelihood_tokens(requests, disable_tqdm=True, override_bs=len(parts))
            on_total(owner, sum(value for value, _ in answers))

    def _windows(self, text: str) -> list[Request]:
        """Requests that score each token of a text once."""
        tokens = self.tok_encode(text, add_special_tokens=False)  # the windows bring the beginning
        windows = get_rolling_token_windows(tokens, self.prefix_token_id, self.max_length, context_len=1)
        return [Request(*make_disjoint_window(window)) for window in windows]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continuations, as by `HFLM`.

        Args:
            requests: Each with a text and how to continue it.
            disable_tqdm: Show no progress bar.

        Returns:
            One continuation a request.
        """
        if self.batch_size == "auto":
            lengths = [len(self.tok_encode(request.args[0])) for request in requests]
            self.longest_prompt = max(lengths, default=0)
        return super().generate_until(requests, disable_tqdm)

    def _detect_batch_size(self, requests: Sequence[Any] | None = None, pos: int = 0) -> int:
        """The largest batch that fits, at the length of the longest prompt if there is no other limit."""
        if not requests and self.max_length == UNLIMITED:
            requests = [(None, [0] * self.longest_prompt, [0] * self.max_gen_toks)]
        return super()._detect_batch_size(requests, pos)
