"""Measures the points of a sweep: real training, all settings interleaved in one run, every round saved."""

from __future__ import annotations

import gc
import statistics
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier, quiet_start
from dpsim.data import Dataset, load_dataset
from dpsim.errors import DpsimError
from dpsim.harness import models
from dpsim.harness.measurement.loop import LEAST_ROUNDS, StopRule, rounds
from dpsim.harness.measurement.reference import reference_s
from dpsim.harness.measurement.statistics import median_interval
from dpsim.harness.measurement.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s
from dpsim.harness.sweep.emulation import EmulationLog, Watch, Watched, machine_cores
from dpsim.harness.sweep.samples import MeasureTask, Samples
from dpsim.machine import Network
from dpsim.predict import scheduled
from dpsim.progress import Progress
from dpsim.records.sweep import MeasuredPoint
from dpsim.replica import Replica
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.recorder import StepMarks, exposed_s, seconds_per_event, timeline
from dpsim.runtime.trainer import Trainer

_REPORT_S = 5.0
_WARM_UP_ROUNDS = 2
_ONE_DEVICE_VISITS = 3
"""Visits a round to the setting of one device. It is a single one, where several settings share each other count."""
_LOSS_TOLERANCE = 0.02


_Step = tuple[StepMarks, float, int]
"""The marks of a step on one rank, the sum of its losses, and the samples of the global batch."""


