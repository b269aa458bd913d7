"""A Trainer for packed blocks: exact held-out bits per byte."""

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.data import DataLoader
from transformers.trainer_utils import EvalLoopOutput

from nalaformer_hf.training.packing import IGNORED
from nalaformer_hf.training.run_trainer import RunTrainer


class LMTrainer(RunTrainer):
    """A `RunTrainer` that evaluates exactly.

    `evaluate` reports `eval_loss`, the mean over all predicted tokens, and `eval_bits_per_byte`, nats summed
    over them / ln 2 / UTF-8 bytes of the held-out text, both computed in float64 and independent of batch
    size and number of processes.

    Args:
        eval_bytes: UTF-8 bytes of the text in `eval_dataset`.
        arguments: As for `Trainer`. The length of `eval_dataset` must be a multiple of the evaluation batch
            over all processes, or blocks would count twice: see `pad_blocks`.
    """

    def __init__(self, *, eval_bytes: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._eval_bytes = eval_bytes
        if self.label_smoother is not None:
            # The Trainer shifts smoothed labels only for the architectures of its own table.
            self.compute_loss_func = partial(self.label_smoother, shift_labels=True)

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """Sum the nats and the number of predicted tokens over `dataloader` and over all processes."""
        self.unwrapped_model.eval()
        if callable(optimizer_eval := getattr(self.optimizer, "eval", None)):
            optimizer_eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self.args.device)
        for inputs in dataloader:
            totals += self._nats_and_tokens(self._prepare_inputs(inputs))
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)
        nats, tokens = torch.as_tensor(self.accelerator.reduce(totals, "sum")).tolist()
        metrics = {"loss": nats / tokens, "bits_per_byte": nats / math.log(2) / self._eval_bytes}
        return EvalLoopOutput(
            predictions=np.empty(0),
            label_ids=None,
            metrics={f"{metric_key_prefix}_{name}": value for name, value in metrics.items()},
            num_samples=self.num_examples(dataloader),
        )

    @torch.no_grad()
    def _nats_and_tokens(self, inputs: dict[str, Any]) -> torch.Tensor:
        labels = inputs.pop("labels")[:, 1:].flatten()
        with self.accelerator.autocast():
            logits = self.unwrapped_model(**inputs, use_cache=False).logits[:, :-1].flatten(0, 1)
        predicted = labels != IGNORED
        nats = F.cross_entropy(logits[predicted].float(), labels[predicted], reduction="none")
        return torch.stack([nats.double().sum(), predicted.sum()])

    def save_final(self, target: Path) -> None:
        """As `RunTrainer.save_final`; the model generates with a cache, which the Trainer turned off."""
        self.unwrapped_model.config.use_cache = True
        super().save_final(target)
