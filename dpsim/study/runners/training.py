"""The runner of training: a setting on the ranks that take part, real or with ranks that wait instead of computing."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.group import first_ranks, quiet_start
from dpsim.comm.shaped import enter
from dpsim.data import Dataset
from dpsim.errors import DpsimError
from dpsim.launch.rank_process import pin
from dpsim.lowering import lower
from dpsim.machine import Machine, Network
from dpsim.model import scheduled
from dpsim.records.sweep import MeasuredPoint
from dpsim.replica import Replica
from dpsim.runtime.emulated import EmulatedReplica, WorkloadReplica
from dpsim.runtime.recorder import StepMarks, exposed_s, timeline
from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer
from dpsim.setting import Setting
from dpsim.study import models
from dpsim.study.disturbance import Judge, Seen, Watcher
from dpsim.study.emulation import Watch, Watched, machine_cores
from dpsim.study.setting_samples import SettingSamples
from dpsim.study.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s, train
from dpsim.torch.script.probe.in_turns.visit import Turns, Visit
from dpsim.workload import Workload

_LOSS_TOLERANCE = 0.02
_UNREAD_BATCHES = 64

_Step = tuple[StepMarks, float, int]
"""The marks of a step on one rank, the sum of its losses, and the samples of the global batch."""


class TrainedSetting:
    """One setting on the ranks that take part: each trains its own replica, and rank 0 keeps the samples."""

    def __init__(
        self,
        comm: MPI.Intracomm,
        setting: Setting,
        workload: Workload,
        machine: Machine,
        dataset: Dataset,
        seed: int,
        earlier: MeasuredPoint | None,
        watcher: Watcher,
    ) -> None:
        self.setting, self._comm, plan = setting, comm, setting.plan
        self._watcher, self._network = watcher, Network.parse(setting.network)
        self.group = first_ranks(comm, plan.devices)
        crowded = watcher.crowded(
            waits=setting.emulated_compute, communication_thread=plan.overlap == "thread" and plan.devices > 1
        )
        self.samples = SettingSamples(setting, earlier, Judge(crowded=crowded))
        self.typical: tuple[float, list[StepMarks]] | None = None
        """The step nearest to the median so far, which the report draws."""
        self.new_losses: list[float] = []
        self.memory_bytes = 0
        if self.group is None:
            return
        replica: Replica = models.load(setting.model, dataset.input_shape, dataset.classes).replica()
        self.emulated: EmulatedReplica | None = None
        if setting.emulated_compute:
            replica = self.emulated = EmulatedReplica(replica, workload, seed=seed, rank=self.group.rank)
        schedule = scheduled(workload, machine, plan)
        self.buckets = schedule.buckets if plan.devices > 1 else 0
        self.trainer = Trainer(
            replica,
            dataset,
            plan,
            self.group,
            self._network,
            seed=seed,
            schedule=schedule,
            selection=machine.selected(plan.devices),
        )

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``. The first two steps and those with a short batch do not count."""
        enter(self._comm, self._network)
        if self.group is None:
            return True
        if self.emulated is not None:
            gathered = self._waited_steps(self.group, self.emulated, counted=counted)
        else:
            steps = [_kept(outcome) for outcome in train(self.trainer, self._watcher)]
            seen = self._watcher.seen()
            trained = self.group.gather((steps, seen, self.trainer.memory_bytes))
            self.memory_bytes = max(size_bytes for *_, size_bytes in trained) if trained else 0
            gathered = [(of_rank, seen) for of_rank, seen, _ in trained] if trained else None
        if gathered is not None:
            self._add([of_rank for of_rank, _ in gathered], [seen for _, seen in gathered], number, counted=counted)
        return True

    def _waited_steps(
        self, group: MPI.Intracomm, replica: EmulatedReplica, *, counted: bool
    ) -> list[tuple[list[_Step], Seen]] | None:
        """Return the steps of all ranks on rank 0 and what they saw, made again where something else delayed them."""
        attempt, again = 0, True
        while again:
            self._watcher.begin()
            outcomes, kept_times = watched_steps(group, self.trainer, replica)
            gathered = group.gather(([_kept(outcome) for outcome in outcomes], self._watcher.seen(), kept_times))
            if gathered is not None:
                watched = [of_rank for *_, of_rank in gathered]
                again = counted and self.samples.emulation.repeats(watched, machine_cores(), attempt)
            attempt, again = attempt + 1, group.bcast(again)
        if gathered is None:
            return None
        if counted:
            self.samples.emulation.visited(watched, machine_cores())
        return [(of_rank, seen) for of_rank, seen, _ in gathered]

    def _add(self, gathered: list[list[_Step]], seen: list[Seen], round_number: int, *, counted: bool) -> None:
        by_step = list(zip(*gathered, strict=True))
        self.new_losses += [sum(loss for _, loss, _ in ranks) / ranks[0][2] for ranks in by_step]
        if not counted:
            return
        times_s = step_times_s([[marks.end_s for marks, _, _ in rows] for rows in gathered])
        losses = self.new_losses[-COUNTED_STEPS:]
        samples_s: dict[int, float] = {}
        for number, (step_s, loss) in enumerate(zip(times_s, losses, strict=True), WARM_UP_STEPS):
            ranks = by_step[number]
            if ranks[0][2] != self.trainer.plan.global_batch:
                continue
            samples_s[number] = step_s
            marks = [of_rank for of_rank, _, _ in ranks]
            last_s = min(map(exposed_s, marks))  # of the rank that was ready last
            kept = {"step_s": step_s, "exposed_communication_s": last_s, "round": round_number, "losses": loss}
            self.samples.add(kept)
            middle = float(np.median(self.samples.clean_step_s()))
            if self.typical is None or abs(step_s - middle) < abs(self.typical[0] - middle):
                self.typical = (step_s, marks)
        self.samples.mark(seen, samples_s)

    def point(self) -> MeasuredPoint:
        """See ``Visitor``."""
        record = None
        if self.typical:
            names = self.trainer.runner.program.names
            record = timeline(
                [self.typical[1]],
                names,
                emulated_network=self._network.emulated,
                emulated_compute=self.setting.emulated_compute,
            ).to_record()
        return self.samples.point(
            buckets=self.buckets,
            events_per_step=self.typical[1][0].events if self.typical else 0,
            timeline=record,
            memory_bytes=self.memory_bytes,
        )

    def close(self) -> None:
        """Give back what the trainer holds. Collective over the setting's ranks."""
        if self.group is not None:
            self.trainer.close()


