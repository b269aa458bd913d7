"""Small Long Range Arena runs for the tests."""

from pathlib import Path

from nalaformer_hf.training.lra_config import LRATrainConfig, load_lra_config

TINY = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
LISTOPS = {"max_length": 32, "num_train": 40, "num_validation": 11, "num_test": 13}


def configure(output_dir: Path, *overrides: str, task: str = "listops", **data: object) -> LRATrainConfig:
    """A run of 7 steps."""
    values = {
        "model": {"overrides": TINY},
        "data": {"task": task, **(data or LISTOPS)},
        "train": {
            "output_dir": str(output_dir),
            "use_cpu": True,
            "max_steps": 7,
            "per_device_train_batch_size": 8,
            "per_device_eval_batch_size": 5,
            "learning_rate": 0.01,
            "logging_steps": 2,
            "disable_tqdm": True,
            "report_to": "none",
        },
    }
    return load_lra_config(values, overrides)
