"""Times every layer of a model on running ranks: on one rank alone, and on several at once."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
from mpi4py import MPI
from msgspec.structs import replace
from numpy.typing import NDArray

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.compute_dtype import in_dtype
from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError
from dpsim.harness import models
from dpsim.harness.measurement.loop import Round, StopRule, rounds
from dpsim.harness.measurement.scatter import NARROW, TICK_S, Visits, compute_slowdown, later_error, median_error
from dpsim.harness.measurement.steps import COUNTED_STEPS, WARM_UP_STEPS
from dpsim.harness.profile.announcements import check_announcements
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.harness.profile.slowdown import joined_slowdown
from dpsim.machine import ComputeSlowdown, Network
from dpsim.progress import Progress
from dpsim.runtime.describe import describe
from dpsim.runtime.recorder import StepMarks, exposed_s
from dpsim.runtime.trainer import Trainer
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, UPDATE_EVENT, Schedule
from dpsim.workload import Layer, Workload, overhead_line

Floats = NDArray[np.float64]
_LEAST_SAMPLES = 15
_LEAST_ROUNDS, _MOST_ROUNDS = 3, 67
_SPREAD_QUANTILES = 20


class _Case:
    """One local batch on several ranks at once, or on one: trains, and keeps the computing times of every step.

    Several ranks reduce their gradients between backward and update, which is not timed: computation after a
    communication does not find in its caches what computation alone does.
    """

    def __init__(
        self, comm: MPI.Intracomm, devices: int, local_batch: int, config: ProfileConfig, dataset: Dataset
    ) -> None:
        self.model, self.devices, self.local_batch = config.model, devices, local_batch
        self.group = first_ranks(comm, devices)
        self.replica = models.load(config.model, dataset.input_shape, dataset.classes).replica()
        self.global_batch = devices * local_batch
        if self.group is not None:
            leaves = devices * config.leaves_of(local_batch)
            plan = replace(config.plan, devices=devices, global_batch=self.global_batch, leaves=leaves)
            self.trainer = Trainer(self.replica, dataset, plan, self.group, Network(), seed=config.seed)
        self.rows: list[Floats] = []
        self.steps = Visits()

    def visit(self) -> None:
        """Train a few steps, as a visit of a sweep does. The first two and steps with a short batch do not count.

        A step lasts from the end of the one before it, less the communication that this rank does or waits for.
        """
        if self.group is None:
            return
        outcomes = [self.trainer.step() for _ in range(WARM_UP_STEPS + COUNTED_STEPS)]
        seconds = []
        check_announcements(self.model, self.replica.layers, self.trainer.runner.program.names, outcomes[-1].marks)
        for previous, outcome in itertools.pairwise(outcomes[WARM_UP_STEPS - 1 :]):
            if outcome.global_samples != self.global_batch:
                continue
            begin_s, marks = previous.marks.end_s, outcome.marks
            seconds.append(marks.end_s - begin_s - exposed_s(marks))
            self.rows.append(computing_times(begin_s, marks, self.trainer.schedule))
        slowest_s = np.max(self.group.allgather(seconds), axis=0).tolist()
        self.steps.add(slowest_s, now())


def computing_times(begin_s: float, marks: StepMarks, schedule: Schedule) -> Floats:
    """Forward, backward and gradient-ready seconds of each layer, then update and overhead: 3 layers + 2 values.

    Times of several micro-batches are added. The step began at ``begin_s``, when the step before it ended.
    """
    layers = len(schedule.workload.layers)
    row = np.zeros(3 * layers + 2)
    row[-1] = marks.begin_s - begin_s
    before_s = marks.begin_s
    ready = dict(marks.ready)
    for operation, end_s in marks.compute:
        kind, layer = schedule.event_kind[operation], schedule.layer[operation]
        if kind == FORWARD_EVENT:
            row[layer] += end_s - before_s
        elif kind == BACKWARD_EVENT:
            row[layers + layer] += end_s - before_s
            row[2 * layers + layer] += ready.get(layer, end_s) - before_s
        elif kind == UPDATE_EVENT:
            row[-2] = end_s - before_s
        else:
            row[-1] += end_s - before_s
        before_s = end_s
    return row


class ModelProfiler:
    """Takes a profile round by round. Collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, config: ProfileConfig) -> None:
        self._comm, self._config = comm, config
        dataset = load_dataset(config.dataset, config.seed)
        samples = len(dataset.train_y)
        settings = [(1, batch) for batch in sorted(set(config.local_batches))]
        settings += [(devices, batch) for devices, batch in config.concurrent if devices > 1]
        largest = max(devices * batch for devices, batch in settings)
        if largest > samples:
            raise ConfigError(
                f"a batch of {largest} samples, where {config.dataset} has {samples} to train on",
                allowed=f"at most {samples}",
                remedy="choose smaller batches",
            )
        self._cases = [_Case(comm, devices, batch, config, dataset) for devices, batch in settings]
        self._alone = {case.local_batch: case for case in self._cases if case.devices == 1}

    def visit(self, current: Round, turn: int = 0) -> None:
        """Visit each case: local batches in random order, one device and several at one batch back to back."""
        for batch in current.order(list(self._alone), turn):
            for case in self._cases:
                if case.local_batch == batch:
                    quiet_barrier(self._comm)
                    case.visit()

    def enough_samples(self) -> bool:
        """Whether there are samples enough for medians; on rank 0."""
        return len(self._cases[0].rows) >= _LEAST_SAMPLES

    def compute_slowdown(self) -> tuple[ComputeSlowdown, ...]:
        """How much longer each of several devices computes than one alone; on rank 0."""
        slowdowns: dict[int, list[tuple[float, ComputeSlowdown]]] = {}
        for case in self._cases:
            if case.devices > 1:
                alone = self._alone[case.local_batch].steps
                slowdown = compute_slowdown(case.devices, alone, case.steps)
                slowdowns.setdefault(case.devices, []).append((float(np.median(alone.medians_s())), slowdown))
        return tuple(joined_slowdown(of_devices) for of_devices in slowdowns.values())

    def settled(self) -> bool:
        """Whether every compute slowdown is known well enough; on rank 0."""
        return all(slowdown.half_width <= NARROW for slowdown in self.compute_slowdown())

    def result(self) -> Profile | None:
        """The profile, on rank 0."""
        if self._comm.rank:
            return None
        return Profile(
            workload=_workload(self._config, self._alone),
            compute_slowdown=self.compute_slowdown(),
            relative_uncertainty=later_error([case.steps for case in self._cases]),
        )


