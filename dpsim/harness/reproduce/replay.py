"""Trains plans in this process, all ranks as threads, for as many steps as it takes to tell their bits apart."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Generator, Sequence
from typing import NamedTuple, ParamSpec, TypeVar

import msgspec

from dpsim.comm.local import LocalComm, LocalRanks
from dpsim.data import Dataset, load_dataset
from dpsim.grouping import grouped
from dpsim.machine import Selection
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.reproduce import Reproduction, Trajectory, plan_name
from dpsim.replica import Capabilities, Replica
from dpsim.runtime.choosing import choose, problems_of
from dpsim.runtime.micro_batches import batch_sizes
from dpsim.study.runners.digest import DigestedTraining, replica

P = ParamSpec("P")
T = TypeVar("T")


def trajectories(reproduction: Reproduction, plans: Sequence[Plan], progress: Progress) -> list[Trajectory]:
    """Return the first steps of each plan's training: up to the first in which its bits are those of no other plan.

    At most the steps of the reproduction. Digests of whole trainings are empty. Raises ``ConfigError`` for an allreduce
    of an MPI library that adds in an order that nobody has seen.
    """
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    with contextlib.ExitStack() as open_trainings:
        trainings = [_Training(reproduction, plan, dataset, progress) for plan in plans]
        for training in trainings:
            open_trainings.callback(training.close)
        alike = [trainings]
        for step in range(1, reproduction.steps + 1):
            parts: list[list[_Training]] = []
            for group in alike:
                for training in group:
                    progress(f"step {step}: {plan_name(training.plan)}, batch norm {training.plan.batch_norm}")
                    training.advance()
                parts += grouped(group, lambda training: training.last).values()
            alike = [part for part in parts if len(part) > 1]
            for (training,) in (part for part in parts if len(part) == 1):
                training.close()
        return [training.trajectory for training in trainings]


class _Step(NamedTuple):
    """What rank 0 has after a step: the names of its tensors, their digests, and the loss."""

    tensors: tuple[str, ...]
    digests: tuple[str, ...]
    loss: float


class _Training:
    """A plan's training on threads, begun with its first step."""

    def __init__(self, reproduction: Reproduction, plan: Plan, dataset: Dataset, progress: Progress) -> None:
        self.plan, self._reproduction, self._dataset, self._progress = plan, reproduction, dataset, progress
        self._ranks: LocalRanks[_Step] | None = None
        self._replicas: list[Replica] = []
        self._trained = plan
        self._steps: list[_Step] = []

    @property
    def last(self) -> _Step:
        """The last step."""
        return self._steps[-1]

    @property
    def trajectory(self) -> Trajectory:
        names, digests, losses = zip(*self._steps, strict=True)
        return Trajectory(digest="", losses_digest="", losses=losses, tensors=names[0], steps=digests)

    def advance(self) -> None:
        """Train one more step."""
        if self._ranks is None:
            _choose_code(self._reproduction, self._dataset, self.plan)
            self._replicas = [replica(self._reproduction, self._dataset) for _ in range(self.plan.devices)]
            if Capabilities.of(self._replicas[0]).tunable is None and not self.plan.parallelism.keeps_shards:
                _take_turns(self._replicas)
                self._trained = msgspec.structs.replace(self.plan, overlap="off")  # nobody waits in a turn
            self._ranks = LocalRanks(self.plan.devices, self._train)
        self._steps.append(self._ranks.advance())

    def _train(self, comm: LocalComm) -> Generator[_Step]:
        selection = Selection.usual(self.plan.data_devices)  # all that auto may take adds in one order
        trained = self._replicas[comm.rank]
        training = DigestedTraining(comm, self._reproduction, trained, self._trained, self._dataset, selection)
        try:
            while True:
                training.trainer.step()
                training.trainer.log.gather()
                yield _Step(tuple(training.tensors()), training.digests(), training.trainer.log.losses[-1])
        finally:
            training.trainer.runner.close()

    def close(self) -> None:
        if self._ranks is not None:
            self._ranks.close()
            self._ranks = None


def _take_turns(replicas: Sequence[Replica]) -> None:
    """Let one of the replicas compute at a time: those of users, and of PyTorch, may share a random generator."""
    turn = threading.RLock()

    def in_turn(method: Callable[P, T]) -> Callable[P, T]:
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            with turn:
                return method(*args, **kwargs)

        return call

    for each in replicas:
        for name in ("initial_parameters", "forward_backward"):
            setattr(each, name, in_turn(getattr(each, name)))


def _choose_code(reproduction: Reproduction, dataset: Dataset, plan: Plan) -> None:
    """Measure which code is to compute what the plan's ranks compute, where that is not known, without other ranks.

    The ranks find what was measured, as those of a job will.
    """
    able = Capabilities.of(replica(reproduction, dataset)).tunable
    if plan.leaves or able is None:
        return
    samples = len(dataset.train_y), len(dataset.test_y)
    sizes = [batch_sizes(plan, rank, *samples) for rank in range(plan.data_devices)]
    problems = problems_of(able, set().union(*(training for training, _ in sizes)), {test for _, test in sizes})

    def measured(comm: LocalComm) -> Generator[None]:
        choose(problems, able.timing, comm)
        yield

    ranks = LocalRanks(1, measured)
    ranks.advance()
    ranks.close()
