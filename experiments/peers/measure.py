"""The comparison: every system is checked and finds its best setting, then all take turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import statistics
import sys
from collections.abc import Callable, Iterator
from typing import Any

import msgspec
import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.experiments.peers.agreement import loss_error, require_agreement
from dpsim.experiments.peers.job import Job
from dpsim.experiments.peers.setting import ONE_RANK, OWN, SYSTEMS, Change, Setting, Work, choices, first_setting, shown
from dpsim.harness.measurement.loop import StopRule, rounds
from dpsim.harness.measurement.steps import WARM_UP_STEPS, step_times_s
from dpsim.launch import rank_info
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress

_SEARCH_ROUNDS = 4
_JOB_FIELDS = ("pin", "thread_level")
"""Fields of a setting that are decided when its ranks start."""


class PeerComparison(Noun, frozen=True):
    """Which systems train what, and how often they are timed.

    ``torch`` is compared with dpsim on one rank, the other systems on each of ``devices`` ranks.
    """

    model: str = "mlp"
    devices: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = SYSTEMS
    rounds: int = 12
    steps: int = 6
    local_batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for system in self.systems:
            if system not in SYSTEMS:
                raise unknown("system", system, SYSTEMS)
        if OWN not in self.systems:
            raise ConfigError(f"systems {list(self.systems)}", allowed="dpsim and others: all are compared with it")
        for name, value in (("rounds", self.rounds), ("steps", self.steps)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", allowed="1 or more")
        if len(set(self.devices)) != len(self.devices) or len(set(self.systems)) != len(self.systems):
            raise ConfigError("a device count or a system is named twice", allowed="different ones")
        self.works()

    def works(self) -> list[Work]:
        """The work at each device count, and on one rank where ``torch`` takes part. Raises ``ConfigError``."""
        counts = {*self.devices, 1} if ONE_RANK in self.systems else {*self.devices}
        return [Work(model=self.model, devices=n, local_batch=self.local_batch, seed=self.seed) for n in sorted(counts)]

    def systems_for(self, work: Work) -> list[str]:
        """The systems that do this work, dpsim first."""
        alone = work.devices == 1
        return [OWN, *(name for name in self.systems if name != OWN and (name == ONE_RANK) == alone)]


class TriedSetting(Noun, frozen=True):
    """A setting, and the least median step of its visits, made in turn with those of the same ``choice``."""

    setting: Setting
    step_s: float
    choice: int


class SystemResult(Noun, frozen=True):
    """One system on one device count: its best setting, and a median step a round with and without communication.

    ``gradient_error`` and ``loss_error`` are its differences from dpsim's first setting.
    """

    system: str
    devices: int
    setting: Setting
    gradient_error: float
    loss_error: float
    tried: tuple[TriedSetting, ...]
    step_s: tuple[float, ...] = ()
    alone_step_s: tuple[float, ...] = ()


def require_torch(systems: tuple[str, ...]) -> None:
    """Raise ``ConfigError`` where a peer takes part and PyTorch is not installed."""
    if set(systems) != {OWN} and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"PyTorch is not installed in {sys.executable}, and it is what dpsim is compared with",
            allowed="any recent version; a build for CPUs is enough",
            remedy="pip install torch, or compare nothing: --systems dpsim",
        )


def measure(comparison: PeerComparison, progress: Progress) -> list[SystemResult]:
    """Run the comparison. Raises ``ConfigError`` without PyTorch, ``DpsimError`` where a peer trains differently."""
    require_torch(comparison.systems)
    if rank_info.job() is not None:
        raise ConfigError(
            "the peers were started inside an MPI job", allowed="an ordinary process: every system starts its own ranks"
        )
    with _Trainings(comparison) as trainings:
        results = []
        for work in comparison.works():
            for system in comparison.systems_for(work):
                results.append(_best_setting(trainings, comparison, system, work, progress))
        return _timed(trainings, comparison, results, progress)


class _Trainings(contextlib.ExitStack):
    """The running jobs, and the trainings that are built in them, by (system, devices, setting)."""

    def __init__(self, comparison: PeerComparison) -> None:
        super().__init__()
        self._steps = WARM_UP_STEPS + comparison.steps
        self._folder = self.enter_context(scratch("peers"))
        self._jobs: dict[Any, Job] = {}
        self._numbers = itertools.count()
        self._built: dict[tuple[str, int, Setting], tuple[Job, int]] = {}
        self._reference_losses: dict[int, list[float]] = {}

    def build(self, system: str, work: Work, setting: Setting) -> tuple[float, float]:
        """Build and check a training; the largest (gradient, loss) error against dpsim's first setting."""
        job, number = self._job(system, work, setting), next(self._numbers)
        replies = job.ask(
            {
                "do": "build",
                "training": number,
                "setting": codec.to_builtins(setting),
                "save": work.devices not in self._reference_losses,
                "reference": str(self._folder / f"reference-{work.devices}.npz"),
            }
        )
        losses = [sum(step) / work.global_batch for step in zip(*(r["loss_sums"] for r in replies), strict=True)]
        reference = self._reference_losses.setdefault(work.devices, losses)
        errors: dict[str, float] = replies[0]["gradient_errors"]
        error = loss_error(losses, reference)
        require_agreement(f"{system} on {work.devices} ranks ({shown(setting)})", work.kind, errors, error)
        self._built[system, work.devices, setting] = (job, number)
        return float(max(errors.values())), error

    def visit(self, system: str, devices: int, setting: Setting, *, communicate: bool) -> float:
        """The median step of a visit, in seconds."""
        job, number = self._built[system, devices, setting]
        replies = job.ask({"do": "visit", "training": number, "steps": self._steps, "communicate": communicate})
        if not all(np.isfinite(loss) for reply in replies for loss in reply["loss_sums"]):
            raise DpsimError(f"the loss of {system} is not finite", remedy="please report it: the training diverged")
        return statistics.median(step_times_s([reply["end_s"] for reply in replies]))

    def drop(self, system: str, devices: int, setting: Setting) -> None:
        """Free a training."""
        job, number = self._built.pop((system, devices, setting))
        job.ask({"do": "drop", "training": number})

    def _job(self, system: str, work: Work, setting: Setting) -> Job:
        plain = codec.to_builtins(setting)
        key = (system, work.devices, *(plain.get(name) for name in _JOB_FIELDS))
        if key not in self._jobs:
            folder = self._folder / f"job-{len(self._jobs)}"
            folder.mkdir()
            job = Job(system, work, folder, setting.environment, pin=setting.pin)
            self.callback(job.close)
            self._jobs[key] = job
        return self._jobs[key]


