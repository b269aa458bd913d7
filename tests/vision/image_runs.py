"""Small image-classification runs for the tests: coloured noise in three classes, a tiny model."""

from pathlib import Path

import numpy as np
from PIL import Image

from nalaformer_hf.training.image_config import ImageTrainConfig, load_image_config

CLASSES = ("blue", "green", "red")
TINY = {
    "model_type": "nala_vision",
    "image_size": 16,
    "hidden_sizes": [8, 16],
    "depths": [1, 1],
    "num_attention_heads": [2, 2],
    "mlp_ratios": [2.0, 2.0],
    "mixers": ["linear", "softmax"],
    "layer_scale_init_values": [1.0, 1.0],
    "projection_dim": 16,
    "drop_path_rate": 0.2,
}
# Everything on that draws random numbers or keeps a state.
ALL_ON = (
    "augment.auto_augment=rand-m9-mstd0.5-inc1",
    "augment.random_erasing=0.5",
    "augment.mixup=0.8",
    "augment.cutmix=1.0",
    "augment.repeats=2",
    "ema.decay=0.9",
    "train.label_smoothing_factor=0.1",
    "train.gradient_accumulation_steps=2",
)


def write_images(folder: Path, images_per_class: int = 14) -> Path:
    """Noisy images, 20×24, that are brightest in one channel; a sub-folder a class."""
    generator = np.random.default_rng(0)
    for channel, name in enumerate(reversed(CLASSES)):
        (folder / name).mkdir(parents=True)
        for number in range(images_per_class):
            pixels = generator.integers(0, 160, (20, 24, 3), dtype=np.uint8)
            pixels[..., channel] += 80
            Image.fromarray(pixels).save(folder / name / f"{number:02}.png")
    return folder


def configure(source: Path | str, output_dir: Path, *overrides: str) -> ImageTrainConfig:
    """A run of 7 steps."""
    values = {
        "model": {"config": TINY},
        "data": {"source": str(source), "heldout_fraction": 0.3},
        "train": {
            "output_dir": str(output_dir),
            "use_cpu": True,
            "max_steps": 7,
            "per_device_train_batch_size": 4,
            "per_device_eval_batch_size": 5,
            "learning_rate": 0.01,
            "logging_steps": 2,
            "eval_strategy": "steps",
            "eval_steps": 4,
            "disable_tqdm": True,
            "report_to": "none",
        },
    }
    return load_image_config(values, overrides)
