"""A callback that puts what ``dpsim explain`` learns of a job into the loggers of Lightning's Trainer, on rank 0."""

from __future__ import annotations

import contextlib
import sys
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from .answer import Answer

if TYPE_CHECKING or ("pytorch_lightning" not in sys.modules and find_spec("lightning")):
    from lightning.pytorch import Callback
else:
    from pytorch_lightning import Callback


class LightningCallback(Callback):
    """Logs the answer at the end of the first batch by which it is there; numbers everywhere, text where it is taken.

    Whatever a logger makes of them, the training goes on.
    """

    def __init__(self) -> None:
        self._answer = Answer()

    def on_train_batch_end(self, trainer: Any, *_: Any, **__: Any) -> None:
        """Log the answer if it has come."""
        self._log(trainer, now_or_never=False)

    def on_train_end(self, trainer: Any, *_: Any) -> None:
        """Log the answer if it has come since the last look."""
        self._log(trainer, now_or_never=True)

    def _log(self, trainer: Any, now_or_never: bool) -> None:
        if trainer.is_global_zero and (values := self._answer.values(now_or_never=now_or_never)):
            numbers = {name: value for name, value in values.items() if not isinstance(value, str)}
            for logger in trainer.loggers:
                with contextlib.suppress(Exception):
                    logger.log_metrics(numbers, step=trainer.global_step)
                    for name in values.keys() - numbers.keys():
                        if hasattr(logger, "log_text"):  # Weights & Biases
                            logger.log_text(name, columns=["text"], data=[[values[name]]])
                        elif hasattr(logger.experiment, "add_text"):  # TensorBoard
                            logger.experiment.add_text(name, values[name], trainer.global_step)
