"""The comparison: every system is checked and finds its best setting, then all take turns."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import math
import statistics
import sys
from collections.abc import Iterator
from typing import Any

import msgspec
import numpy as np

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, DpsimError, unknown
from dpsim.experiments.peers.agreement import loss_error, require_agreement
from dpsim.experiments.peers.job import Job
from dpsim.experiments.peers.search import TriedSetting, least_times_s, search
from dpsim.experiments.peers.setting import ONE_RANK, OWN, SYSTEMS, Setting, Work, choices, first_setting, shown
from dpsim.harness.measurement.loop import StopRule, rounds
from dpsim.harness.measurement.statistics import median_ratio
from dpsim.harness.measurement.steps import WARM_UP_STEPS, step_times_s
from dpsim.launch import rank_info
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress

_SEARCH_VISIT_S, _TIMED_VISIT_S = 0.3, 0.6
_LEAST_STEPS = 2
_LEAST_ROUNDS, _TIMED_S, _NARROW = 10, 100.0, 0.02
"""The timed rounds, and when they end: all ratios known to 2 % (half the interval's width), or 100 s spent."""
_JOB_FIELDS = ("pin", "thread_level")
"""Fields of a setting that are decided when its ranks start."""


class PeerComparison(Noun, frozen=True):
    """Which systems train what, and how often they are timed at most: in ``rounds``, and ``steps`` of each visit.

    ``torch`` is compared with dpsim on one rank, the other systems on each of ``devices`` ranks.
    """

    model: str = "mlp"
    devices: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = SYSTEMS
    rounds: int = 30
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
        self._most_steps = comparison.steps
        self._step_s: dict[Any, float] = {}
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

    def visit(self, system: str, devices: int, setting: Setting, *, communicate: bool, seconds: float) -> float:
        """The median step of a visit of about ``seconds``, in seconds. The first visit has the fewest steps."""
        job, number = self._built[system, devices, setting]
        key = (system, devices, setting, communicate)
        steps = WARM_UP_STEPS + counted_steps(self._step_s.get(key, math.inf), seconds, self._most_steps)
        replies = job.ask({"do": "visit", "training": number, "steps": steps, "communicate": communicate})
        if not all(np.isfinite(loss) for reply in replies for loss in reply["loss_sums"]):
            raise DpsimError(f"the loss of {system} is not finite", remedy="please report it: the training diverged")
        self._step_s[key] = statistics.median(step_times_s([reply["end_s"] for reply in replies]))
        return self._step_s[key]

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


def counted_steps(step_s: float, seconds: float, most: int) -> int:
    """As many steps of ``step_s`` as ``seconds`` hold, but two or more, and never more than ``most``."""
    return min(most, max(_LEAST_STEPS, round(seconds / step_s)))


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
        return least_times_s(settings, visit, seed=comparison.seed, turn=next(searches))

    def visit(setting: Setting) -> float:
        return trainings.visit(system, work.devices, setting, communicate=True, seconds=_SEARCH_VISIT_S)

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


def _timed(
    trainings: _Trainings, comparison: PeerComparison, results: list[SystemResult], progress: Progress
) -> list[SystemResult]:
    """The results with the steps of all rounds; the first round only warms up."""
    visits = list(_visits(results))
    samples: dict[tuple[int, bool], list[float]] = {visit: [] for visit in visits}
    stop = StopRule(
        least_rounds=min(_LEAST_ROUNDS, comparison.rounds),
        most_rounds=comparison.rounds,
        most_s=_TIMED_S,
        whole_rounds=True,
    )
    steps_s = [samples[index, True] for index in range(len(results))]
    for current in rounds(stop, suffice=lambda: _narrow(results, steps_s), warm_up=1, seed=comparison.seed):
        for index, communicate in current.order(visits):
            best = results[index]
            step_s = trainings.visit(
                best.system, best.devices, best.setting, communicate=communicate, seconds=_TIMED_VISIT_S
            )
            if current.counted:
                samples[index, communicate].append(step_s)
        if current.counted:
            progress(f"round {current.number + 1}: {current.spent_s():.0f} of at most {_TIMED_S:.0f} s")
    return [
        msgspec.structs.replace(
            result, step_s=tuple(samples[index, True]), alone_step_s=tuple(samples.get((index, False), ()))
        )
        for index, result in enumerate(results)
    ]


def _narrow(results: list[SystemResult], steps_s: list[list[float]]) -> bool:
    """Whether every peer's ratio to dpsim on as many ranks is known well enough."""
    own_s = {result.devices: step_s for result, step_s in zip(results, steps_s, strict=True) if result.system == OWN}
    return all(
        median_ratio(step_s, own_s[result.devices]).relative_half_width <= _NARROW
        for result, step_s in zip(results, steps_s, strict=True)
        if result.system != OWN
    )


def _visits(results: list[SystemResult]) -> Iterator[tuple[int, bool]]:
    """(index of the result, with communication) of every visit of a round. One rank never communicates."""
    for index, result in enumerate(results):
        yield index, True
        if result.devices > 1:
            yield index, False
