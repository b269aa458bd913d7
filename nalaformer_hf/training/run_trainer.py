"""A Trainer with atomic checkpoints and exact resume."""

import json
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import PreTrainedModel, ProgressCallback, Trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME

from nalaformer_hf.training.checkpoints import drop_old_checkpoints, publish, staging_folder, staging_path
from nalaformer_hf.training.progress import FiguresInBar

_LOSS_WINDOW = "loss_window_{rank}.json"


class RunTrainer(Trainer):
    """The Trainer of transformers with these differences.

    A checkpoint is written to a sibling folder, flushed, marked and renamed. The running mean of the loss is
    saved with it, so that a resumed run logs what an uninterrupted one logs. Starting a data loader draws no
    number of the training's: persistent workers start once in a run, and once more in a resumed one.

    Args:
        arguments: As for `Trainer`.
    """

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self._staging: Path | None = None
        if self.pop_callback(ProgressCallback) is not None:
            self.add_callback(FiguresInBar())

    @property
    def unwrapped_model(self) -> PreTrainedModel:
        """The model, outside the wrappers of a launched run."""
        assert isinstance(self.model, PreTrainedModel)
        return self.model

    def save_final(self, target: Path) -> None:
        """Save the model and what prepares its inputs to the folder `target`, whole or not at all.

        Args:
            target: The folder to make; one that is there is replaced.
        """
        staging = self._shared_staging(target)
        self.save_model(str(staging), _internal_call=True)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            (staging / TRAINING_ARGS_NAME).unlink()  # a pickle with paths of this machine
            publish(staging, target)
        self.accelerator.wait_for_everyone()

    def load_weights(self, checkpoint: Path) -> None:
        """Load the weights that a checkpoint holds."""
        self._load_from_checkpoint(str(checkpoint))

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> DataLoader:
        loader = super()._get_dataloader(*args, **kwargs)
        getattr(loader, "base_dataloader", loader).generator = torch.Generator().manual_seed(self.args.seed)
        return loader

    def _shared_staging(self, target: Path) -> Path:
        if self.args.should_save:
            staging_folder(target)
        self.accelerator.wait_for_everyone()
        return staging_path(target)

    def _get_output_dir(self, trial: Any) -> str:
        return super()._get_output_dir(trial) if self._staging is None else str(self._staging)

    def _save_checkpoint(self, model: torch.nn.Module, trial: Any) -> None:
        """Let the Trainer write into a folder of its own, then move what it wrote to its place."""
        target = Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"
        self._staging = staging = self._shared_staging(target)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._staging = None
        written = staging / target.name
        if self.state.best_model_checkpoint == str(written):
            self.state.best_model_checkpoint = str(target)
        self.accelerator.wait_for_everyone()
        if self.args.should_save:
            self._publish_checkpoint(written, target)
            staging.rmdir()
        self.accelerator.wait_for_everyone()

    def _publish_checkpoint(self, written: Path, target: Path) -> None:
        self.state.save_to_json(str(written / TRAINER_STATE_NAME))
        publish(written, target)
        if self.args.save_total_limit:
            best = self.state.best_model_checkpoint
            kept = {target} if best is None else {target, Path(best)}
            drop_old_checkpoints(target.parent, self.args.save_total_limit, kept)
        if self.args.push_to_hub:
            super()._push_from_checkpoint(str(target))

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Leave it to `_publish_checkpoint`: an upload takes a while, and the folder is about to move."""

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the running mean of the loss beside the random state: each process has both of its own."""
        super()._save_rng_state(output_dir)
        window = {"loss": self._tr_loss.item(), "last_logged": self._globalstep_last_logged}
        self._loss_window(output_dir).write_text(json.dumps(window), encoding="utf-8")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        super()._load_rng_state(checkpoint)
        if checkpoint is not None and (path := self._loss_window(checkpoint)).is_file():
            window = json.loads(path.read_text(encoding="utf-8"))
            self._tr_loss.fill_(window["loss"])
            self._globalstep_last_logged = window["last_logged"]

    def _loss_window(self, folder: str) -> Path:
        return Path(folder) / _LOSS_WINDOW.format(rank=self.args.process_index)
