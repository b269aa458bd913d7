"""Train an image classifier from a configuration: `nalaformer train image`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING, TrainingArguments

from nalaformer_hf import NaLaVisionConfig
from nalaformer_hf.training.image_batches import AugmentedImages, PreparedImages, collate, make_augmentation
from nalaformer_hf.training.image_config import ImageDataSection, ImageTrainConfig
from nalaformer_hf.training.image_data import Images, load_images
from nalaformer_hf.training.image_models import ImageModel, make_image_model
from nalaformer_hf.training.image_trainer import ImageTrainer
from nalaformer_hf.training.models import check_model
from nalaformer_hf.training.runs import Outcome, RunResult, final_metrics, preparing, train_to_the_end


@dataclass(frozen=True)
class ImageTrainResult(RunResult):
    """A `RunResult` with the figures of the evaluation, when finished.

    Args:
        loss: Mean cross entropy, in nats.
        top1: Share of images whose class is the likeliest one.
        top5: Share of images whose class is among the five likeliest.
    """

    loss: float | None = None
    top1: float | None = None
    top5: float | None = None


def train_image(config: ImageTrainConfig, *, resume: bool = False) -> ImageTrainResult:
    """Train an image classifier.

    Writes to `train.output_dir`: `config.yaml`, `checkpoint-N/`, `runs/` (TensorBoard) and, at the end,
    `model/`, which `from_pretrained` loads with its image processor, and `result.json`. Ctrl-C and SIGTERM
    end the run after the current step with a checkpoint; `resume` goes on from the newest complete one with
    the losses that an uninterrupted run has.

    Args:
        config: The checked configuration.
        resume: Go on with the run in `train.output_dir`. Without a checkpoint there it begins, or with
            `train.resume_from_checkpoint`, which names another than the newest.

    Returns:
        Where the run stands.

    Raises:
        ConfigError: There is a run already and `resume` is not set, or it has another model, other images or
            another augmentation; the images or the model do not exist or do not fit together.
    """
    check_model(config.model, NaLaVisionConfig, MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING)
    arguments = config.training_arguments()
    with preparing(config, arguments, resume=resume, kept=("model", "data", "augment", "ema")):
        images = load_images(config.data)
    model = make_image_model(config.model, config.data, images.classes)
    trainer = _make_trainer(config, arguments, model, images)
    return train_to_the_end(
        trainer, config.output_dir, ImageTrainResult, lambda: _evaluate(trainer, config.data)
    )


def _make_trainer(
    config: ImageTrainConfig, arguments: TrainingArguments, model: ImageModel, images: Images
) -> ImageTrainer:
    augmentation = make_augmentation(config.augment, model.image_size, model.num_channels, model.processor)
    seed = arguments.seed if arguments.data_seed is None else arguments.data_seed
    return ImageTrainer(
        augment=config.augment,
        ema=config.ema,
        num_classes=len(images.classes),
        model=model.network,
        args=arguments,
        data_collator=collate,
        train_dataset=AugmentedImages(images.train, augmentation, model.num_channels, seed),
        eval_dataset=PreparedImages(images.heldout, model.processor, model.num_channels),
        processing_class=model.processor,
    )


def _evaluate(trainer: ImageTrainer, data: ImageDataSection) -> Outcome:
    """Evaluate, and let the model have the averaged weights that were evaluated."""
    metrics = final_metrics(trainer)
    trainer.take_average()
    figures = {name: metrics[f"eval_{name}"] for name in ("loss", "top1", "top5")}
    return _facts(trainer, data, metrics), figures


def _facts(trainer: ImageTrainer, data: ImageDataSection, metrics: dict[str, float]) -> dict[str, Any]:
    """What the model card says of the training; folders of the user's are not named."""
    assert data.source is not None
    is_local = Path(data.source).exists()
    facts = {
        "images": "a folder" if is_local else data.source,
        "optimizer steps": trainer.state.global_step,
        "images a step": trainer.get_total_train_batch_size(trainer.args),
        "peak learning rate": trainer.args.learning_rate,
        "top-1 on held-out images": round(metrics["eval_top1"], 4),
        "top-5 on held-out images": round(metrics["eval_top5"], 4),
    }
    return facts | ({} if is_local or data.source == "digits" else {"datasets": [data.source]})
