"""Trains on running ranks, and gathers what came of it."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.harness.resume import check_same_training, run_of, stored
from dpsim.harness.train import TrainConfig, TrainResult, same_folder
from dpsim.learning_rate import learning_rate
from dpsim.lower import lower
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.runtime.checkpoint import CheckpointFolder, NotWritten, read
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.snapshot import restore, snapshot
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer
from dpsim.units import format_duration, format_size

Progress = Callable[[str], None]


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """One ``TrainConfig`` on running ranks; rank 0 returns a ``TrainResult`` (plain values)."""
    config = codec.decode(argument, TrainConfig, "training")
    trainer, total = _trainer(comm, config)
    log = _Log(trainer, _restored(trainer, config, total))
    first_step = trainer.runner.steps
    saving = _Saving(trainer, config, report)
    if first_step:
        report(f"going on after step {first_step}, towards {total} steps")
    starts_s = None
    for done in range(first_step + 1, total + 1):
        log.add(trainer.step(), starts_s)
        starts_s = None
        if done % trainer.steps_per_epoch == 0 or done == total:
            log.gather()
            epoch, loss = log.epoch()
            report(f"epoch {epoch}: training loss {loss:.4f} ({done} of {total} steps)")
        if config.checkpoint_every and done % config.checkpoint_every == 0 and done < total:
            log.gather()
            saving.save(log.means)
            starts_s = now()
    if config.checkpoint is not None and (first_step < total or saving.elsewhere):
        saving.save(log.means)
    test = trainer.evaluate()
    with trainer.averaged_state():
        digest = trainer.digest()
    times = log.times()
    trainer.close()
    saving.close()
    if comm.rank:
        return None
    step_s, exposed = times
    result = TrainResult(
        devices=config.devices, steps=total, test_accuracy=test.correct / test.samples,
        final_loss=log.means[-1], step_s=step_s, images_per_s=log.full / step_s if step_s else 0.0,
        exposed_communication_s=exposed, digest=digest, losses=tuple(log.means), first_step=first_step,
        checkpoint_failure=saving.failure,
    )  # fmt: skip
    return dict(codec.to_builtins(result))


def _trainer(comm: MPI.Intracomm, config: TrainConfig) -> tuple[Trainer, int]:
    """A trainer as configured, and how many steps the run has."""
    dataset = load_dataset(config.dataset, config.seed)
    replica = build_model(config.model, dataset.input_shape, dataset.classes)
    plan, schedule = config.plan(), None
    if config.workload is not None:
        schedule = lower(
            config.workload, plan, alpha_s=config.link_alpha_s, beta_s_per_byte=config.link_beta_s_per_byte
        )
    steps_per_epoch = -(-len(dataset.train_y) // plan.global_batch)
    total = steps_per_epoch * config.epochs
    if config.steps is not None:
        total = min(total, config.steps)

    def rate(step: int) -> float:
        return learning_rate(
            config.rate_schedule, plan.optimizer.learning_rate, step,
            global_batch=plan.global_batch, steps_per_epoch=steps_per_epoch, total_steps=total,
        )  # fmt: skip

    network = Network.parse(config.network)
    trainer = Trainer(replica, dataset, plan, comm, network, seed=config.seed, schedule=schedule, rate=rate)
    return trainer, total


def _restored(trainer: Trainer, config: TrainConfig, total: int) -> list[float]:
    """The losses so far, the trainer being put where the checkpoint is (read by rank 0); none without one."""
    if config.resume is None:
        return []
    checkpoint = None
    if trainer.comm.rank == 0:
        checkpoint = read(Path(config.resume))
        check_same_training(stored(checkpoint), config)
    losses = restore(trainer, checkpoint)
    if len(losses) > total:
        raise ConfigError(
            f"the checkpoint is of step {len(losses)}, and the run would end at step {total}",
            allowed=f"{len(losses)} steps or more, counted from the beginning of training",
            remedy="raise --epochs or --steps",
        )
    return losses


class _Log:
    """Losses of every step of the run, and times of those that are done here."""

    def __init__(self, trainer: Trainer, losses: list[float]) -> None:
        self.means = losses
        self._comm, self._per_epoch = trainer.comm, trainer.steps_per_epoch
        self._samples, self._batch = len(trainer.dataset.train_y), trainer.plan.global_batch
        self._first = len(losses)
        self._own: list[float] = []
        self._starts: list[float] = []
        self._ends: list[float] = []
        self._waits: list[float] = []

    @property
    def full(self) -> int:
        """Samples of a whole batch."""
        return min(self._batch, self._samples)

    def _size(self, step: int) -> int:
        """Samples of a step's batch; the last of an epoch may be short."""
        return min(self._batch, self._samples - step % self._per_epoch * self._batch)

    def add(self, outcome: StepOutcome, starts_s: float | None) -> None:
        """Keep a step; its time counts from ``starts_s``, or else from the end of the step before it."""
        self._own.append(outcome.sums.loss)
        previous_s = self._ends[-1] if self._ends else outcome.marks.begin_s
        self._starts.append(previous_s if starts_s is None else starts_s)
        self._ends.append(outcome.marks.end_s)
        self._waits.append(exposed_s(outcome.marks))

    def gather(self) -> None:
        """Bring ``means``, over the samples of all ranks, up to date; collective."""
        for column in zip(*self._comm.allgather(self._own), strict=True):
            self.means.append(sum(column) / self._size(len(self.means)))
        self._own = []

    def epoch(self) -> tuple[int, float]:
        """The epoch of the last step, from 1, and its mean loss so far."""
        last = len(self.means) - 1
        steps = range(last - last % self._per_epoch, last + 1)
        sizes = [self._size(step) for step in steps]
        loss = sum(self.means[step] * size for step, size in zip(steps, sizes, strict=True)) / sum(sizes)
        return last // self._per_epoch + 1, loss

    def times(self) -> tuple[float, float]:
        """Medians of the steps with a whole batch, the first left out, and of exposed communication; collective."""
        starts = [max(column) for column in zip(*self._comm.allgather(self._starts), strict=True)]
        ends = [max(column) for column in zip(*self._comm.allgather(self._ends), strict=True)]
        exposed = [min(column) for column in zip(*self._comm.allgather(self._waits), strict=True)]
        steps = [
            ends[i] - starts[i] for i in range(1, len(ends)) if self._size(self._first + i) == self.full
        ]  # the first step has no step before it
        return statistics.median(steps) if steps else 0.0, statistics.median(exposed) if exposed else 0.0


class _Saving:
    """Writes a run's checkpoints, on rank 0, and tells how that went; a failure does not end the run."""

    def __init__(self, trainer: Trainer, config: TrainConfig, report: Progress) -> None:
        self._trainer, self._run, self._report = trainer, run_of(config), report
        self._folder: CheckpointFolder | None = None
        self.failure = ""
        self.elsewhere = trainer.comm.bcast(not same_folder(config))  # rank 0 alone needs the file system
        if config.checkpoint is not None and trainer.comm.rank == 0:
            self._folder = CheckpointFolder(Path(config.checkpoint), trainer.runner.steps)

    def save(self, losses: list[float]) -> None:
        """A checkpoint of the state between two steps; collective."""
        begin_s = now()
        checkpoint = snapshot(self._trainer, losses, self._run)
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

    def close(self) -> None:
        if self._folder is not None:
            self._folder.close()
