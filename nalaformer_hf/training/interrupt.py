"""Ctrl-C and SIGTERM end a training run after the current step, with a checkpoint."""

import logging
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

logger = logging.getLogger(__name__)
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class InterruptCallback(TrainerCallback):
    """Saves a checkpoint and stops after the step in which a signal comes; a second one stops at once.

    Within `catch_signals` the first signal sets `requested`. If any process of a launched run got it, all of
    them stop after the same step.
    """

    def __init__(self) -> None:
        self.requested = False

    @contextmanager
    def catch_signals(self) -> Iterator[None]:
        """Take the signals over while the body runs, if this is the main thread, which gets them all."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        previous = {number: signal.signal(number, self._request) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """Ask for a checkpoint and the end if a signal came."""
        self.requested = _any_process(self.requested, args.device)
        if self.requested:
            control.should_save = True
            control.should_training_stop = True
        return control

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> TrainerControl:
        """No evaluation where a run stops within an epoch: it would draw random numbers."""
        if self.requested and state.epoch is not None and not float(state.epoch).is_integer():
            control.should_evaluate = control.should_save = False
        return control

    def _request(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        logger.warning(
            "%s: stopping after this step, with a checkpoint. Once more stops at once.",
            signal.Signals(number).name,
        )


def _any_process(flag: bool, device: torch.device) -> bool:
    if not dist.is_initialized():
        return flag
    shared = torch.tensor(int(flag), device=device)
    dist.all_reduce(shared, dist.ReduceOp.MAX)
    return bool(shared)
