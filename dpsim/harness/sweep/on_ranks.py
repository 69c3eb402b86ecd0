"""Measures the points of a sweep: real training, all configurations interleaved in one run, every round saved."""

from __future__ import annotations

import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec, models
from dpsim.comm.clock import now
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.errors import DpsimError
from dpsim.harness.measurement.reference import reference_s
from dpsim.harness.measurement.statistics import median_interval
from dpsim.harness.profile.on_ranks import COUNTED_STEPS, WARM_STEPS
from dpsim.harness.sweep.samples import MeasureTask, Samples
from dpsim.machine import Network
from dpsim.predict import scheduled
from dpsim.records.sweep import MeasuredPoint
from dpsim.runtime.recorder import StepMarks, exposed_s, seconds_per_event, timeline
from dpsim.runtime.trainer import Trainer
from dpsim.units import format_size

Progress = Callable[[str], None]
_TELL_S = 5.0
_LEAST_ROUNDS = 6
_WARM_ROUNDS = 2
_VISITS_ALONE = 3
"""Visits a round to a setting of one device, of which there is one, where several settings share a device count."""
_LOSS_TOLERANCE = 0.02


class _Point:
    """One configuration on the ranks that take part: trains its own replica, keeps its samples on rank 0."""

    def __init__(self, comm: MPI.Intracomm, task: MeasureTask, index: int, dataset: Dataset) -> None:
        self.key, plan = task.keys[index], task.plans[index]
        self.group = first_ranks(comm, plan.devices)
        before = next((p for p in task.already if p.key == self.key), None)
        self.step_s = list(before.step_s) if before else []
        self.exposed_s = list(before.exposed_communication_s) if before else []
        self.round = list(before.round) if before else []
        self.losses = list(before.losses) if before else []
        self.reference_s = list(before.reference_s) if before else []
        self.typical: tuple[float, list[StepMarks]] | None = None
        self.new_losses: list[float] = []
        if self.group is None:
            return
        experiment = task.experiment
        replica = models.load(experiment.model, dataset.input_shape, dataset.classes).replica()
        schedule = scheduled(task.workload, task.machines[self.key.network], plan)
        network = Network.parse(self.key.network)
        self.buckets = schedule.buckets if plan.devices > 1 else 0
        self.trainer = Trainer(
            replica,
            dataset,
            plan,
            self.group,
            network,
            seed=experiment.seed,
            schedule=schedule,
            selection=task.machines[self.key.network].selected(plan.devices),
        )

    def visit(self, round_number: int, *, counted: bool) -> None:
        """A few steps, the first two not counted; a step lasts from the slowest rank's end to the next one's."""
        if self.group is None:
            return
        before_s = reference_s(self.group)
        steps: list[tuple[StepMarks, float, int]] = []
        for _ in range(WARM_STEPS + COUNTED_STEPS):
            outcome = self.trainer.step()
            steps.append((outcome.marks, outcome.sums.loss, outcome.global_samples))
        speed_s = statistics.mean((before_s, reference_s(self.group)))
        gathered = self.group.gather(steps)
        if gathered is None:
            return
        full = self.trainer.plan.global_batch
        for number in range(len(steps)):
            ranks = [rows[number] for rows in gathered]
            self.new_losses.append(sum(loss for _, loss, _ in ranks) / ranks[0][2])
            if not counted or number < WARM_STEPS or ranks[0][2] != full:
                continue  # the first steps after a change of configuration, or a short last batch
            end_s = max(marks.end_s for marks, _, _ in ranks)
            step_s = end_s - max(rows[number - 1][0].end_s for rows in gathered)
            self.step_s.append(step_s)
            self.exposed_s.append(min(exposed_s(marks) for marks, _, _ in ranks))  # of the rank that was ready last
            self.round.append(round_number)
            self.reference_s.append(speed_s)
            self.losses.append(self.new_losses[-1])
            self._keep_typical(step_s, [marks for marks, _, _ in ranks])

    def _keep_typical(self, step_s: float, marks: list[StepMarks]) -> None:
        """Keep the marks of the step nearest to the median so far: what the report draws."""
        middle = float(np.median(self.step_s))
        if self.typical is None or abs(step_s - middle) < abs(self.typical[0] - middle):
            self.typical = (step_s, marks)

    def measured(self) -> MeasuredPoint:
        """The samples so far, on rank 0."""
        emulated = Network.parse(self.key.network).emulated
        record = timeline([self.typical[1]], emulated_network=emulated).to_record() if self.typical else None
        return MeasuredPoint(
            key=self.key,
            buckets=self.buckets,
            step_s=tuple(self.step_s),
            exposed_communication_s=tuple(self.exposed_s),
            round=tuple(self.round),
            losses=tuple(self.losses),
            events_per_step=self.typical[1][0].events if self.typical else 0,
            timeline=record,
            reference_s=tuple(self.reference_s) if len(self.reference_s) == len(self.step_s) else (),
        )

    def narrow(self, interval: float) -> bool:
        """Whether the median's 95 % interval is within +- ``interval`` of it."""
        if len(self.step_s) < _LEAST_ROUNDS:
            return False
        found = median_interval(self.step_s, resamples=200)
        return (found.high - found.low) / 2 <= interval * found.median


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """Rounds over all points in random order until every interval is narrow or the time is spent.

    Rank 0 saves after every round and returns ``Samples`` (plain values).
    """
    task = codec.decode(argument, MeasureTask, "measurement")
    dataset = load_dataset(task.experiment.dataset, task.experiment.seed)
    points = [_Point(comm, task, index, dataset) for index in range(len(task.keys))]
    gc.collect()
    gc.freeze()
    start_s = now()
    number = comm.bcast(1 + max((r for point in points for r in point.round), default=-1))
    random = np.random.default_rng([task.experiment.seed % 2**64, number])
    for point in points * _WARM_ROUNDS:  # caches, lazy buffers, the first look at every page
        quiet_barrier(comm)
        point.visit(number, counted=False)
    event_s = seconds_per_event()
    alone = [index for index, point in enumerate(points) if point.key.devices == 1]
    visits = [*range(len(points)), *alone * (_VISITS_ALONE - 1)]
    done, told_s = False, 0.0
    while not done:
        for index in random.permutation(visits):
            quiet_barrier(comm)
            points[index].visit(number, counted=True)
        number += 1
        spent_s = task.spent_s + now() - start_s
        samples = None
        if comm.rank == 0:
            check_losses(points)
            measured = tuple(point.measured() for point in points)
            samples = Samples(
                points=measured,
                spent_s=spent_s,
                measured_from=task.measured_from,
                experiment=task.experiment,
                predictions_sha256=task.predictions_sha256,
                recording_s_per_event=event_s,
            )
            codec.write(Path(task.save_to), samples)
            narrow = sum(point.narrow(task.experiment.interval) for point in points)
            within = f"{narrow} of {len(points)} settings have intervals within {task.experiment.interval:.0%}"
            if now() - told_s > _TELL_S:
                told_s = now()
                report(f"round {number}: {within}; {spent_s:.0f} s used, budget {task.experiment.budget_s:.0f} s")
            done = number >= _LEAST_ROUNDS and (narrow == len(points) or spent_s > task.experiment.budget_s)
        done = comm.bcast(done)
    for point in points:
        if point.group is not None:
            point.trainer.close()
    return codec.to_builtins(samples) if samples is not None else None


def check_losses(points: list[_Point]) -> None:
    """Correctness gates timing: at one device count every configuration must train to the same losses, to rounding.

    (Across device counts batch norm's local statistics differ.) Raises ``DpsimError``.
    """
    first: dict[int, list[float]] = {}
    for point in points:
        reference = first.setdefault(point.key.devices, point.new_losses)
        steps = min(len(reference), len(point.new_losses), 20)
        ours, theirs = np.array(point.new_losses[:steps]), np.array(reference[:steps])
        if not np.allclose(ours, theirs, rtol=_LOSS_TOLERANCE, atol=_LOSS_TOLERANCE):
            step = int(np.argmax(np.abs(ours - theirs)))
            raise DpsimError(
                f"threshold {format_size(point.key.fusion_threshold_bytes)} on {point.key.devices} devices, network "
                f"{point.key.network}, overlap {point.key.overlap}: loss {ours[step]:.5f} in step {step + 1}, where "
                f"{theirs[step]:.5f} was expected",
                allowed="the same training on every configuration, to rounding",
                remedy="its times would mean nothing; this is a defect, please report it",
            )
