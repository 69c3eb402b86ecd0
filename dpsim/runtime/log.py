"""Losses and times of a run, step after step."""

from __future__ import annotations

import itertools
import operator
import statistics
from collections.abc import Sequence

from mpi4py import MPI

from dpsim.kernels.allreduce.tree import Tree, fold
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.step import StepOutcome


class TrainLog:
    """Mean losses of every step of a run, also of those before it was resumed, and times of those since.

    ``samples`` of training data come in global batches of ``batch``. Losses of the slots of ``ranks``, which know them,
    are added along ``tree``.
    """

    def __init__(self, comm: MPI.Intracomm, samples: int, batch: int, tree: Tree, ranks: Sequence[int]) -> None:
        self._ranks = ranks
        self._comm, self._samples, self._batch, self._tree = comm, samples, min(batch, samples), tree
        self._per_epoch = -(-samples // batch)
        self.losses: list[float] = []
        self._before = 0
        self._own: list[tuple[float, ...]] = []
        self._own_correct: list[int] = []
        self._correct: list[int] = []
        self._begins: list[float] = []
        self._ends: list[float] = []
        self._waits: list[float] = []

    def resume_from(self, losses: list[float]) -> None:
        """Begin with the losses of the steps that an earlier run did."""
        self.losses, self._before = list(losses), len(losses)

    def add(self, outcome: StepOutcome) -> None:
        """Add one more step."""
        self._own.append(outcome.sums.slot_losses)
        self._own_correct.append(outcome.sums.correct)
        self._begins.append(outcome.marks.begin_s)
        self._ends.append(outcome.marks.end_s)
        self._waits.append(exposed_s(outcome.marks))

    def gather(self) -> None:
        """Bring ``losses``, means over the samples of all ranks, up to date; collective."""
        for column in zip(*self._comm.allgather(self._own), strict=True):
            losses = list(itertools.chain.from_iterable(column[rank] for rank in self._ranks))
            loss = fold(self._tree, losses.__getitem__, operator.add)
            self.losses.append(loss / self.batch_of(len(self.losses)))
        correct = self._comm.allgather(self._own_correct)
        self._correct += [sum(column) for column in zip(*(correct[rank] for rank in self._ranks), strict=True)]
        self._own, self._own_correct = [], []

    def batch_of(self, step: int) -> int:
        """Return samples of a step's batch (steps from 0); the last one of an epoch may be short."""
        return min(self._batch, self._samples - step % self._per_epoch * self._batch)

    def epoch(self) -> tuple[int, float, float]:
        """Return the last gathered step's epoch (from 1), and the mean loss and accuracy of that epoch's steps.

        The accuracy is that of the steps since the run was resumed.
        """
        last = len(self.losses) - 1
        first = last - last % self._per_epoch
        loss = sum(self.losses[step] * self.batch_of(step) for step in range(first, last + 1))
        steps = range(max(first, self._before), last + 1)
        correct = sum(self._correct[step - self._before] for step in steps)
        samples = sum(self.batch_of(step) for step in steps)
        return last // self._per_epoch + 1, loss / sum(map(self.batch_of, range(first, last + 1))), correct / samples

    def times(self) -> tuple[float, float, float]:
        """Return median step, images/s at it and median exposed communication; collective, zeros without such steps.

        A step lasts from the last rank's begin to the slowest rank's end. Only whole batches count, and not the first
        step. Exposed communication is that of the rank that had least: the others waited for it.
        """
        begins = [max(column) for column in zip(*self._comm.allgather(self._begins), strict=True)]
        ends = [max(column) for column in zip(*self._comm.allgather(self._ends), strict=True)]
        waits = [min(column) for column in zip(*self._comm.allgather(self._waits), strict=True)]
        full_batches = [i for i in range(1, len(ends)) if self.batch_of(self._before + i) == self._batch]
        step_s = statistics.median([ends[i] - begins[i] for i in full_batches]) if full_batches else 0.0
        return step_s, self._batch / step_s if step_s else 0.0, statistics.median(waits) if waits else 0.0
