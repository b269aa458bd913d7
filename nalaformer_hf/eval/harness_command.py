"""Run lm-eval's own command with the model "nala"."""

import json
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from lm_eval.__main__ import cli_evaluate

from nalaformer_hf.eval.language_model import NAME  # importing it registers the model
from nalaformer_hf.eval.local_tasks import write_local_tasks
from nalaformer_hf.training.errors import ConfigError


def run_harness(
    model: str, flags: Sequence[str], *, data_dir: Path | None = None, state_reuse: bool = True
) -> None:
    """Score a checkpoint: lm-eval parses its flags, prints its table and writes its files.

    Args:
        model: Folder or Hub name of a causal language model.
        flags: Flags of `lm-eval run`, such as `--tasks piqa --batch_size 16 --output_path results`.
        data_dir: Folder of local items, for the tasks that it has; see `local_tasks`.
        state_reuse: Read shared prefixes once.

    Raises:
        ConfigError: What lm-eval refuses, such as an unknown task, or a folder without items.
    """
    for flag, reason in (
        ("--include_path", "lm-eval takes one such folder"),
        ("--cache_requests", "lm-eval finds kept requests by the task's name, whatever its items are"),
    ):
        if data_dir is not None and any(given.split("=")[0] == flag for given in flags):
            raise ConfigError(f"--data-dir and {flag} exclude each other: {reason}")
    model_args = {"pretrained": model, "state_reuse": state_reuse}
    command = ["lm-eval", "run", "--model", NAME, "--model_args", json.dumps(model_args), *flags]
    with tempfile.TemporaryDirectory() as folder:
        if data_dir is not None:
            write_local_tasks(data_dir, Path(folder))
            command += ["--include_path", folder]
        argv, sys.argv = sys.argv, command
        try:
            cli_evaluate()
        except ValueError as error:
            raise ConfigError(str(error)) from error
        finally:
            sys.argv = argv
