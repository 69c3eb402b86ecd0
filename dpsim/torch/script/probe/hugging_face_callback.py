"""A callback that puts what ``dpsim explain`` learns of a job where Hugging Face's Trainer reports to, on rank 0."""

from __future__ import annotations

import contextlib
from typing import Any

from transformers import Trainer, TrainerCallback

from .answer import Answer


class HuggingFaceCallback(TrainerCallback):
    """Logs the answer at the end of the first step by which it is there, as the Trainer logs its loss.

    Whatever a logger makes of it, the training goes on.
    """

    def __init__(self, trainer: Any) -> None:
        self._trainer, self._answer = trainer, Answer()

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the answer if it has come."""
        self._log(state, control, now_or_never=False)

    def on_epoch_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Log the answer if it has come since the last look; at the end of training the loggers are closed first."""
        self._log(state, control, now_or_never=True)

    def _log(self, state: Any, control: Any, now_or_never: bool) -> None:
        if state.is_world_process_zero and (values := self._answer.values(now_or_never=now_or_never)):
            due = control.should_log  # logging takes the step's own log to be done
            with contextlib.suppress(Exception):
                Trainer.log(self._trainer, values)  # that of a subclass may communicate, and no other rank is here
            control.should_log = due
