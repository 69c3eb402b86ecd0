"""The contest: every system is checked, finds its best setting, and then all take turns in random order."""

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
from dpsim.launch import rank_info
from dpsim.launch.scratch import scratch
from dpsim.progress import Progress

WARM_STEPS = 2
_SEARCH_VISITS = 4
_JOB_FIELDS = ("pin", "thread_level")


class Contest(Noun, frozen=True):
    """Which systems train what. ``torch`` competes on one rank, with dpsim on one rank; the others on ``devices``."""

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
            raise ConfigError("a device count or a system twice", allowed="different ones")
        self.works()

    def works(self) -> list[Work]:
        """The work at each device count, one rank first where it is wanted. Raises ``ConfigError``."""
        counts = {*self.devices, 1} if ONE_RANK in self.systems else {*self.devices}
        return [Work(model=self.model, devices=n, local_batch=self.local_batch, seed=self.seed) for n in sorted(counts)]

    def competitors(self, work: Work) -> list[str]:
        """The systems that do this work, dpsim first."""
        alone = work.devices == 1
        return [OWN, *(name for name in self.systems if name != OWN and (name == ONE_RANK) == alone)]


class Tried(Noun, frozen=True):
    """A setting and the least median step of its visits, made in turn with those of the same ``choice``."""

    setting: Setting
    step_s: float
    choice: int


class Standing(Noun, frozen=True):
    """One system on one device count: its best setting, and a median step a round with and without communication.

    ``gradient_error`` and ``loss_error`` are its differences from dpsim's first setting.
    """

    system: str
    devices: int
    setting: Setting
    gradient_error: float
    loss_error: float
    tried: tuple[Tried, ...]
    step_s: tuple[float, ...] = ()
    alone_step_s: tuple[float, ...] = ()


def require_torch(systems: tuple[str, ...]) -> None:
    """Raises ``ConfigError`` where a peer is wanted and PyTorch is not there."""
    if set(systems) != {OWN} and importlib.util.find_spec("torch") is None:
        raise ConfigError(
            f"PyTorch is not installed in {sys.executable}, and it is what dpsim is compared with",
            allowed="any recent version; a build for CPUs is enough",
            remedy="pip install torch, or compare nothing: --systems dpsim",
        )


def hold(contest: Contest, tell: Progress) -> list[Standing]:
    """Run the contest. Raises ``ConfigError`` without PyTorch, ``DpsimError`` where a peer trains otherwise."""
    require_torch(contest.systems)
    if rank_info.job() is not None:
        raise ConfigError(
            "the peers were started inside an MPI job", allowed="an ordinary process: every system starts its own ranks"
        )
    with _Field(contest) as field:
        standings = []
        for work in contest.works():
            for system in contest.competitors(work):
                standings.append(_prepared(field, contest, system, work, tell))
        return _rounds(field, contest, standings, tell)


class _Field(contextlib.ExitStack):
    """The running jobs, and the contenders that stand ready in them."""

    def __init__(self, contest: Contest) -> None:
        super().__init__()
        self._contest = contest
        self._folder = self.enter_context(scratch("peers"))
        self._jobs: dict[Any, Job] = {}
        self._numbers = itertools.count()
        self._ready: dict[tuple[str, int, Setting], tuple[Job, int]] = {}
        self._references: dict[int, list[float]] = {}

    def build(self, system: str, work: Work, setting: Setting) -> tuple[float, float]:
        """Have a contender built and checked; the largest (gradient, loss) error against dpsim's first setting."""
        job, number = self._job(system, work, setting), next(self._numbers)
        save = work.devices not in self._references
        command = {
            "do": "build",
            "contender": number,
            "setting": codec.to_builtins(setting),
            "save": save,
            "reference": str(self._folder / f"reference-{work.devices}.npz"),
        }
        replies = job.ask(command)
        losses = [sum(step) / work.global_batch for step in zip(*(r["loss_sums"] for r in replies), strict=True)]
        reference = self._references.setdefault(work.devices, losses)
        errors: dict[str, float] = replies[0]["gradient_errors"]
        error = loss_error(losses, reference)
        require_agreement(f"{system} on {work.devices} ranks ({shown(setting)})", work.kind, errors, error)
        self._ready[system, work.devices, setting] = (job, number)
        return float(max(errors.values())), error

    def visit(self, system: str, devices: int, setting: Setting, *, communicate: bool) -> float:
        """The median step of a visit: from the slowest rank's end of the step before to the slowest one's end."""
        job, number = self._ready[system, devices, setting]
        steps = WARM_STEPS + self._contest.steps
        replies = job.ask({"do": "visit", "contender": number, "steps": steps, "communicate": communicate})
        if not all(np.isfinite(loss) for reply in replies for loss in reply["loss_sums"]):
            raise DpsimError(f"the loss of {system} is not finite", remedy="please report it: the training diverged")
        return visit_step_s([reply["moments_s"] for reply in replies], WARM_STEPS)

    def drop(self, system: str, devices: int, setting: Setting) -> None:
        job, number = self._ready.pop((system, devices, setting))
        job.ask({"do": "drop", "contender": number})

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


