"""Which strategy, with which settings, is predicted to be the fastest of those that fit in memory."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np

from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import Machine
from dpsim.plan import Plan
from dpsim.predict.compare import known_mechanisms
from dpsim.predict.interval import OWN_MODEL_ERROR, Interval, equally_fast, predict_with_interval, ratio_interval
from dpsim.predict.memory import Memory, memory
from dpsim.predict.points import Told, plan_one
from dpsim.predict.prices import FREE_NETWORK
from dpsim.predict.step import Prediction, price, scheduled
from dpsim.predict.uncertainty import Uncertainty
from dpsim.strategy import STRATEGIES, Strategy
from dpsim.workload import Workload

THRESHOLD_SHARES = (64, 16, 4)
"""Parts of the gradients that fusion thresholds are: beside these the rule's own threshold and one bucket a step."""
MICRO_BATCHES_A_STAGE = 4
"""The most micro-batches of a pipeline over its stages: its bubble is then a fifth of the step or less."""
SMALLER_MICRO_BATCHES = (1, 2, 4)
"""How often the samples of a device are divided where a strategy without stages does not fit otherwise."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan, its predicted step and what it needs of each device's memory."""

    plan: Plan
    step_s: float
    memory: Memory

    @property
    def rank(self) -> tuple[bool, float]:
        """What candidates are sorted by: those that may fit by their time, then the others by the memory they need."""
        misfit = self.memory.fits is False
        return misfit, self.memory.total if misfit else self.step_s


class Refusal(NamedTuple):
    """Settings of one strategy that cannot be used, all for one reason."""

    strategies: tuple[str, ...]
    error: ConfigError


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The best candidate of one strategy, with its interval."""

    candidate: Candidate
    prediction: Prediction
    interval: Interval

    @property
    def predicted(self) -> tuple[Prediction, Interval]:
        return self.prediction, self.interval


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is advised for one workload, machine, number of devices and global batch.

    ``choices``: the best candidate of each strategy, in the order of ``Candidate.rank``. ``candidates``: all that were
    priced, in the same order. ``plain``: the best one of plain data parallelism. ``told`` is what the workload's script
    told DDP.
    """

    machine: Machine
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    plain: Choice
    told: Told

    @property
    def fastest(self) -> Choice | None:
        """The fastest choice that may fit; ``None`` where nothing fits."""
        first = self.choices[0]
        return None if first.candidate.memory.fits is False else first

    @property
    def equally_fast(self) -> tuple[Choice, ...]:
        """The other choices that may fit whose step cannot be told apart from the fastest one's (``interval``)."""
        fastest = self.fastest
        if fastest is None:
            return ()
        others = (each for each in self.choices[1:] if each.candidate.memory.fits is not False)
        return tuple(each for each in others if equally_fast(each.predicted, fastest.predicted))

    @property
    def over_plain(self) -> tuple[float, float, float] | None:
        """(times as fast as plain data parallelism, the ends of its interval); ``None`` where nothing fits."""
        if self.fastest is None:
            return None
        ratio = self.plain.prediction.step_s / self.fastest.prediction.step_s if self.fastest.prediction.step_s else 1.0
        return ratio, *ratio_interval(self.plain.predicted, self.fastest.predicted)

    @property
    def undecided(self) -> str | None:
        """What is the most uncertain about the difference of the fastest from the one that comes nearest.

        A field of ``Uncertainty``, or ``model``: the model's own error. ``None`` where no other is equally fast.
        """
        if self.fastest is None or not self.equally_fast:
            return None
        nearer = np.abs(self.fastest.interval.shifts - self.equally_fast[0].interval.shifts).max(axis=0)
        if nearer.max() <= math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR):
            return "model"
        return Uncertainty._fields[int(nearer.argmax())]


def advise(
    workload: Workload, machine: Machine, devices: int | str, *, every: bool = False, **settings: Any
) -> Advice:
    """Return all strategies with their settings, ranked by their predicted step at one global batch.

    ``settings`` are those of ``dpsim.predict.predict_points`` with one value each; what is ranked is not among them:
    strategy, micro-batches, threshold and overlap. Without a global batch each device has the largest local batch of
    the workload. Each strategy has the settings of its ``Strategy.candidates``. A pipeline has 1, 2, 4 and so on
    micro-batches, up to ``MICRO_BATCHES_A_STAGE`` a stage; any other strategy the plan's own number, and twice and four
    times as many where nothing fits otherwise. Thresholds are the rule's own, ``THRESHOLD_SHARES`` of the gradients
    and one bucket a step; overlaps are ``compare.known_mechanisms``.

    Without ``every``, candidates are left out that cannot become the best of their strategy: those whose step on a
    network that takes no time is as long as the step of another one that may fit. The choices are the same.

    Raises ``ConfigError`` where plain data parallelism cannot be priced.
    """
    base, told = plan_one(workload, machine, devices, (), **settings)
    price(scheduled(workload, machine, base), machine)
    search = _Search(workload, machine, base, every=every)
    for kind in STRATEGIES.values():
        search.of(kind)
    bests = [min(of_kind, key=lambda each: each.rank) for of_kind in search.priced.values() if of_kind]
    choices = [Choice(candidate=each, **search.predicted(each.plan)) for each in bests]
    return Advice(
        machine=machine,
        choices=tuple(sorted(choices, key=lambda choice: choice.candidate.rank)),
        candidates=tuple(sorted((each for kind in search.priced.values() for each in kind), key=lambda c: c.rank)),
        refusals=search.refusals,
        plain=choices[0],
        told=told,
    )


