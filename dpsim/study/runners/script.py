"""The runner of scripts: PyTorch's DDP trains a user's script, whose processes wait until it is their turn.

Each setting has ranks of its own, and so has each case of the profile, which communicates with none, and the
calibration. One process trains nothing: it gives the turns, in rounds and in random order, and keeps the samples and
the rows. Waiting processes sleep in a read from a socket, so that those of one visit have the cores to themselves.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from msgspec.structs import replace

from dpsim import codec
from dpsim.comm.clock import now
from dpsim.constraints import HOOK
from dpsim.dates import stamp
from dpsim.errors import ConfigError
from dpsim.network import Network
from dpsim.progress import Progress
from dpsim.records.sweep import MeasuredPoint
from dpsim.setting import Setting
from dpsim.study.calibration import TIME_S
from dpsim.study.emulation import Watched, machine_cores
from dpsim.study.inputs import Inputs
from dpsim.study.loop import LEAST_ROUNDS, rounds, until_known
from dpsim.study.measure import WARM_UP_ROUNDS, Visited, measure
from dpsim.study.profile import (
    AT_S,
    BACKWARD_S,
    FORWARD_S,
    INPUT_S,
    LAYERS_S,
    LOSS_S,
    OVERHEAD_S,
    STEP_S,
    UPDATE_S,
    ProfileConfig,
    computed_s,
    narrow,
    profiled_slowdowns,
)
from dpsim.study.rows import ProfiledBatch, Rows
from dpsim.study.runners.script_processes import Job, Processes, check_trains, shape, started
from dpsim.study.runners.timed_collectives import CollectiveTimes, tables_of
from dpsim.study.setting_samples import SettingSamples
from dpsim.study.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s
from dpsim.study.task import Samples, ScriptTask
from dpsim.torch.script.probe.in_turns.visit import Turn, Visit
from dpsim.torch.script.recorded import Recorded, check_same, layers_s, workload_of
from dpsim.torch.script.request import ScriptRequest
from dpsim.torch.script.script_record import ScriptRecord, recorded_of
from dpsim.workload import Workload

_PROFILE_VISITS = 2
"""Visits a round to each batch of a profile: every prediction rests on these layer times."""
_LEAST_VISITS = 3
_CALIBRATION_PARTS = 2
"""Rounds in which a calibration comes through all sizes."""
_LONGEST_PAUSE_S = 150e-3
HOOK_SETTLES = 32
"""Steps of a visit before any counts in which ``dpsim.torch.allreduce_hook()`` finds its fastest way."""


def take_turns(task: ScriptTask, job: Job, report: Progress) -> Inputs | Samples:
    """Do what a task asks for; return the ``Samples``, or the ``Inputs`` of the first rounds. Raises ``DpsimError``."""
    processes = started(task.parts, job, report)
    shape(Network.parse(task.network), job, processes[-1])
    visits = ScriptVisits(task, processes, report)
    done = visits.first_rounds() if task.before is None else visits.measured()
    for each in processes:
        each.end()
    return done


class ScriptVisits:
    """The visits of one place: its settings in turns with the profile and the calibration of the same minutes."""

    def __init__(self, task: ScriptTask, processes: Sequence[Processes], report: Progress) -> None:
        self._task, self._report, inputs = task, report, task.inputs
        self.rows = Rows(() if inputs is None else inputs.rows)
        self.settings = [
            ScriptSetting(setting, of_setting, task.before.of(setting) if task.before else None)
            for setting, of_setting in zip(task.settings, processes, strict=False)
        ]
        self.profilers: list[Profiler] = []
        self.calibrators: list[Calibrator] = []
        if inputs is not None:
            self._profile = inputs.profiles[task.place]
            others = iter(processes[len(task.settings) :])
            self.profilers = [
                Profiler(
                    self._profile,
                    inputs.bare[task.place],
                    subject,
                    next(others),
                    self.rows,
                    task.request(subject.local_batch),
                )
                for subject in self._profile.subjects(task.place)
            ]
            calibrated = next(others)
            unit_s = max(visit.taken for visit in calibrated.first)
            self.calibrators = [
                Calibrator(
                    tables_of(
                        inputs.calibrations[task.place],
                        task.collectives,
                        self.rows,
                        calibrated.time,
                        unit_s,
                        _CALIBRATION_PARTS,
                    )
                )
            ]

    @property
    def _profiled_bytes(self) -> int:
        """The bytes that are reduced at once at the end of a backward, or in units one after another."""
        inputs, place = self._task.inputs, self._task.place
        assert inputs is not None
        return max(inputs.bare[place].gradient_bytes, 1024)

    @property
    def beside(self) -> list[Visited]:
        """What is visited in every round beside the settings."""
        return [*self.profilers * _PROFILE_VISITS, *self.calibrators]

    def first_rounds(self) -> Inputs:
        """Profile and calibrate before anything is measured; what was found, and how long ranks are to wait in a step.

        That is what an allreduce of all gradients takes by the first visits to the calibration; with FSDP what an
        all-gather of all parameters takes, in parts. Raises ``ConfigError``.
        """
        begin_s = now()
        for number in range(_CALIBRATION_PARTS):
            for calibrator in self.calibrators:
                calibrator.visit(number, counted=True)
        assert self._task.inputs is not None
        calibration, pause_s = self._task.inputs.calibrations[self._task.place], dict[int, float]()
        for subject in self._task.collectives:
            if not subject.overlap:
                largest = self.rows.parts(subject, TIME_S)[-1]
                seconds = float(np.median(self.rows.values(subject, TIME_S, largest)))
                whole = seconds * self._profiled_bytes / largest
                ranks = calibration.ranks_of(subject.collective)
                pause_s[ranks] = min(whole, _LONGEST_PAUSE_S)
        for profiler in self.profilers:
            profiler.pause_s = pause_s
        stop = until_known(self._task.first_s, least_rounds=_LEAST_VISITS)
        known = lambda: narrow(profiled_slowdowns(self._profile, self.rows, self._task.place))  # noqa: E731
        measuring = rounds(
            stop, suffice=known, seed=self._task.experiment.seed, spent_s=now() - begin_s, report=self._report
        )
        for current in measuring:
            for each in current.order(self.beside):
                each.visit(current.number, counted=True)
        for profiler in self.profilers:
            profiler.check()
        self.rows.measuring_begins()
        return self._inputs(pause_s=tuple(pause_s.items()))

    def _inputs(self, **decided: Any) -> Inputs:
        """What was profiled and calibrated so far, at all places, with what was decided for the profile of this one."""
        inputs, place = self._task.inputs, self._task.place
        assert inputs is not None
        profiles = (*inputs.profiles[:place], replace(inputs.profiles[place], **decided), *inputs.profiles[place + 1 :])
        return replace(inputs, profiles=profiles, rows=self.rows.series(), measured_until=stamp())

    def measured(self) -> Samples:
        """Visit everything in every round, until all intervals are narrow or the budget is spent; the ``Samples``."""
        task, experiment = self._task, self._task.experiment
        assert task.before is not None
        samples = measure(
            self.settings,
            task.before,
            Path(task.save_to),
            self._report,
            budget_s=experiment.budget_s,
            limit_s=task.limit_s,
            interval=experiment.interval,
            seed=experiment.seed,
            beside=self.beside,
            inputs=lambda: None if task.inputs is None else self._inputs(),
        )
        return samples or task.before


class Calibrator:
    """Visits the collectives that DDP or FSDP starts, which ranks of their own do."""

    def __init__(self, tables: Sequence[CollectiveTimes]) -> None:
        self._tables, self._visits = tables, itertools.count()

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visited``."""
        visit = next(self._visits)
        for table in self._tables:
            table.visit(visit)
        return True


