"""A Trainer for image classification: mixed batches, averaged weights, exact accuracies."""

from collections.abc import Sized
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from timm.data.mixup import Mixup
from timm.utils.model_ema import ModelEmaV3
from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler
from transformers import EvalPrediction, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer_utils import EvalLoopOutput

from nalaformer_hf.training.image_batches import Draw, DrawSampler
from nalaformer_hf.training.image_config import AugmentSection, EmaSection
from nalaformer_hf.training.run_trainer import RunTrainer

EMA_FILE = "ema.safetensors"
TOP = 5


class ImageTrainer(RunTrainer):
    """A `RunTrainer` for images.

    The loss is the cross entropy against classes that are smoothed (`label_smoothing_factor`) and, where the
    augmentation mixes images, mixed. `evaluate` reports `eval_loss`, the mean cross entropy against the plain
    classes, `eval_top1` and `eval_top5`, of the averaged weights if there are any. Weight decay is for
    matrices and kernels only: no bias, norm or LayerScale, which have one dimension.

    Args:
        augment: Whether and how batches are mixed, and how often an image is drawn.
        ema: Whether weights are averaged.
        num_classes: Number of classes.
        arguments: As for `Trainer`.
    """

    def __init__(
        self, *, augment: AugmentSection, ema: EmaSection, num_classes: int, **arguments: Any
    ) -> None:
        super().__init__(compute_metrics=_accuracies, **arguments)
        self.model_accepts_loss_kwargs = False  # the loss is a mean over images
        self._repeats = augment.repeats
        self._mixup = _make_mixup(augment, num_classes)
        self.ema: ModelEmaV3 | None = None
        if ema.decay is not None:
            self.ema = ModelEmaV3(self.unwrapped_model, decay=ema.decay, use_warmup=ema.warmup)
            self.add_callback(_UpdateEma(self.ema, self.unwrapped_model))

    def take_average(self) -> None:
        """Let the model have the averaged weights, if there are any."""
        if self.ema is not None:
            self.unwrapped_model.load_state_dict(self.ema.module.state_dict())

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> EvalLoopOutput:
        """As the Trainer's, with the BatchNorm statistics that are saved, those of the first process."""
        if self.args.world_size > 1:
            evaluated = self.unwrapped_model if self.ema is None else self.ema.module
            for buffer in evaluated.buffers():
                dist.broadcast(buffer, 0)
        return super().evaluation_loop(*args, **kwargs)

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Any:
        """The mean cross entropy of a batch, against mixed and smoothed classes."""
        images, targets = inputs["pixel_values"], inputs["labels"]
        if self._mixup is not None:
            images, targets = self._mixup(images, targets)
        outputs = model(pixel_values=images)
        smoothing = self.args.label_smoothing_factor
        loss = F.cross_entropy(outputs.logits.float(), targets, label_smoothing=smoothing)
        return (loss, outputs) if return_outputs else loss

    @torch.no_grad()
    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Tensor],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, tuple[Tensor, Tensor], Tensor]:
        """Cross entropy and likeliest classes of each image, of the averaged weights if there are any."""
        inputs = self._prepare_inputs(inputs)
        evaluated = model if self.ema is None else self.ema.module
        with self.accelerator.autocast():
            logits = evaluated(pixel_values=inputs["pixel_values"]).logits
        return None, score(logits, inputs["labels"]), inputs["labels"]

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """Names of the parameters with weight decay: those with more than one dimension."""
        return [name for name, parameter in model.named_parameters() if parameter.ndim > 1]

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights that a checkpoint holds, the averaged ones too."""
        super().load_weights(checkpoint)
        self._load_average(str(checkpoint))

    def _get_train_sampler(self, train_dataset: Dataset | None = None) -> Sampler[Draw]:
        images = self.train_dataset if train_dataset is None else train_dataset
        seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
        batch_size = self.args.train_batch_size * self.args.world_size
        return DrawSampler(len(cast("Sized", images)), self._repeats, batch_size, seed)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        super()._save_optimizer_and_scheduler(output_dir)
        if self.ema is not None and self.args.should_save:
            save_model(self.ema.module, str(Path(output_dir) / EMA_FILE))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if checkpoint is not None:
            self._load_average(checkpoint)

    def _load_best_model(self) -> None:
        super()._load_best_model()
        assert self.state.best_model_checkpoint is not None
        self._load_average(self.state.best_model_checkpoint)

    def _load_average(self, checkpoint: str) -> None:
        if self.ema is not None:
            load_model(self.ema.module, str(Path(checkpoint) / EMA_FILE))


class _UpdateEma(TrainerCallback):
    """Updates the average after each optimizer step."""

    def __init__(self, ema: ModelEmaV3, model: nn.Module) -> None:
        self.ema, self.model = ema, model

    def on_step_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.ema.update(self.model, step=state.global_step)


def score(logits: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """Cross entropy (B,) and the numbers of the likeliest classes (B, at most 5) of logits (B, classes)."""
    nats = F.cross_entropy(logits.float(), labels, reduction="none")
    return nats, logits.topk(min(TOP, logits.shape[-1])).indices


def accuracies(nats: np.ndarray, top: np.ndarray, labels: np.ndarray) -> dict[str, float]:
    """Mean cross entropy, and the shares of images whose class is the likeliest and among the likeliest five.

    Args:
        nats: Cross entropy of each image (N,).
        top: Its likeliest classes, the likeliest first (N, at most 5).
        labels: Its class (N,).
    """
    right = top == labels[:, None]
    return {
        "loss": float(nats.mean(dtype=np.float64)),
        "top1": float(right[:, 0].mean()),
        "top5": float(right.any(axis=1).mean()),
    }


def _accuracies(prediction: EvalPrediction) -> dict[str, float]:
    nats, top = cast("tuple[np.ndarray, np.ndarray]", prediction.predictions)
    return accuracies(nats, top, np.asarray(prediction.label_ids))


def _make_mixup(augment: AugmentSection, num_classes: int) -> Mixup | None:
    """timm's mixup, without its label smoothing, which the loss does alike with and without it."""
    if not augment.mixes:
        return None
    return Mixup(
        mixup_alpha=augment.mixup,
        cutmix_alpha=augment.cutmix,
        prob=augment.mix_probability,
        switch_prob=augment.cutmix_share,
        label_smoothing=0.0,
        num_classes=num_classes,
    )
