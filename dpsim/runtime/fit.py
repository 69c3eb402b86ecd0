"""The training loop: step after step, with callbacks, to a result. ``dpsim train`` and user code run the same one."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.comm import board
from dpsim.record import TrainResult
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that has ended (the last one may have been cut short): sums over all ranks' samples in it.

    ``number`` counts from 1; ``loss`` is the mean training loss a sample in nats, ``accuracy`` of the training
    samples as they were met; ``steps`` of ``total_steps`` are done.
    """

    number: int
    loss: float
    accuracy: float
    steps: int
    total_steps: int


class Callback:
    """What user code is told while a run goes on; override what you need. Called on every rank, in list order.

    A callback on every rank may communicate (``trainer.evaluate()`` does); one that is wrapped in ``OnRank`` must not,
    and the other ranks wait for it at their next allreduce.
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Before the first step."""

    def on_step_end(self, trainer: Trainer, outcome: StepOutcome) -> None:
        """After each step: sums over this rank's samples."""

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        """After each epoch, and after the last step."""

    def on_train_end(self, trainer: Trainer, result: TrainResult) -> None:
        """After the test."""


class OnRank(Callback):
    """A callback on one rank alone (0 unless another is named)."""

    def __init__(self, callback: Callback, rank: int = 0) -> None:
        self._callback, self._rank = callback, rank

    def on_train_begin(self, trainer: Trainer) -> None:
        if trainer.comm.rank == self._rank:
            self._callback.on_train_begin(trainer)

    def on_step_end(self, trainer: Trainer, outcome: StepOutcome) -> None:
        if trainer.comm.rank == self._rank:
            self._callback.on_step_end(trainer, outcome)

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        if trainer.comm.rank == self._rank:
            self._callback.on_epoch_end(trainer, epoch)

    def on_train_end(self, trainer: Trainer, result: TrainResult) -> None:
        if trainer.comm.rank == self._rank:
            self._callback.on_train_end(trainer, result)


def fit(trainer: Trainer, total_steps: int, callbacks: Sequence[Callback] = ()) -> TrainResult:
    """Train to step ``total_steps``, then test. Collective; the same result on every rank. Closes the trainer."""
    comm, per_epoch = trainer.comm, trainer.steps_per_epoch
    outcomes: list[StepOutcome] = []
    for callback in callbacks:
        callback.on_train_begin(trainer)
    for step in range(1, total_steps + 1):
        outcomes.append(trainer.step())
        for callback in callbacks:
            callback.on_step_end(trainer, outcomes[-1])
        if step % per_epoch == 0 or step == total_steps:
            epoch = _epoch(trainer, outcomes[(step - 1) // per_epoch * per_epoch :], step, total_steps)
            for callback in callbacks:
                callback.on_epoch_end(trainer, epoch)
    test = trainer.evaluate()
    samples = [outcome.global_samples for outcome in outcomes]
    with trainer.waiting(board.RESULTS):
        losses = [sum(column) for column in zip(*comm.allgather([o.sums.loss for o in outcomes]), strict=True)]
        full, step_s = _full_steps(trainer, outcomes)
        exposed = _least_exposed_s(trainer, outcomes)
    result = TrainResult(
        devices=trainer.plan.devices, steps=total_steps, test_accuracy=test.correct / test.samples,
        final_loss=losses[-1] / samples[-1], step_s=step_s,
        images_per_s=full / step_s if step_s else 0.0,
        exposed_communication_s=exposed, digest=trainer.digest(),
        losses=tuple(loss / size for loss, size in zip(losses, samples, strict=True)),
    )  # fmt: skip
    trainer.close()
    for callback in callbacks:
        callback.on_train_end(trainer, result)
    return result


def _epoch(trainer: Trainer, outcomes: Sequence[StepOutcome], step: int, total_steps: int) -> Epoch:
    mine = (sum(o.sums.loss for o in outcomes), sum(o.sums.correct for o in outcomes))
    with trainer.waiting(board.EPOCH_LOSS):
        loss, correct = (sum(column) for column in zip(*trainer.comm.allgather(mine), strict=True))
    samples = sum(outcome.global_samples for outcome in outcomes)
    number = (step - 1) // trainer.steps_per_epoch + 1
    return Epoch(number=number, loss=loss / samples, accuracy=correct / samples, steps=step, total_steps=total_steps)


def _full_steps(trainer: Trainer, outcomes: Sequence[StepOutcome]) -> tuple[int, float]:
    """Samples of a whole batch, and the median seconds of the steps that have one and a step before them."""
    ends = [max(column) for column in zip(*trainer.comm.allgather([o.marks.end_s for o in outcomes]), strict=True)]
    samples = [outcome.global_samples for outcome in outcomes[1:]]  # the last batch of an epoch may be short
    full = max(samples, default=0)
    times = [b - a for (a, b), size in zip(itertools.pairwise(ends), samples, strict=True) if size == full]
    return full, statistics.median(times) if times else 0.0


def _least_exposed_s(trainer: Trainer, outcomes: Sequence[StepOutcome]) -> float:
    """Median over steps of the exposed communication of the rank that had least: the others waited for it."""
    waits = trainer.comm.allgather([exposed_s(outcome.marks) for outcome in outcomes])
    return float(statistics.median(min(column) for column in zip(*waits, strict=True)))
