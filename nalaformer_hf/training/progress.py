"""The progress bar of a run."""

from typing import Any

from transformers import ProgressCallback, TrainerControl, TrainerState, TrainingArguments

_SHOWN = {
    "loss": "loss",
    "eval_bits_per_byte": "held-out bits per byte",
    "eval_top1": "held-out top-1",
    "eval_accuracy": "validation accuracy",
}


class FiguresInBar(ProgressCallback):
    """Shows the newest figures in the bar, where the library prints a line for each."""

    def __init__(self) -> None:
        super().__init__()
        self._figures: dict[str, str] = {}

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        """Put the newest figures into the bar."""
        for name, value in (logs or {}).items():
            if name in _SHOWN:
                self._figures[_SHOWN[name]] = f"{value:.4g}"
        if self.training_bar is not None:
            self.training_bar.set_postfix(self._figures)