class _Group(NamedTuple):
    """Plans that differ in threshold and overlap alone, and the step of each on a network that takes no time."""

    plan: Plan
    bound_s: float


class _Search:
    """The candidates of each strategy that were priced, and the settings that were refused."""

    def __init__(self, workload: Workload, machine: Machine, base: Plan, *, every: bool) -> None:
        self._workload, self._machine, self._base, self._every = workload, machine, base, every
        self.priced: dict[str, list[Candidate]] = {}
        self._refused: list[tuple[str, str, ConfigError]] = []

    def of(self, kind: type[Strategy]) -> None:
        """Price what may become the best candidate of a strategy."""
        priced = self.priced[kind.name] = []
        strategies = kind.candidates(self._base.devices, len(self._workload.layers))
        for division in SMALLER_MICRO_BATCHES:
            groups = [group for each in strategies for group in self._groups(each, division)]
            for group in sorted(groups, key=lambda group: group.bound_s):
                best = min((each.rank for each in priced), default=(True, 0.0))
                if self._every or best[0] or group.bound_s < best[1]:
                    priced += self._candidates(group.plan)
            if any(each.memory.fits is not False for each in priced):
                break

    def predicted(self, plan: Plan) -> dict[str, Any]:
        """Return the prediction of a plan and its interval, by their names in ``Choice``."""
        return dict(zip(("prediction", "interval"), predict_with_interval(self._workload, self._machine, plan)))

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The strategies of which no plan was possible, each reason once."""
        usable = {each.plan.strategy for kind in self.priced.values() for each in kind}
        reasons: dict[tuple[str, str], dict[str, ConfigError]] = {}
        for name, strategy, error in self._refused:
            if strategy not in usable:
                reason = name, error.given.replace(strategy, name) + error.allowed
                reasons.setdefault(reason, {}).setdefault(strategy, error)
        return tuple(Refusal(tuple(errors), next(iter(errors.values()))) for errors in reasons.values())

    def _groups(self, strategy: Strategy, division: int) -> Iterator[_Group]:
        """Yield the numbers of micro-batches of a strategy; what cannot be used is noted as refused."""
        for accumulate in self._micro_batches(strategy, division):
            changes = {"strategy": strategy.text, "accumulate": accumulate, "overlap": "off"}
            try:
                plan: Plan = msgspec.structs.replace(self._base, **changes)
                schedule = scheduled(self._workload, self._machine, plan)
                bound_s = 0.0 if schedule.dynamic else price(schedule, self._machine, FREE_NETWORK).step_s
            except ConfigError as error:
                self._refused.append((strategy.name, strategy.text, error))
            else:
                yield _Group(plan, bound_s)

    def _micro_batches(self, strategy: Strategy, division: int) -> Sequence[int]:
        base, stages = self._base, strategy.stage_count
        samples = base.global_batch * stages // base.devices
        if stages == 1:
            numbers = [base.accumulate * division]
        else:
            most = MICRO_BATCHES_A_STAGE * stages if division == 1 else 0
            numbers = [1 << power for power in range(most.bit_length())]
        return [number for number in numbers if number <= samples or number == 1]

    def _candidates(self, plan: Plan) -> Iterator[Candidate]:
        """Yield the plan with each threshold and overlap."""
        mechanisms = known_mechanisms(self._machine, [plan]) if plan.data_devices > 1 else ["off"]
        for threshold in self._thresholds if plan.data_devices > 1 else [plan.fusion_threshold_bytes]:
            bucketed: Plan = msgspec.structs.replace(plan, fusion_threshold_bytes=threshold)
            schedule, needed = scheduled(self._workload, self._machine, bucketed), None
            for overlap in mechanisms:
                try:
                    overlapped: Plan = msgspec.structs.replace(bucketed, overlap=overlap)
                except ConfigError:  # batch norm over all devices cannot be combined with one of them
                    continue
                needed = needed or memory(self._workload, bucketed, self._machine)
                step_s = price(dataclasses.replace(schedule, plan=overlapped), self._machine).step_s
                yield Candidate(plan=overlapped, step_s=step_s, memory=needed)

    @functools.cached_property
    def _thresholds(self) -> list[float | None]:
        own = self._base.fusion_threshold_bytes
        if FUSION_RULES.find(self._base.fusion_rule).default_threshold_bytes is None:
            return [own]
        gradients = max(self._workload.gradient_bytes, 1)
        parts = [float(2 ** round(math.log2(max(gradients / share, 1)))) for share in THRESHOLD_SHARES]
        return [*dict.fromkeys((own, *parts, math.inf))]