def _best_setting(
    trainings: _Trainings, comparison: PeerComparison, system: str, work: Work, progress: Progress
) -> SystemResult:
    """Check a system, and find the best of its settings, which stays built."""
    progress(f"{system} on {work.devices} {'rank' if work.devices == 1 else 'ranks'}: checking, searching its best")
    errors: dict[Setting, tuple[float, float]] = {}
    searches = itertools.count()

    def measure_in_turn(settings: list[Setting]) -> list[float]:
        for setting in settings:
            if setting not in errors:
                errors[setting] = trainings.build(system, work, setting)
        samples: dict[Setting, list[float]] = {setting: [] for setting in settings}
        turn = next(searches)
        for current in rounds(StopRule(most_rounds=_SEARCH_ROUNDS), seed=comparison.seed):
            for setting in current.order(settings, turn):
                samples[setting].append(trainings.visit(system, work.devices, setting, communicate=True))
        return [min(samples[setting]) for setting in settings]  # a few visits: what disturbs them only adds time

    def drop(setting: Setting) -> None:
        trainings.drop(system, work.devices, setting)

    best, tried = search(first_setting(system), choices(system, work), measure_in_turn, drop)
    if best not in errors:
        errors[best] = trainings.build(system, work, best)
    gradient_error, loss = errors[best]
    return SystemResult(
        system=system,
        devices=work.devices,
        setting=best,
        gradient_error=gradient_error,
        loss_error=loss,
        tried=tuple(tried),
    )


def search(
    first: Setting,
    dimensions: list[list[Change]],
    measure_in_turn: Callable[[list[Setting]], list[float]],
    drop: Callable[[Setting], None],
) -> tuple[Setting, list[TriedSetting]]:
    """The best setting, by one choice after another: in each, the best so far against each change of it.

    ``measure_in_turn`` returns the step times of some settings; ``drop`` is called with those that lost.
    """
    best, tried = first, []
    for number, changes in enumerate(dimensions):
        candidates = list(dict.fromkeys([best, *(msgspec.structs.replace(best, **change) for change in changes)]))
        times_s = measure_in_turn(candidates)
        tried += [TriedSetting(setting=s, step_s=t, choice=number) for s, t in zip(candidates, times_s, strict=True)]
        best = candidates[times_s.index(min(times_s))]
        for setting in candidates:
            if setting != best:
                drop(setting)
    return best, tried


def _timed(
    trainings: _Trainings, comparison: PeerComparison, results: list[SystemResult], progress: Progress
) -> list[SystemResult]:
    """The results with the steps of all rounds; the first round only warms up."""
    visits = list(_visits(results))
    samples: dict[tuple[int, bool], list[float]] = {visit: [] for visit in visits}
    for current in rounds(StopRule(most_rounds=comparison.rounds), warm_up=1, seed=comparison.seed):
        for index, communicate in current.order(visits):
            best = results[index]
            step_s = trainings.visit(best.system, best.devices, best.setting, communicate=communicate)
            if current.counted:
                samples[index, communicate].append(step_s)
        if current.counted:
            progress(f"round {current.number + 1} of {comparison.rounds}")
    return [
        msgspec.structs.replace(
            result, step_s=tuple(samples[index, True]), alone_step_s=tuple(samples.get((index, False), ()))
        )
        for index, result in enumerate(results)
    ]


def _visits(results: list[SystemResult]) -> Iterator[tuple[int, bool]]:
    """(index of the result, with communication) of every visit of a round. One rank never communicates."""
    for index, result in enumerate(results):
        yield index, True
        if result.devices > 1:
            yield index, False