class Profiler:
    """Visits one local batch of a script's profile, in one process or in several at once.

    Several wait in each step for ``pause_s``, by their number: a core that has waited computes more slowly. Where the
    times of the layers are given, only how long a step computes is kept.
    """

    def __init__(
        self,
        config: ProfileConfig,
        bare: Workload,
        subject: ProfiledBatch,
        processes: Processes,
        rows: Rows,
        request: ScriptRequest,
    ) -> None:
        self._subject, self._processes, self._rows, self._request = subject, processes, rows, request
        self._bare, self._given, self._accumulates = bare, config.times_given, bool(config.accumulated)
        self.pause_s = dict(config.pause_s)
        self._visits = rows.next_visit(subject)

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visited``. A script that has come to its end is not visited any more, and its rows stay."""
        subject = self._subject
        if self._processes.ended:
            return True
        visits = self._processes.turn(Turn(COUNTED_STEPS, self.pause_s.get(subject.devices, 0.0)))
        profiled = [self._workload(visit.profiled) for visit in visits if visit.profiled is not None]
        if self._processes.ended or any(each.local_batches != (subject.local_batch,) for each in profiled):
            return True  # the end of the script, or the last batches of an epoch
        self._rows.add(subject, STEP_S, self._visits, [max(map(computed_s, profiled))])
        self._rows.add(subject, AT_S, self._visits, [now()])
        if subject.devices == 1 and self._accumulates and (record := visits[0].profiled) is not None:
            self._rows.add(subject, LAYERS_S, self._visits, [layers_s(self._recorded(record))])
        if (subject.devices, subject.accumulate) == (1, 1) and not self._given:
            self._keep_parts(subject, profiled[0])
        self._visits += 1
        return True

    def _workload(self, record: dict[str, Any]) -> Workload:
        return workload_of(self._recorded(record))

    def _recorded(self, record: dict[str, Any]) -> Recorded:
        return recorded_of(codec.convert(record, ScriptRecord), self._request)

    def _keep_parts(self, subject: ProfiledBatch, profiled: Workload) -> None:
        check_same(self._bare, profiled, subject.local_batch)
        add = functools.partial(self._rows.add, subject, visit=self._visits)
        for number, layer in enumerate(profiled.layers):
            add(FORWARD_S, values=layer.forward_s, part=number)
            add(BACKWARD_S, values=layer.backward_s, part=number)
        add(UPDATE_S, values=[profiled.update_s])
        add(OVERHEAD_S, values=[profiled.overhead_s])
        add(LOSS_S, values=profiled.loss_s)
        add(INPUT_S, values=[profiled.input_s_per_sample])

    def check(self) -> None:
        """Raise ``ConfigError`` where the script was profiled too few times before it came to its end."""
        if self._visits < _LEAST_VISITS:
            raise ConfigError(
                f"the script was profiled {self._visits} times, in turns of {WARM_UP_STEPS + COUNTED_STEPS} training "
                f"steps of {self._subject.local_batch} samples each, before it ended or changed its batch",
                allowed=f"{_LEAST_VISITS} times or more: dpsim ends the script itself",
                remedy="let it train longer on batches of one size, or predict without measuring: dpsim profile, then "
                "dpsim predict",
            )


class ScriptSetting:
    """A setting whose ranks take turns, and what was measured of it so far.

    Of when buckets were ready before an interruption only the medians are known.
    """

    def __init__(self, setting: Setting, processes: Processes, earlier: MeasuredPoint | None) -> None:
        self.setting, self._processes = setting, processes
        self.samples = SettingSamples(setting, earlier)
        self.bucket_bytes: tuple[int, ...] = earlier.bucket_bytes if earlier else ()
        self.ready_s: list[list[float]] = []
        if earlier and earlier.bucket_ready_s:
            self.ready_s = [list(earlier.bucket_ready_s)] * (len(earlier.step_s) * setting.plan.devices)

    def visit(self, number: int, *, counted: bool) -> bool:
        """See ``Visitor``. Raises ``ConfigError`` where the script ends too early."""
        settles = self.setting.runtime == HOOK and not counted
        for attempt in itertools.count():
            visits = self._processes.turn(Turn(HOOK_SETTLES if settles else WARM_UP_STEPS + COUNTED_STEPS))
            if self._processes.ended:
                check_trains(number < LEAST_ROUNDS, number + WARM_UP_ROUNDS)
                return False
            if not counted or not self.samples.emulation.repeats(_watched(visits), machine_cores(), attempt):
                break
        if counted:
            self._add(visits, number)
        return True

    def _add(self, visits: list[Visit], number: int) -> None:
        if watched := _watched(visits):
            self.samples.emulation.visited(watched, machine_cores())
        times_s = step_times_s([visit.moments_s[1:] for visit in visits])
        if self.bucket_bytes not in ((), visits[0].bucket_bytes):
            raise ConfigError(
                f"{self.setting.describe()}: DDP has buckets of {visits[0].bucket_bytes} bytes, and had buckets of "
                f"{self.bucket_bytes} bytes before",
                allowed="the same buckets throughout a measurement",
                remedy="measure into a new folder with --output, and change nothing in between",
            )
        self.bucket_bytes = visits[0].bucket_bytes
        for step, step_s in self._of_the_batch(visits, list(enumerate(times_s, WARM_UP_STEPS))):
            self.ready_s += [visit.ready_s[step] for visit in visits if visit.ready_s]
            last = min(visits, key=lambda visit: _exposed_s(visit, step))  # the rank that was ready last
            exposed_s = _exposed_s(last, step) if self.setting.plan.devices > 1 else 0.0
            values = {"step_s": step_s, "exposed_communication_s": exposed_s, "round": number}
            self.samples.add(values, {name: logged[step] for name, logged in last.logged_s.items()})

    def _of_the_batch(self, visits: list[Visit], steps: list[tuple[int, float]]) -> list[tuple[int, float]]:
        """The steps on as many samples as the setting has: the last batch of an epoch may be shorter."""
        wanted = self.setting.plan.local_batch
        kept = [
            (step, step_s)
            for step, step_s in steps
            if all(not visit.local_batches or visit.local_batches[step] == wanted for visit in visits)
        ]
        if not kept and not self.samples.step_s:
            raise ConfigError(
                f"{self.setting.describe()}: the script trains on {visits[0].local_batches[-1]} samples at once, "
                f"and was profiled with {wanted}",
                allowed="a script whose steps have the same number of samples, but for the last ones of an epoch",
                remedy="let it train on batches of one size",
            )
        return kept

    def point(self) -> MeasuredPoint:
        """See ``Visitor``."""
        return self.samples.point(
            buckets=len(self.bucket_bytes) if self.setting.plan.devices > 1 else 0,
            bucket_bytes=self.bucket_bytes,
            bucket_ready_s=tuple(np.median(self.ready_s, axis=0).tolist()) if self.ready_s else (),
        )


def _watched(visits: list[Visit]) -> list[Watched]:
    """What ranks that wait instead of computing saw; empty for those that compute."""
    return [visit.watched for visit in visits if visit.watched is not None]


def _exposed_s(visit: Visit, step: int) -> float:
    """What computation waited inside a hook or in dpsim's own runtime, or else communication after the last gradient.

    The latter is by DDP's own times, in which DDP also copies the buckets back to the gradients.
    """
    logged = visit.logged_s
    if visit.waited_s[step] > 0 or not logged:
        return visit.waited_s[step]
    return max(logged["communication"][step] - logged["overlap"][step], 0.0)
