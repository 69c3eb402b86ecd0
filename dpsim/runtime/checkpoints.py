"""``Checkpoints``, a callback that saves a run's state at intervals and at its end; and resuming from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.records.train import TrainResult
from dpsim.runtime import rank_status
from dpsim.runtime.checkpoint import CheckpointFolder, NotWritten, check_unused, checkpoints, newest
from dpsim.runtime.fit import Callback, Epoch
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer
from dpsim.units import format_duration, format_size


def _to_stderr(text: str) -> None:
    print(f"dpsim: {text}", file=sys.stderr, flush=True)


class Checkpoints(Callback):
    """A checkpoint in ``folder`` every ``every`` steps (if given) and after the last one; the last two are kept.

    A callback for every rank, though only rank 0 needs the file system. If a checkpoint cannot be written, ``report``
    (stderr) gets a warning and training continues; ``failure`` then says why the last one is missing. ``run`` has plain
    values to keep in the checkpoints. Raises ``ConfigError`` if a new run would write to a folder with checkpoints.
    """

    def __init__(
        self,
        folder: Path | str,
        every: int | None = None,
        *,
        run: dict[str, Any] | None = None,
        report: Callable[[str], None] = _to_stderr,
    ) -> None:
        if every is not None and every < 1:
            raise ConfigError(f"a checkpoint every {every} steps", allowed="1 step or more, or None")
        self._path, self._every, self._run, self._report = Path(folder), every, run or {}, report
        self._folder: CheckpointFolder | None = None
        self.failure = ""

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.comm.rank == 0:
            if not trainer.runner.steps:
                check_unused(self._path)
            self._folder = CheckpointFolder(self._path, trainer.runner.steps)

    def on_step_end(self, trainer: Trainer, outcome: StepOutcome) -> None:
        if self._every and trainer.runner.steps % self._every == 0:
            self._save(trainer)

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        if epoch.steps == epoch.total_steps and not (self._every and epoch.steps % self._every == 0):
            self._save(trainer)

    def on_train_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Save even a run that had no step left, if its folder has no checkpoint yet."""
        empty = self._folder is not None and not self.failure and not checkpoints(self._path)
        if trainer.comm.bcast(empty):
            self._save(trainer)
        if self._folder is not None:
            self._folder.close()

    def _save(self, trainer: Trainer) -> None:
        """Save the state between two steps; collective."""
        begin_s = now()
        with trainer.waiting(rank_status.CHECKPOINT):
            trainer.log.gather()
            checkpoint = snapshot(trainer, trainer.log.losses, self._run)
        if self._folder is None or checkpoint is None:
            return
        try:
            size = self._folder.write(checkpoint)
        except NotWritten as error:
            self.failure = str(error)
            self._report(f"warning: {error.given}; training goes on")
        else:
            self.failure = ""
            took = format_duration(now() - begin_s)
            self._report(f"checkpoint of step {checkpoint.header.step}: {format_size(size)} in {took}")


def resume(trainer: Trainer, folder: Path) -> None:
    """Set a trainer that has not begun to the newest valid checkpoint in ``folder``, which rank 0 reads.

    Raises ``FileFormatError`` if there is none, ``ConfigError`` if it is of another training.
    """
    checkpoint = newest(folder)[1] if trainer.comm.rank == 0 else None
    trainer.log.resume_from(restore(trainer, checkpoint, lambda line: print(f"dpsim: {line}", file=sys.stderr)))
