"""The comparison: every system is checked and finds its best setting, then all take turns."""

from __future__ import annotations

import contextlib
import functools
import importlib.util
import itertools
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError
from dpsim.experiments.peers.result import SystemResult, Tried, loss_error, require_agreement
from dpsim.experiments.peers.setting import (
    OWN,
    Change,
    PeerComparison,
    Setting,
    Work,
    changed,
    choices,
    first_setting,
    shown,
)
from dpsim.launch import jobs, rank_info, resident_job
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress
from dpsim.study.loop import StopRule, in_turns
from dpsim.study.statistics import median_ratio
from dpsim.study.steps import WARM_UP_STEPS, step_times_s

_SEARCH_VISIT_S, _TIMED_VISIT_S = 0.3, 0.6
_LEAST_STEPS = 2
_LEAST_ROUNDS, _TIMED_S, _NARROW = 10, 100.0, 0.02
"""The timed rounds, and when they end: all ratios known to 2 % (half the interval's width), or 100 s spent."""
_SEARCH = StopRule(least_rounds=3, most_rounds=3)


def measure(comparison: PeerComparison, progress: Progress) -> list[SystemResult]:
    """Run the comparison. Raises ``ConfigError`` without PyTorch, ``DpsimError`` where a peer trains differently."""
    if set(comparison.systems) != {OWN} and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"PyTorch is not installed in {sys.executable}, and it is what dpsim is compared with",
            allowed="any recent version; a build for CPUs is enough",
            remedy="pip install torch, or compare nothing: --systems dpsim",
        )
    if rank_info.job() is not None:
        raise ConfigError(
            "the peers were started inside an MPI job", allowed="an ordinary process: every system starts its own ranks"
        )
    with _Trainings(comparison) as trainings:
        best = [
            _best_setting(functools.partial(trainings.build, system, work), system, work, comparison.seed, progress)
            for work in comparison.works()
            for system in comparison.systems_for(work)
        ]
        return timed(comparison, best, progress)


@dataclass(frozen=True, kw_only=True)
class Training:
    """A training that ranks of a job hold, its (gradient, loss) error against dpsim's first one, and its step times."""

    job: resident_job.Job
    number: int
    errors: tuple[float, float]
    most_steps: int
    step_s: dict[bool, float] = field(default_factory=lambda: {True: math.inf, False: math.inf})

    def visit(self, seconds: float, *, communicate: bool = True) -> float:
        """Return the median step of a visit of about ``seconds``, in seconds. The first visit has the fewest steps."""
        steps = WARM_UP_STEPS + counted_steps(self.step_s[communicate], seconds, self.most_steps)
        replies = self.job.ask({"do": "visit", "training": self.number, "steps": steps, "communicate": communicate})
        if not all(np.isfinite(loss) for reply in replies for loss in reply["loss_sums"]):
            raise DpsimError(
                f"the loss of {self.job.name} is not finite", remedy="please report it: the training diverged"
            )
        self.step_s[communicate] = statistics.median(step_times_s([reply["end_s"] for reply in replies]))
        return self.step_s[communicate]

    def drop(self) -> None:
        """Free the training."""
        self.job.ask({"do": "drop", "training": self.number})


class _Trainings(contextlib.ExitStack):
    """The running jobs, by what is decided when their ranks start, in which trainings are built."""

    def __init__(self, comparison: PeerComparison) -> None:
        super().__init__()
        self._most_steps = comparison.steps
        self._folder = self.enter_context(scratch("peers"))
        self._jobs: dict[object, resident_job.Job] = {}
        self._numbers = itertools.count()
        self._reference_losses: dict[int, list[float]] = {}

    def build(self, system: str, work: Work, setting: Setting) -> Training:
        """Build a training, and check it against dpsim's first one. Raises ``DpsimError``."""
        values, number = dict(setting), next(self._numbers)
        job = self._job(system, work, values.get("thread_level"), pin=values.get("pin", True))
        replies = job.ask(
            {
                "do": "build",
                "training": number,
                "setting": values,
                "save": work.devices not in self._reference_losses,
                "reference": str(self._folder / f"reference-{work.devices}.npz"),
            }
        )
        losses = [sum(step) / work.global_batch for step in zip(*(r["loss_sums"] for r in replies), strict=True)]
        reference = self._reference_losses.setdefault(work.devices, losses)
        errors: dict[str, float] = replies[0]["gradient_errors"]
        error = loss_error(losses, reference)
        require_agreement(f"{system} on {work.devices} ranks ({shown(setting)})", work.kind, errors, error)
        return Training(job=job, number=number, errors=(max(errors.values()), error), most_steps=self._most_steps)

    def _job(self, system: str, work: Work, thread_level: str | None, *, pin: bool) -> resident_job.Job:
        key = (system, work.devices, thread_level, pin)
        if key not in self._jobs:
            folder = self._folder / f"job-{len(self._jobs)}"
            folder.mkdir()
            environment = {} if thread_level is None else {"MPI4PY_RC_THREAD_LEVEL": thread_level}
            self._jobs[key] = start_job(system, work, folder, environment, pin=pin)
            self.callback(self._jobs[key].close)
        return self._jobs[key]


