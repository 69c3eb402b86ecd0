"""Times every layer of a model on running ranks: one alone, and several at once."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec, models
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.errors import ConfigError
from dpsim.harness.measurement.reference import SpeedLog, reference_s
from dpsim.harness.measurement.speed import NARROW, Mixture, Visits, factors, slowdown
from dpsim.harness.profile.announcements import check_announcements
from dpsim.harness.profile.profile import Profile, ProfileConfig
from dpsim.machine import ComputeSlowdown, Network, Speed
from dpsim.plan import Plan
from dpsim.runtime.describe import describe
from dpsim.runtime.recorder import StepMarks, exposed_s
from dpsim.runtime.trainer import Trainer
from dpsim.workload import Layer, Workload

Progress = Callable[[str], None]
Floats = NDArray[np.float64]
WARM_STEPS, COUNTED_STEPS = 2, 6
_LEAST_SAMPLES, _MOST_SAMPLES = 15, 400


class _Case:
    """One local batch on some ranks at once: trains, and keeps the computing times of every step.

    Several ranks reduce their gradients between backward and update, which is not timed: computation after a
    communication finds other things in its caches than computation alone.
    """

    def __init__(
        self, comm: MPI.Intracomm, devices: int, local_batch: int, config: ProfileConfig, dataset: Dataset
    ) -> None:
        self.model, self.devices, self.local_batch = config.model, devices, local_batch
        self.group = first_ranks(comm, devices)
        self.replica = models.load(config.model, dataset.input_shape, dataset.classes).replica()
        self.global_batch = devices * local_batch
        if self.group is not None:
            plan = Plan(
                devices=devices,
                global_batch=self.global_batch,
                fusion_rule="one",
                optimizer=config.optimizer,
                batch_norm=config.batch_norm,
                leaves=devices * config.leaves_of(local_batch),
            )
            self.trainer = Trainer(self.replica, dataset, plan, self.group, Network(), seed=config.seed)
        self.rows: list[Floats] = []
        self.steps = Visits()

    def visit(self, speeds: SpeedLog) -> None:
        """A visit as the measurement of a sweep makes it: the first two steps and short last batches do not count.

        A step lasts from the end of the one before it, less the communication that this rank does or waits for.
        """
        if self.group is None:
            return
        before_s = reference_s(self.group)
        outcomes = [self.trainer.step() for _ in range(WARM_STEPS + COUNTED_STEPS)]
        after_s = reference_s(self.group)
        seconds = []
        check_announcements(self.model, self.replica.layers, outcomes[-1].marks)
        for last, outcome in list(itertools.pairwise(outcomes))[WARM_STEPS - 1 :]:
            if outcome.global_samples != self.global_batch:
                continue
            begin_s, marks = last.marks.end_s, outcome.marks
            seconds.append(marks.end_s - begin_s - exposed_s(marks))
            self.rows.append(_row(begin_s, marks, len(self.replica.layers)))
        slowest_s = np.max(self.group.allgather(seconds), axis=0).tolist()
        self.steps.add(slowest_s, speeds.visited(self.devices, before_s, after_s))


def _row(begin_s: float, marks: StepMarks, layers: int) -> Floats:
    """Forward, backward and gradients-ready seconds of each layer, then update and overhead: 3 layers + 2 values.

    Times of several micro-batches are added. The step began at ``begin_s``, when the one before it ended.
    """
    row = np.zeros(3 * layers + 2)
    row[-1] = marks.begin_s - begin_s
    before_s, forward, backward = marks.begin_s, 0, layers - 1
    ready = dict(marks.ready)
    for name, end_s in marks.compute:
        kind = name.split(" ", 1)[0]
        if kind == "forward":
            row[forward % layers] += end_s - before_s
            forward += 1
        elif kind == "backward":
            row[layers + backward % layers] += end_s - before_s
            row[2 * layers + backward % layers] = ready.get(backward % layers, end_s) - before_s
            backward -= 1
        elif kind == "update":
            row[-2] = end_s - before_s
        else:
            row[-1] += end_s - before_s
        before_s = end_s
    return row


class Profiling:
    """A profile being taken: a visit to each case a round, until there are samples enough. Collective over ``comm``."""

    def __init__(self, comm: MPI.Intracomm, config: ProfileConfig, speeds: SpeedLog) -> None:
        self._comm, self._config, self._speeds = comm, config, speeds
        dataset = load_dataset(config.dataset, config.seed)
        samples = len(dataset.train_y)
        settings = [(1, batch) for batch in sorted(set(config.local_batches))] + [c for c in config.crowd if c[0] > 1]
        largest = max(devices * batch for devices, batch in settings)
        if largest > samples:
            raise ConfigError(
                f"a batch of {largest} samples, where {config.dataset} has {samples} to train on",
                allowed=f"at most {samples}",
                remedy="choose smaller batches",
            )
        self._cases = [_Case(comm, devices, batch, config, dataset) for devices, batch in settings]
        self._alone = {case.local_batch: case for case in self._cases if case.devices == 1}
        self._random = np.random.default_rng(0)

    @property
    def samples(self) -> int:
        """Steps counted so far of each case; the same on every rank."""
        return int(self._comm.bcast(len(self._cases[0].rows)))

    def round(self) -> None:
        """A visit to each case: batches in random order, one device and several at one local batch back to back."""
        for batch in self._random.permutation(list(self._alone)):
            for case in self._cases:
                if case.local_batch == batch:
                    quiet_barrier(self._comm)
                    case.visit(self._speeds)

    def compute_slowdown(self) -> tuple[ComputeSlowdown, ...]:
        """How much longer each of several devices computes than one alone; on rank 0."""
        found = []
        for case in self._cases:
            if case.devices > 1:
                alone, speeds = self._alone[case.local_batch], self._speeds
                ratio = slowdown(alone.steps, case.steps, speeds.mixture(1), speeds.mixture(case.devices))
                found.append(
                    ComputeSlowdown(devices=case.devices, factor=ratio.median, half_width=ratio.relative_half_width)
                )
        return tuple(found)

    def speed(self) -> tuple[Speed, ...]:
        """The speeds with each number of devices at work; on rank 0."""
        found = []
        for devices, speeds in self._speeds.mixtures().items():
            slower = [case.steps.slow_factor(speeds) for case in self._cases if case.devices == devices]
            if slower:
                found.append(speeds.speed(devices, float(np.median(slower))))
        return tuple(found)

    def settled(self) -> bool:
        """Whether the machine is steady and every compute slowdown is known well enough; on rank 0."""
        return self._speeds.steady() and all(found.half_width <= NARROW for found in self.compute_slowdown())

    def result(self) -> Profile | None:
        """The profile, on rank 0."""
        if self._comm.rank:
            return None
        return Profile(
            workload=_workload(self._config, self._alone, self._speeds.mixture(1)),
            compute_slowdown=self.compute_slowdown(),
            speed=self.speed(),
        )


def profile_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """The profile of one ``ProfileConfig`` on running ranks; rank 0 returns a ``Profile`` (plain values)."""
    config = codec.decode(argument, ProfileConfig, "profile")
    report(f"profiling {config.model} at local batch {', '.join(map(str, sorted(set(config.local_batches))))}")
    profiling = Profiling(comm, config, SpeedLog())
    end_s = now() + config.seconds
    enough = False
    while not enough:
        profiling.round()
        samples = profiling.samples
        enough = comm.bcast(samples >= _LEAST_SAMPLES and (now() > end_s or samples >= _MOST_SAMPLES))
    result = profiling.result()
    return dict(codec.to_builtins(result)) if result is not None else None


def _workload(config: ProfileConfig, cases: dict[int, _Case], speeds: Mixture) -> Workload:
    batches, replica = sorted(cases), next(iter(cases.values())).replica
    count = len(replica.layers)
    columns = np.array([_typical(cases[batch], speeds) for batch in batches])
    update_s = float(np.median(columns[:, -2]))
    overhead_s, per_sample_s = _line(batches, columns[:, -1] + columns[:, -2] - update_s)
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
        optimizer_slots=len(config.optimizer.slots),
        update_s=update_s,
        overhead_s=overhead_s,
        overhead_per_sample_s=per_sample_s,
        source=f"dpsim profile: medians of {len(cases[batches[0]].rows)} steps or more a local batch",
    )


def _line(batches: list[int], seconds: Floats) -> tuple[float, float]:
    """(constant, slope) of the line nearest to the overhead at each batch, neither of them negative."""
    slope = float(np.polyfit(batches, seconds, 1)[0]) if len(batches) > 1 else 0.0
    slope = min(max(slope, 0.0), float(np.min(seconds / np.array(batches))))
    return max(float(np.mean(seconds - slope * np.array(batches))), 0.0), slope


def _typical(case: _Case, speeds: Mixture) -> Floats:
    """Medians of each part at full speed, scaled to add up to the median step (a sum of medians is a little less)."""
    steps_s, references = case.steps.samples()
    scale = factors(references, speeds, case.steps.slow_factor(speeds))
    medians: Floats = np.median(np.array(case.rows) / scale[:, None], axis=0)
    layers = (len(medians) - 2) // 3
    total = medians[: 2 * layers].sum() + medians[-2:].sum()
    scaled: Floats = medians * (np.median(np.array(steps_s) / scale) / total)
    return scaled
