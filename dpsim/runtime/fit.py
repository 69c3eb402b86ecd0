"""The training loop: step after step, with callbacks, to a result. ``dpsim train`` and user code run the same one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.records.train import TrainResult
from dpsim.runtime import rank_status
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """An epoch that has ended (the last one may have been cut short): sums over all ranks' samples in it.

    ``number`` counts from 1; ``loss`` is the mean training loss a sample in nats, ``accuracy`` that of the training
    samples as they were met (since the run was resumed, if it was); ``steps`` of ``total_steps`` are done.
    """

    number: int
    loss: float
    accuracy: float
    steps: int
    total_steps: int


class Callback:
    """Calls to user code during a run; override the methods you need. Called on every rank, in list order.

    A callback on every rank may communicate (``trainer.evaluate()`` does); one that is wrapped in ``OnRank`` must not,
    and the other ranks wait for it at their next allreduce.
    """

    def on_train_begin(self, trainer: Trainer) -> None:
        """Observe the start, before the first step."""

    def on_step_end(self, trainer: Trainer, outcome: StepOutcome) -> None:
        """Observe a step's end, with sums over this rank's samples."""

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        """Observe the end of each epoch, and the end of the last step."""

    def on_train_end(self, trainer: Trainer, result: TrainResult) -> None:
        """Observe the end, after the test."""


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
    """Train to step ``total_steps``, then test. Collective; the same result on every rank. Closes the trainer.

    A trainer that was restored from a checkpoint continues after its step.
    """
    log, first_step = trainer.log, trainer.runner.steps
    for callback in callbacks:
        callback.on_train_begin(trainer)
    for step in range(first_step + 1, total_steps + 1):
        outcome = trainer.step()
        for callback in callbacks:
            callback.on_step_end(trainer, outcome)
        if step % trainer.steps_per_epoch == 0 or step == total_steps:
            epoch = _epoch(trainer, step, total_steps)
            for callback in callbacks:
                callback.on_epoch_end(trainer, epoch)
    test = trainer.evaluate()
    with trainer.waiting(rank_status.RESULTS):
        log.gather()
        step_s, images_per_s, exposed_s = log.times()
    with trainer.averaged_state():
        digest = trainer.digest()
    result = TrainResult(
        devices=trainer.plan.devices,
        steps=total_steps,
        test_accuracy=test.correct / test.samples,
        test_loss=test.loss / test.samples,
        final_loss=log.losses[-1],
        step_s=step_s,
        images_per_s=images_per_s,
        exposed_communication_s=exposed_s,
        digest=digest,
        losses=tuple(log.losses),
        first_step=first_step,
        computed_on=trainer.computed_on,
        libraries=trainer.libraries,
        optimizer_state_bytes=max(trainer.comm.allgather(trainer.runner.arena.optimizer_state_bytes)),
    )
    trainer.close()
    for callback in callbacks:
        callback.on_train_end(trainer, result)
    return result


def _epoch(trainer: Trainer, step: int, total_steps: int) -> Epoch:
    with trainer.waiting(rank_status.EPOCH_LOSS):
        trainer.log.gather()
    number, loss, accuracy = trainer.log.epoch()
    return Epoch(number=number, loss=loss, accuracy=accuracy, steps=step, total_steps=total_steps)