def start_job(system: str, work: Work, folder: Path, environment: Mapping[str, str], *, pin: bool) -> resident_job.Job:
    """Start ranks of ``system`` that do ``work``, each listening on its own socket. ``folder`` must be a new one."""
    task = "dpsim.experiments.peers.ranks:serve_on_ranks"

    def run(address: str) -> None:
        argument = {"system": system, "work": codec.to_builtins(work), "socket": address, "folder": str(folder)}
        jobs.on_ranks(task, argument, devices=work.devices, env=environment, pin=pin)

    return resident_job.Job(system, work.devices, folder, run)


def counted_steps(step_s: float, seconds: float, most: int) -> int:
    """Return as many steps of ``step_s`` as ``seconds`` hold, but two or more, and never more than ``most``."""
    return min(most, max(_LEAST_STEPS, round(seconds / step_s)))


def _best_setting(
    build: Callable[[Setting], Training], system: str, work: Work, seed: int, progress: Progress
) -> tuple[SystemResult, Training]:
    """Check a system, and find the best of its settings, whose training stays built."""
    progress(f"{system} on {work.devices} {'rank' if work.devices == 1 else 'ranks'}: checking, searching its best")
    built: dict[Setting, Training] = {}
    searches = itertools.count()

    def training(setting: Setting) -> Training:
        if setting not in built:
            built[setting] = build(setting)
        return built[setting]

    def measure_in_turn(settings: list[Setting]) -> list[float]:
        """Return the least step time of each setting: what disturbs one of a few visits only adds time."""
        visits = {setting: functools.partial(training(setting).visit, _SEARCH_VISIT_S) for setting in settings}
        times_s = in_turns(visits, _SEARCH, warm_up=0, seed=seed + next(searches))
        return [min(times_s[setting]) for setting in settings]

    best, tried = search(first_setting(system), choices(system, work), measure_in_turn, lambda s: built.pop(s).drop())
    return SystemResult(system, work.devices, best, *training(best).errors, tuple(tried)), built[best]


def search(
    first: Setting,
    dimensions: list[list[Change]],
    measure_in_turn: Callable[[list[Setting]], list[float]],
    drop: Callable[[Setting], None],
) -> tuple[Setting, list[Tried]]:
    """Return the best setting, by one choice after another: in each, the best so far against each change of it.

    ``measure_in_turn`` returns the step times of some settings; ``drop`` is called with those that lost.
    """
    best, tried = first, list[Tried]()
    for number, changes in enumerate(dimensions):
        candidates = list(dict.fromkeys([best, *(changed(best, change) for change in changes)]))
        times_s = measure_in_turn(candidates)
        tried += zip(candidates, times_s, itertools.repeat(number))
        best = candidates[times_s.index(min(times_s))]
        for setting in candidates:
            if setting != best:
                drop(setting)
    return best, tried


def timed(
    comparison: PeerComparison, best: Sequence[tuple[SystemResult, Training]], progress: Progress
) -> list[SystemResult]:
    """Return the results with the steps of all rounds; the first round only warms up. One rank never communicates."""
    visits = {
        (index, communicate): functools.partial(training.visit, _TIMED_VISIT_S, communicate=communicate)
        for index, (result, training) in enumerate(best)
        for communicate in ((True, False) if result.devices > 1 else (True,))
    }
    own = {result.devices: index for index, (result, _) in enumerate(best) if result.system == OWN}

    def narrow(step_s: Mapping[tuple[int, bool], Sequence[float]]) -> bool:
        """Return whether every peer's ratio to dpsim on as many ranks is known well enough."""
        return all(
            median_ratio(step_s[index, True], step_s[own[result.devices], True]).relative_half_width <= _NARROW
            for index, (result, _) in enumerate(best)
            if result.system != OWN
        )

    least = min(_LEAST_ROUNDS, comparison.rounds)
    stop = StopRule(least_rounds=least, most_rounds=comparison.rounds, most_s=_TIMED_S, whole_rounds=True)
    step_s = in_turns(visits, stop, suffice=narrow, seed=comparison.seed, report=progress)
    return [
        result._replace(step_s=tuple(step_s[index, True]), alone_step_s=tuple(step_s.get((index, False), ())))
        for index, (result, _) in enumerate(best)
    ]