class _Point:
    """One setting on the ranks that take part: each trains its own replica, and rank 0 keeps the samples."""

    def __init__(self, comm: MPI.Intracomm, task: MeasureTask, index: int, dataset: Dataset) -> None:
        self.setting = task.settings[index]
        plan = self.setting.plan
        self.group = first_ranks(comm, plan.devices)
        earlier = task.before.of(self.setting)
        self.step_s = list(earlier.step_s) if earlier else []
        self.exposed_s = list(earlier.exposed_communication_s) if earlier else []
        self.round = list(earlier.round) if earlier else []
        self.losses = list(earlier.losses) if earlier else []
        self.reference_s = list(earlier.reference_s) if earlier else []
        self.emulation = EmulationLog(earlier.emulation if earlier else None)
        self.typical: tuple[float, list[StepMarks]] | None = None
        self.new_losses: list[float] = []
        self.memory_bytes = 0
        if self.group is None:
            return
        experiment = task.experiment
        of_workload, of_machine = task.places[index]
        machine = task.machines[of_machine]
        workload = task.workloads[of_workload]
        replica: Replica = models.load(self.setting.model, dataset.input_shape, dataset.classes).replica()
        self.emulated: EmulatedReplica | None = None
        if self.setting.emulated_compute:
            replica = self.emulated = EmulatedReplica(replica, workload, seed=experiment.seed, rank=self.group.rank)
        schedule = scheduled(workload, machine, plan)
        network = Network.parse(self.setting.network)
        self.buckets = schedule.buckets if plan.devices > 1 else 0
        self.trainer = Trainer(
            replica,
            dataset,
            plan,
            self.group,
            network,
            seed=experiment.seed,
            schedule=schedule,
            selection=machine.selected(plan.devices),
        )

    def visit(self, round_number: int, *, counted: bool) -> None:
        """Train a few steps. The first two and steps with a short batch do not count."""
        if self.group is None:
            return
        if self.emulated is not None:
            self._visit_emulated(self.group, self.emulated, round_number, counted=counted)
            return
        before_s = reference_s(self.group)
        steps = [self._step() for _ in range(WARM_UP_STEPS + COUNTED_STEPS)]
        speed_s = statistics.mean((before_s, reference_s(self.group)))
        self._add(self.group.gather((steps, self.trainer.memory_bytes)), round_number, speed_s, counted=counted)

    def _visit_emulated(
        self, group: MPI.Intracomm, replica: EmulatedReplica, round_number: int, *, counted: bool
    ) -> None:
        """The same with ranks that wait: they begin together, and no reference computation takes their cores."""
        attempt, again = 0, True
        while again:
            gathered = group.gather(self._watched_steps(group, replica))
            if gathered is not None:
                watched = [of_rank for _, of_rank in gathered]
                again = counted and self.emulation.repeats(watched, machine_cores(), attempt)
            attempt, again = attempt + 1, group.bcast(again)
        if gathered is None:
            return
        if counted:
            self.emulation.visited(watched, machine_cores())
        self._add([(of_rank, 0) for of_rank, _ in gathered], round_number, None, counted=counted)

    def _watched_steps(self, group: MPI.Intracomm, replica: EmulatedReplica) -> tuple[list[_Step], Watched]:
        """The steps of a visit, and how well this rank kept its times in those that count."""
        quiet_start(group)
        replica.begin_anew()
        steps = [self._step() for _ in range(WARM_UP_STEPS)]
        watch = Watch()
        for _ in range(COUNTED_STEPS):
            steps.append(self._step())
            watch.step(replica.lateness_s)
        return steps, watch.seen()

    def _step(self) -> _Step:
        outcome = self.trainer.step()
        return outcome.marks, outcome.sums.loss, outcome.global_samples

    def _add(
        self, seen: list[tuple[list[_Step], int]] | None, round_number: int, speed_s: float | None, *, counted: bool
    ) -> None:
        """Keep the steps and the memory of all ranks of a visit, on rank 0."""
        if seen is None:
            return
        self.memory_bytes = max(size_bytes for _, size_bytes in seen)
        gathered = [steps for steps, _ in seen]
        by_step = list(zip(*gathered, strict=True))
        self.new_losses += [sum(loss for _, loss, _ in ranks) / ranks[0][2] for ranks in by_step]
        if not counted:
            return
        times_s = step_times_s([[marks.end_s for marks, _, _ in rows] for rows in gathered])
        losses = self.new_losses[-COUNTED_STEPS:]
        for ranks, step_s, loss in zip(by_step[WARM_UP_STEPS:], times_s, losses, strict=True):
            if ranks[0][2] == self.trainer.plan.global_batch:
                self._keep(round_number, step_s, loss, [marks for marks, _, _ in ranks], speed_s)

    def _keep(
        self, round_number: int, step_s: float, loss: float, marks: list[StepMarks], speed_s: float | None
    ) -> None:
        self.step_s.append(step_s)
        self.exposed_s.append(min(map(exposed_s, marks)))  # that of the rank that was ready last
        self.round.append(round_number)
        if speed_s is not None:
            self.reference_s.append(speed_s)
        self.losses.append(loss)
        self._keep_typical(step_s, marks)

    def _keep_typical(self, step_s: float, marks: list[StepMarks]) -> None:
        """Keep the marks of the step nearest to the median so far, which the report draws."""
        middle = float(np.median(self.step_s))
        if self.typical is None or abs(step_s - middle) < abs(self.typical[0] - middle):
            self.typical = (step_s, marks)

    def measured(self) -> MeasuredPoint:
        """The samples so far, on rank 0."""
        emulated = Network.parse(self.setting.network).emulated
        record = None
        if self.typical:
            names = self.trainer.runner.program.names
            record = timeline(
                [self.typical[1]],
                names,
                emulated_network=emulated,
                emulated_compute=self.setting.emulated_compute,
            ).to_record()
        return MeasuredPoint(
            setting=self.setting,
            buckets=self.buckets,
            step_s=tuple(self.step_s),
            exposed_communication_s=tuple(self.exposed_s),
            round=tuple(self.round),
            losses=tuple(self.losses),
            events_per_step=self.typical[1][0].events if self.typical else 0,
            timeline=record,
            reference_s=tuple(self.reference_s) if len(self.reference_s) == len(self.step_s) else (),
            memory_bytes=self.memory_bytes,
            emulation=self.emulation.result(),
        )

    def narrow(self, interval: float) -> bool:
        """Whether the median's 95 % interval is within +- ``interval`` of it."""
        if len(self.step_s) < LEAST_ROUNDS:
            return False
        return median_interval(self.step_s, resamples=200).relative_half_width <= interval


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Measure every point until all intervals are narrow or the budget is spent.

    Rank 0 saves after every round and returns ``Samples`` (plain values).
    """
    task = codec.decode(argument, MeasureTask, "measurement")
    experiment = task.experiment
    dataset = load_dataset(experiment.dataset, experiment.seed)
    points = [_Point(comm, task, index, dataset) for index in range(len(task.settings))]
    gc.collect()
    gc.freeze()
    one_device = [point for point in points if point.setting.plan.devices == 1]
    visits = points + one_device * (_ONE_DEVICE_VISITS - 1)
    samples: Samples | None = None
    narrow, event_s, reported_s = 0, seconds_per_event(), 0.0
    measuring = rounds(
        StopRule(least_rounds=LEAST_ROUNDS, most_s=experiment.budget_s),
        suffice=lambda: narrow == len(points),
        warm_up=_WARM_UP_ROUNDS,  # caches, buffers made when first used, the first access to every page
        seed=experiment.seed,
        first=task.before.next_round,
        spent_s=task.before.spent_s,
        comm=comm,
        report=report,
    )
    for current in measuring:
        for point in current.order(visits):
            quiet_barrier(comm)
            point.visit(current.number, counted=current.counted)
        if comm.rank or not current.counted:
            continue
        check_losses(points)
        samples = msgspec.structs.replace(
            task.before,
            points=tuple(point.measured() for point in points),
            spent_s=current.spent_s(),
            recording_s_per_event=event_s,
        )
        codec.write(Path(task.save_to), samples)
        for point in points:
            point.emulation.check(point.setting, point.step_s)
        narrow = sum(point.narrow(experiment.interval) for point in points)
        if now() - reported_s > _REPORT_S:
            reported_s = now()
            report(
                f"round {current.number + 1}: {narrow} of {len(points)} settings have intervals within "
                f"{experiment.interval:.0%}; {samples.spent_s:.0f} s used, budget {experiment.budget_s:.0f} s"
            )
    for point in points:
        if point.group is not None:
            point.trainer.close()
    return codec.to_builtins(samples) if samples is not None else None


def check_losses(points: list[_Point]) -> None:
    """Raise ``DpsimError`` unless settings that should train the same train to the same losses, to rounding.

    Their times must not be compared otherwise. Across device counts the local statistics of batch norm differ.
    """
    first: dict[tuple[Any, ...], list[float]] = {}
    for point in points:
        reference = first.setdefault(point.setting.training, point.new_losses)
        steps = min(len(reference), len(point.new_losses), 20)
        ours, theirs = np.array(point.new_losses[:steps]), np.array(reference[:steps])
        if not np.allclose(ours, theirs, rtol=_LOSS_TOLERANCE, atol=_LOSS_TOLERANCE):
            step = int(np.argmax(np.abs(ours - theirs)))
            raise DpsimError(
                f"{point.setting.describe()}: loss {ours[step]:.5f} in step {step + 1}, where {theirs[step]:.5f} was "
                "expected",
                allowed="the same training in every setting, to rounding",
                remedy="its times would mean nothing; this is a defect, please report it",
            )