def profile_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The profile of one ``ProfileConfig`` on running ranks; rank 0 returns a ``Profile`` (plain values)."""
    config = codec.decode(argument, ProfileConfig, "profile")
    report(f"profiling {config.model} at local batch {', '.join(map(str, sorted(set(config.local_batches))))}")
    profiler = ModelProfiler(comm, config)
    stop = StopRule(least_rounds=_LEAST_ROUNDS, most_rounds=_MOST_ROUNDS, least_s=config.seconds)
    for current in rounds(stop, suffice=profiler.enough_samples, comm=comm, report=report):
        profiler.visit(current)
    result = profiler.result()
    return dict(codec.to_builtins(result)) if result is not None else None


def _workload(config: ProfileConfig, cases: dict[int, _Case]) -> Workload:
    batches, replica = sorted(cases), next(iter(cases.values())).replica
    count = len(replica.layers)
    columns = np.array([_typical(cases[batch]) for batch in batches])
    update_s = float(np.median(columns[:, -2]))
    overhead_s, per_sample_s = overhead_line(batches, (columns[:, -1] + columns[:, -2] - update_s).tolist())
    dtype = in_dtype(config.plan.compute_dtype)
    bare = describe(replica, f"{config.model} on {config.dataset}")
    layers = tuple(
        Layer(
            name=layer.name,
            kind=layer.kind,
            tensors=layer.tensors,
            activation_bytes_per_sample=layer.activation_bytes_per_sample,
            batch_norm_channels=layer.batch_norm_channels,
            forward_s=tuple(columns[:, i].tolist()),
            backward_s=tuple(columns[:, count + i].tolist()),
            gradient_ready_s=tuple(columns[:, 2 * count + i].tolist()),
        )
        for i, layer in enumerate(bare.layers)
    )
    return Workload(
        name=bare.name,
        local_batches=tuple(batches),
        layers=layers,
        state_bytes=bare.state_bytes,
        optimizer_slots=len(config.plan.optimizer.slots),
        update_s=update_s,
        overhead_s=overhead_s,
        overhead_per_sample_s=per_sample_s,
        relative_uncertainty=_error([cases[batch].steps for batch in batches]),
        step_spread=_spread([cases[batch].steps for batch in batches]),
        source=f"dpsim profile: medians of {len(cases[batches[0]].rows)} steps or more a local batch{dtype}",
    )


def _spread(cases: list[Visits]) -> tuple[float, ...]:
    """Quantiles of a step's time on one device over the median of its local batch, of all batches together."""
    ratios = [steps_s / np.median(steps_s) for steps_s in (steps.samples() for steps in cases)]
    probabilities = (np.arange(_SPREAD_QUANTILES) + 0.5) / _SPREAD_QUANTILES
    return tuple(np.quantile(np.concatenate(ratios), probabilities).tolist())


def _error(cases: list[Visits]) -> float:
    """The relative standard error of the layer times: root mean square over local batches, from visits' medians."""
    return float(np.sqrt(np.mean([median_error(steps.medians_s()) ** 2 for steps in cases])))


def _typical(case: _Case) -> Floats:
    """Medians of each part, scaled so that they add up to the median step: a sum of medians is less."""
    medians: Floats = np.median(np.maximum(case.rows, 0.0), axis=0)
    layers = (len(medians) - 2) // 3
    total = max(medians[: 2 * layers].sum() + medians[-2:].sum(), TICK_S)
    scaled: Floats = medians * (np.median(case.steps.samples()) / total)
    return scaled