def watched_steps(
    group: MPI.Intracomm, trainer: Trainer, replica: EmulatedReplica
) -> tuple[list[StepOutcome], Watched]:
    """Return the steps of a visit by ranks that wait, and how well this rank kept its times in those that count."""
    quiet_start(group)
    replica.begin_anew()
    steps = [trainer.step() for _ in range(WARM_UP_STEPS)]
    watch = Watch()
    for _ in range(COUNTED_STEPS):
        steps.append(trainer.step())
        watch.step(replica.lateness_s)
    return steps, watch.seen()


def wait_in_turns(
    group: MPI.Intracomm, setting: Setting, workload: Workload, seed: int, folder: str, number: int
) -> None:
    """Take the turns of the ``number``-th setting of a script, as a rank of ``group`` that waits for profiled times.

    It is a rank of dpsim's own runtime, which takes turns with DDP's ranks. It trains on samples that nobody looks at.
    """
    pin(group)
    plan, network, schedule = setting.plan, Network.parse(setting.network), lower(workload, setting.plan)
    replica = EmulatedReplica(WorkloadReplica(workload), workload, seed=seed, rank=group.rank)
    samples = _UNREAD_BATCHES * plan.global_batch
    x, labels = np.zeros((samples, 1), np.float32), np.zeros(samples, np.int64)
    dataset = Dataset(name="none", train_x=x, train_y=labels, test_x=x[:1], test_y=labels[:1], classes=1)
    trainer = Trainer(replica, dataset, plan, group, network, seed=seed, schedule=schedule)
    sizes = tuple(int(size) for size in schedule.bucket_size_bytes)
    turns, visit = Turns(folder, number, group.rank), Visit(bucket_bytes=sizes)
    while turns.take(visit).steps:
        outcomes, watched = watched_steps(group, trainer, replica)
        marks = [outcome.marks for outcome in outcomes]
        visit = Visit(
            moments_s=[marks[0].begin_s, *(each.end_s for each in marks)],
            waited_s=[exposed_s(each) for each in marks],
            logged_s={},
            bucket_bytes=sizes,
            watched=watched,
        )
    turns.close()
    trainer.close()


def _kept(outcome: StepOutcome) -> _Step:
    return outcome.marks, outcome.sums.loss, outcome.global_samples


def check_losses(points: Sequence[TrainedSetting]) -> None:
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
