"""Profiles on running ranks: each local batch of a model alone, and on several devices at once, in turns."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks
from dpsim.comm.shaped import enter
from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.progress import Progress
from dpsim.runtime.recorder import StepMarks, exposed_s
from dpsim.runtime.trainer import Trainer
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, LOSS_EVENT, UPDATE_EVENT, Schedule
from dpsim.study import models
from dpsim.study.disturbance import Judge, RowMarks, Watcher
from dpsim.study.loop import StopRule, rounds
from dpsim.study.profile import (
    AT_S,
    BACKWARD_S,
    FORWARD_S,
    LAYERS_S,
    LOSS_S,
    OVERHEAD_S,
    READY_S,
    STEP_S,
    TICK_S,
    UPDATE_S,
    ProfileConfig,
)
from dpsim.study.rows import ProfiledBatch, Rows
from dpsim.study.steps import WARM_UP_STEPS, step_times_s, train

Floats = NDArray[np.float64]
_LEAST_SAMPLES = 15
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 67


class Profiler:
    """Visits one local batch on several ranks at once, or on one: trains, and keeps the computing times of each step.

    Several ranks reduce their gradients between backward and update, which is not timed: after a wait on the network
    computation does not find in its caches what computation alone does. Collective over ``comm``.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        subject: ProfiledBatch,
        config: ProfileConfig,
        dataset: Dataset,
        rows: Rows,
        watcher: Watcher,
    ) -> None:
        self.subject, self.model, self._comm, self._rows = subject, config.model, comm, rows
        self._watcher, self._marks = watcher, RowMarks(subject, Judge(crowded=watcher.crowded()))
        self._visits = rows.next_visit(subject)
        self._network = Network.parse(subject.network)
        self.group = first_ranks(comm, subject.devices)
        self.replica = models.load(config.model, dataset.input_shape, dataset.classes).replica()
        self.global_batch = subject.devices * subject.local_batch * subject.accumulate
        if self.group is not None:
            leaves = subject.devices * subject.accumulate * config.leaves_of(subject.local_batch)
            network = self._network
            algorithm = network.default_algorithm() if network.emulated else config.plan.algorithm
            plan = msgspec.structs.replace(
                config.plan,
                devices=subject.devices,
                global_batch=self.global_batch,
                accumulate=subject.accumulate,
                leaves=leaves,
                algorithm=algorithm,
            )
            self.trainer = Trainer(self.replica, dataset, plan, self.group, network, seed=config.seed)

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``: every visit counts, since none is the first after the trainer was built."""
        enter(self._comm, self._network)
        self._visit(self._visits, self._rows)
        self._visits += 1
        return True

    def _visit(self, number: int, rows: Rows) -> None:
        """Train a few steps, as a visit of a sweep does. The first two and steps with a short batch do not count.

        As a measured one, a step lasts from the slowest rank's end to the slowest rank's end, and the communication of
        the rank that was ready last is exposed: what remains is computation, also where ranks take turns being late.
        """
        if self.group is None:
            return
        outcomes = train(self.trainer, self._watcher)
        seen = self._watcher.seen()
        marks = [outcome.marks for outcome in outcomes]
        _check_announced(self.model, self.trainer.schedule, marks[-1])
        gathered = self.group.gather(([each.end_s for each in marks], [exposed_s(each) for each in marks], seen))
        whole = [outcome.global_samples == self.global_batch for outcome in outcomes][WARM_UP_STEPS:]
        if gathered is None or not any(whole):
            return
        steps_s = np.array(step_times_s([ends for ends, *_ in gathered]))
        exposed = np.min([of_rank for _, of_rank, _ in gathered], axis=0)[WARM_UP_STEPS:]
        rows.add(self.subject, STEP_S, number, np.maximum(steps_s - exposed, TICK_S)[whole])
        rows.add(self.subject, AT_S, number, [now()])
        counted = range(WARM_UP_STEPS, len(marks))
        samples_s = {step: steps_s[step - WARM_UP_STEPS] for step in counted if whole[step - WARM_UP_STEPS]}
        clean = self._marks.add(rows, number, [of_rank for *_, of_rank in gathered], samples_s)
        if self.subject.devices == 1:
            steps = [step for step, mark in zip(samples_s, clean, strict=True) if mark] or [*samples_s]
            turns = [(marks[step - 1].end_s, marks[step]) for step in steps]
            parts = [computing_times(before_s, each, self.trainer.schedule) for before_s, each in turns]
            self._keep_parts(number, np.median(parts, axis=0), rows)

    def _keep_parts(self, number: int, medians: Floats, rows: Rows) -> None:
        layers = len(self.replica.layers)
        rows.add(self.subject, LAYERS_S, number, [medians[: 2 * layers].sum() / self.subject.accumulate])
        if self.subject.accumulate > 1:
            return
        for row, quantity in enumerate((FORWARD_S, BACKWARD_S, READY_S)):
            for layer in range(layers):
                rows.add(self.subject, quantity, number, [medians[row * layers + layer]], layer)
        rows.add(self.subject, UPDATE_S, number, [medians[-3]])
        rows.add(self.subject, LOSS_S, number, [medians[-2]])
        rows.add(self.subject, OVERHEAD_S, number, [medians[-1]])

    def close(self) -> None:
        """Give back what the trainer holds. Collective over the ranks that compute."""
        if self.group is not None:
            self.trainer.close()


def computing_times(begin_s: float, marks: StepMarks, schedule: Schedule) -> Floats:
    """Return forward, backward and gradient-ready seconds of each layer, then update, loss and overhead: 3 layers + 3.

    Times of several micro-batches are added. The step began at ``begin_s``, when the step before it ended.
    """
    layers = len(schedule.workload.layers)
    row = np.zeros(3 * layers + 3)
    row[-1] = marks.begin_s - begin_s
    before_s = marks.begin_s
    ready = dict(marks.ready)
    for operation, end_s in marks.compute:
        kind, layer = schedule.kind[operation], schedule.layer[operation]
        if kind == FORWARD_EVENT:
            row[layer] += end_s - before_s
        elif kind == BACKWARD_EVENT:
            row[layers + layer] += end_s - before_s
            row[2 * layers + layer] += ready.get(layer, end_s) - before_s
        elif kind == UPDATE_EVENT:
            row[-3] = end_s - before_s
        elif kind == LOSS_EVENT:
            row[-2] += end_s - before_s
        else:
            row[-1] += end_s - before_s
        before_s = end_s
    return row


def _check_announced(model: str, schedule: Schedule, marks: StepMarks) -> None:
    """Check that every micro-batch of a step announced the forward and backward of every layer, in order.

    Raises ``ConfigError``: a profile has the times between the announcements of a replica.
    """
    count = len(schedule.workload.layers)
    expected = [(FORWARD_EVENT, layer) for layer in range(count)]
    expected += [(BACKWARD_EVENT, layer) for layer in reversed(range(count))]
    kinds = [(int(schedule.kind[operation]), int(schedule.layer[operation])) for operation, _ in marks.compute]
    announced = [each for each in kinds if each[0] in (FORWARD_EVENT, BACKWARD_EVENT)]
    if not announced or announced != expected * (len(announced) // len(expected)):
        names = [layer.name for layer in schedule.workload.layers]
        words = {FORWARD_EVENT: "forward", BACKWARD_EVENT: "backward"}
        said = ", ".join(f"{words[kind]} {names[layer]}" for kind, layer in announced)
        raise ConfigError(
            f"model {model!r} announced {said or 'no layer'} in a step",
            allowed="in this order: " + ", ".join(f"{words[kind]} {names[layer]}" for kind, layer in expected),
            remedy="call events.forward_done(layer) and events.backward_done(layer) for every layer: "
            "a profile has the times between these calls",
        )


def profilers(
    comm: MPI.Intracomm, config: ProfileConfig, rows: Rows, watcher: Watcher, profile: int = 0
) -> list[Profiler]:
    """Return what visits each case of a profile. Collective. Raises ``ConfigError`` for a batch too large."""
    dataset = load_dataset(config.dataset, config.seed)
    samples, largest = (
        len(dataset.train_y),
        max(devices * batch for devices, batch in (*config.cases, *config.accumulated)),
    )
    if largest > samples:
        raise ConfigError(
            f"a batch of {largest} samples, where {config.dataset} has {samples} to train on",
            allowed=f"at most {samples}",
            remedy="choose smaller batches",
        )
    return [Profiler(comm, subject, config, dataset, rows, watcher) for subject in config.subjects(profile)]


def profile_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """Profile one ``ProfileConfig`` on running ranks; rank 0 returns the series of its rows (plain values)."""
    config, rows = codec.decode(argument, ProfileConfig, "profile"), Rows()
    report(f"profiling {config.model} at local batch {', '.join(map(str, sorted(set(config.local_batches))))}")
    visited = profilers(comm, config, rows, Watcher.on(comm))
    first = ProfiledBatch(devices=1, local_batch=min(config.local_batches))
    stop = StopRule(least_rounds=_LEAST_ROUNDS, most_rounds=_MOST_ROUNDS, least_s=config.seconds)
    enough = lambda: len(rows.values(first, STEP_S)) >= _LEAST_SAMPLES  # noqa: E731
    for current in rounds(stop, suffice=enough, comm=comm, report=report):
        for profiler in current.order(visited):
            profiler.visit(current.number, counted=True)
    for profiler in visited:
        profiler.close()
    return list(codec.to_builtins(rows.series())) if comm.rank == 0 else None