def visit_step_s(moments_s: list[list[float]], warm: int) -> float:
    """The median over steps after the first ``warm`` of max_r end(k) - max_r end(k - 1), r being the ranks.

    ``moments_s[r]`` holds rank r's begin of the first step, and the end of each.
    """
    slowest = [max(column) for column in zip(*moments_s, strict=True)]
    return float(statistics.median(b - a for a, b in itertools.pairwise(slowest[warm:])))


def _prepared(field: _Field, contest: Contest, system: str, work: Work, tell: Progress) -> Standing:
    """A system checked, with the best of its settings, which stays ready."""
    tell(f"{system} on {work.devices} {'rank' if work.devices == 1 else 'ranks'}: checking, looking for its best")
    errors: dict[Setting, tuple[float, float]] = {}
    random = np.random.default_rng([contest.seed % 2**64, work.devices, SYSTEMS.index(system)])

    def measure(settings: list[Setting]) -> list[float]:
        for setting in settings:
            if setting not in errors:
                errors[setting] = field.build(system, work, setting)
        samples: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for _ in range(_SEARCH_VISITS):
            for index in random.permutation(len(settings)):
                setting = settings[index]
                samples[setting].append(field.visit(system, work.devices, setting, communicate=True))
        return [min(samples[setting]) for setting in settings]  # a few visits: what disturbs them only adds time

    def drop(setting: Setting) -> None:
        field.drop(system, work.devices, setting)

    best, tried = search(first_setting(system), choices(system, work), measure, drop)
    if best not in errors:
        errors[best] = field.build(system, work, best)
    gradient_error, loss = errors[best]
    return Standing(
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
    measure: Callable[[list[Setting]], list[float]],
    drop: Callable[[Setting], None],
) -> tuple[Setting, list[Tried]]:
    """The best setting by one choice after another: at each, the best so far against what each change makes of it.

    ``measure`` gives the step times of some settings, measured in turn; ``drop`` is told of those that lost.
    """
    best, tried = first, []
    for number, changes in enumerate(dimensions):
        candidates = list(dict.fromkeys([best, *(msgspec.structs.replace(best, **change) for change in changes)]))
        times = measure(candidates)
        tried += [Tried(setting=s, step_s=t, choice=number) for s, t in zip(candidates, times, strict=True)]
        best = candidates[times.index(min(times))]
        for setting in candidates:
            if setting != best:
                drop(setting)
    return best, tried


def _rounds(field: _Field, contest: Contest, standings: list[Standing], tell: Progress) -> list[Standing]:
    visits = list(_visits(standings))
    samples: dict[tuple[int, bool], list[float]] = {visit: [] for visit in visits}
    random = np.random.default_rng(contest.seed % 2**64)
    for number in range(-1, contest.rounds):  # the first round warms up
        for position in random.permutation(len(visits)):
            index, communicate = visits[position]
            one = standings[index]
            step_s = field.visit(one.system, one.devices, one.setting, communicate=communicate)
            if number >= 0:
                samples[index, communicate].append(step_s)
        if number >= 0:
            tell(f"round {number + 1} of {contest.rounds}")
    return [
        msgspec.structs.replace(
            one, step_s=tuple(samples[index, True]), alone_step_s=tuple(samples.get((index, False), ()))
        )
        for index, one in enumerate(standings)
    ]


def _visits(standings: list[Standing]) -> Iterator[tuple[int, bool]]:
    """(standing, with communication) of every visit of a round; one rank has no communication to leave out."""
    for index, one in enumerate(standings):
        yield index, True
        if one.devices > 1:
            yield index, False
