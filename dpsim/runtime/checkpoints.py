"""``Checkpoints``, a callback that writes a run's state down now and then and at its end; and how to go on from it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dpsim.comm.clock import now
from dpsim.errors import ConfigError
from dpsim.records.sweep import TrainResult
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

    On every rank, though rank 0 alone needs the file system. A checkpoint that cannot be written is told of by
    ``report`` (stderr), and training goes on; ``failure`` then says why the last one is missing. ``run`` (plain values)
    is kept in the checkpoints for whoever started the run. Raises ``ConfigError`` when a run that begins afresh finds
    another one's checkpoints in the folder.
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
            raise ConfigError(f"a checkpoint every {every} steps", allowed="1 step or more, or none given")
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
        """Where nothing was left to train, the folder may still be another one than the run came from."""
        empty = self._folder is not None and not self.failure and not checkpoints(self._path)
        if trainer.comm.bcast(empty):
            self._save(trainer)
        if self._folder is not None:
            self._folder.close()

    def _save(self, trainer: Trainer) -> None:
        """A checkpoint of the state between two steps; collective."""
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
    """Put a trainer that has not begun where the newest valid checkpoint in ``folder`` is, which rank 0 reads.

    Raises ``FileFormatError`` where there is none, ``ConfigError`` where it is of another training.
    """
    checkpoint = newest(folder)[1] if trainer.comm.rank == 0 else None
    trainer.log.resume_from(restore(trainer, checkpoint, lambda line: print(f"dpsim: {line}", file=sys.stderr)))
