"""Which strategy, with which settings, is predicted to be the fastest of those that fit in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import Machine
from dpsim.model.compare import known_mechanisms
from dpsim.model.interval import Interval, equally_fast, predict_with_interval, ratio_interval, undecided
from dpsim.model.memory import Memory, memory
from dpsim.model.points import ScriptDefaults, plan_one
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.step import Prediction, price, scheduled
from dpsim.plan import Plan
from dpsim.setting import Grid
from dpsim.strategy import STRATEGIES, Strategy
from dpsim.workload import Workload

THRESHOLD_SHARES = (32, 8)
"""Parts of the gradients that fusion thresholds are: beside these the rule's own threshold and one bucket a step."""
MICRO_BATCHES_A_STAGE = 4
"""The most micro-batches of a pipeline over its stages: its bubble is then a fifth of the step or less."""
SMALL_GAIN = 0.02
"""Plain data parallelism is advised before a strategy that is predicted to be faster by this share or less: predictions
err by more, and it asks the least of whoever trains."""
MOST_DIVISIONS = 4
"""How many times as many micro-batches as the plan's a strategy without stages has where it does not fit otherwise."""


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
    """Strategies with their settings that cannot be used, all for one reason; the error is that of the first one."""

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

    ``choices``: the best candidate of each strategy, first the advised one, then in the order of ``Candidate.rank``.
    ``candidates``: all that were priced, in that order. ``plain``: the best one of plain data parallelism. ``told`` is
    what the workload's script told DDP.
    """

    machine: Machine
    choices: tuple[Choice, ...]
    candidates: tuple[Candidate, ...]
    refusals: tuple[Refusal, ...]
    plain: Choice
    told: ScriptDefaults

    @property
    def advised(self) -> Choice | None:
        """The fastest choice that may fit, or plain data parallelism (``SMALL_GAIN``); ``None`` where nothing fits."""
        first = self.choices[0]
        return None if first.candidate.memory.fits is False else first

    @property
    def equally_fast(self) -> tuple[Choice, ...]:
        """The other choices that may fit whose step cannot be told apart from the advised one's (``interval``)."""
        advised = self.advised
        if advised is None:
            return ()
        others = (each for each in self.choices[1:] if each.candidate.memory.fits is not False)
        return tuple(each for each in others if equally_fast(each.predicted, advised.predicted))

    @property
    def over_plain(self) -> tuple[float, float, float] | None:
        """(times as fast as plain data parallelism, the ends of its interval); ``None`` where nothing fits."""
        if self.advised is None:
            return None
        ratio = self.plain.prediction.step_s / self.advised.prediction.step_s if self.advised.prediction.step_s else 1.0
        return ratio, *ratio_interval(self.plain.predicted, self.advised.predicted)

    @property
    def undecided(self) -> str | None:
        """What is the most uncertain about the difference of the advised one from the one that comes nearest.

        See ``interval.undecided``. ``None`` where no other is equally fast.
        """
        if self.advised is None or not self.equally_fast:
            return None
        return undecided(self.advised.interval, self.equally_fast[0].interval)


def advise(workload: Workload, machine: Machine, grid: Grid, *, every: bool = False) -> Advice:
    """Return all strategies with their settings, ranked by their predicted step at one global batch.

    The grid has one setting; what is ranked is not among its fields:
    strategy, micro-batches, threshold and overlap. Without a global batch each device has the largest local batch of
    the workload. Each strategy has the settings of its ``Strategy.candidates``. A pipeline has 1, 2, 4 and so on
    micro-batches, up to ``MICRO_BATCHES_A_STAGE`` a stage; any other strategy the plan's own number, and twice and four
    times as many where nothing fits otherwise. Thresholds are the rule's own, ``THRESHOLD_SHARES`` of the gradients
    and one bucket a step; overlaps are ``compare.known_mechanisms``.

    Without ``every``, candidates are left out that cannot become the best of their strategy: those whose step on a
    network that takes no time is as long as the step of another one that may fit. The choices are the same.

    Raises ``ConfigError`` where plain data parallelism cannot be priced.
    """
    base, told = plan_one(workload, machine, grid)
    price(scheduled(workload, machine, base), machine)
    search = _Search(workload, machine, base, every=every)
    for kind in STRATEGIES.values():
        search.of(kind)
    bests = [min(of_kind, key=lambda each: each.rank) for of_kind in search.candidates.values() if of_kind]
    plain, *others = (Choice(candidate=each, **search.predicted(each.plan)) for each in bests)
    return Advice(
        machine=machine,
        choices=_in_order(plain, others),
        candidates=tuple(sorted((each for kind in search.candidates.values() for each in kind), key=lambda c: c.rank)),
        refusals=search.refusals,
        plain=plain,
        told=told,
    )


def _in_order(plain: Choice, others: Sequence[Choice]) -> tuple[Choice, ...]:
    """Return choices in the order of their rank, plain data parallelism first where others gain little."""

    fastest, *_ = ordered = sorted((plain, *others), key=lambda choice: choice.candidate.rank)
    little = plain.candidate.step_s <= (1 + SMALL_GAIN) * fastest.candidate.step_s
    if little and plain.candidate.memory.fits is not False:
        ordered.sort(key=lambda choice: choice is not plain)
    return tuple(ordered)


class _Timed(NamedTuple):
    """A plan and its step."""

    step_s: float
    plan: Plan


class _Group(NamedTuple):
    """Plans that differ in threshold and overlap alone.

    ``step_s`` is their step on a network that takes no time: none is shorter. ``priced`` has the smallest threshold,
    with which memory is least, and no overlap.
    """

    step_s: float
    priced: _Timed


class _Search:
    """The candidates of each strategy that were priced and sized, and the settings that were refused."""

    def __init__(self, workload: Workload, machine: Machine, base: Plan, *, every: bool) -> None:
        self._workload, self._machine, self._base, self._every = workload, machine, base, every
        self._thresholds = _thresholds(workload, base)
        self.candidates: dict[str, list[Candidate]] = {}
        self._refused: list[tuple[str, ConfigError]] = []
        self._usable: set[str] = set()

    def of(self, kind: type[Strategy]) -> None:
        """Find the best candidate of a strategy."""
        strategies = kind.candidates(self._base.devices, len(self._workload.layers), self._workload.column_blocks)
        groups = [group for strategy in strategies for group in self._groups(strategy)]
        self.candidates[kind.name] = [*(self._all(groups) if self._every else self._until_one_fits(groups))]

    def predicted(self, plan: Plan) -> dict[str, Any]:
        """Return the prediction of a plan and its interval, by their names in ``Choice``."""
        predicted = predict_with_interval(self._workload, self._machine, plan)
        return dict(zip(("prediction", "interval"), predicted, strict=True))

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The strategies of which no plan was possible, each reason once."""
        reasons: dict[tuple[str, str], dict[str, ConfigError]] = {}
        for strategy, error in self._refused:
            if strategy not in self._usable:
                reasons.setdefault((error.allowed, error.remedy), {}).setdefault(strategy, error)
        return tuple(Refusal(tuple(errors), next(iter(errors.values()))) for errors in reasons.values())

    def _groups(self, strategy: Strategy) -> Iterator[_Group]:
        """Yield the group of each number of micro-batches."""
        base, classes = self._base, strategy.classes
        most = (MICRO_BATCHES_A_STAGE * classes).bit_length()
        samples = base.global_batch * classes // base.devices
        for accumulate in [1 << power for power in range(most)] if strategy.stages > 1 else [base.accumulate]:
            group = self._group(strategy, accumulate) if accumulate <= max(samples, 1) else None
            if group is None:
                return  # more micro-batches would be refused too
            yield group

    def _group(self, strategy: Strategy, accumulate: int) -> _Group | None:
        """Return the plans of a strategy that differ in threshold and overlap; ``None`` where it is refused."""
        try:
            plan: Plan = msgspec.structs.replace(
                self._base, strategy=strategy.text, accumulate=accumulate, overlap="off"
            )
            plan = min(self._with_thresholds(plan), key=lambda each: each.threshold_bytes)
            schedule = scheduled(self._workload, self._machine, plan)
            priced = _Timed(price(schedule, self._machine).step_s, plan)
            free_s = 0.0 if schedule.dynamic else price(schedule, self._machine, FREE_NETWORK).step_s
        except ConfigError as error:
            self._refused.append((strategy.text, error))
            return None
        self._usable.add(strategy.text)
        return _Group(free_s, priced)

    def _smaller(self, plan: Plan) -> _Group | None:
        """Return the group that needs less memory than that of a plan, and more time."""
        recomputing, accumulate = plan.parallelism.recomputing, 2 * plan.accumulate
        if recomputing is not None:
            return self._group(recomputing, plan.accumulate)
        possible = (
            accumulate <= MOST_DIVISIONS * self._base.accumulate and accumulate * plan.data_devices <= plan.global_batch
        )
        return self._group(plan.parallelism, accumulate) if plan.parallelism.stages == 1 and possible else None

    def _until_one_fits(self, groups: Iterable[_Group]) -> Iterator[Candidate]:
        """Yield candidates from the fastest on, the last of which is the first that may fit (best-first search).

        A group of which not even the smallest threshold fits is represented by that; a smaller one follows it.
        """
        queue: list[tuple[float, int, _Group | _Timed]] = []
        numbers = itertools.count()

        def push(each: _Group | _Timed) -> None:
            heapq.heappush(queue, (each.step_s, next(numbers), each))

        for group in groups:
            push(group)
        while queue:
            _, _, first = heapq.heappop(queue)
            candidate = self._sized(first.priced if isinstance(first, _Group) else first)
            if candidate.memory.fits is False:
                yield candidate
                if isinstance(first, _Group) and (smaller := self._smaller(candidate.plan)):
                    push(smaller)
            elif isinstance(first, _Group):
                for each in self._variants(candidate.plan):
                    push(each)
            else:
                yield candidate
                return

    def _all(self, groups: Iterable[_Group]) -> Iterator[Candidate]:
        """Yield every candidate, with the smaller groups of those that do not fit."""
        for first in groups:
            group: _Group | None = first
            while group is not None:
                plan = group.priced.plan
                candidates = [self._sized(each) for each in self._variants(plan)]
                yield from candidates
                fits = any(each.memory.fits is not False for each in candidates)
                group = None if fits else self._smaller(plan)

    def _sized(self, timed: _Timed) -> Candidate:
        needed = memory(self._workload, timed.plan, self._machine)
        return Candidate(plan=timed.plan, step_s=timed.step_s, memory=needed)

    def _with_thresholds(self, plan: Plan) -> list[Plan]:
        """Return the plan with each threshold; without devices that have the same layers there is nothing to fuse."""
        thresholds = self._thresholds if plan.data_devices > 1 else self._thresholds[:1]
        return [msgspec.structs.replace(plan, fusion_threshold_bytes=threshold) for threshold in thresholds]

    def _variants(self, plan: Plan) -> Iterator[_Timed]:
        """Yield the plan with each threshold and overlap, priced."""
        mechanisms = known_mechanisms(self._machine, [plan]) if plan.data_devices > 1 else ["off"]
        for bucketed in self._with_thresholds(plan):
            plans = []
            for overlap in mechanisms:
                with contextlib.suppress(ConfigError):  # some rules that decide while running refuse inline
                    plans.append(msgspec.structs.replace(bucketed, overlap=overlap))
            yield from self._priced(plans)

    def _priced(self, plans: Sequence[Plan]) -> Iterator[_Timed]:
        """Yield plans that differ in their overlap alone with their steps: they have one schedule."""
        schedule = scheduled(self._workload, self._machine, plans[0])
        for plan in plans:
            yield _Timed(price(dataclasses.replace(schedule, plan=plan), self._machine).step_s, plan)


def _thresholds(workload: Workload, plan: Plan) -> list[float | None]:
    """Return the thresholds that are compared, the plan's own first."""
    own = plan.fusion_threshold_bytes
    if FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is None:
        return [own]
    parts = [max(workload.gradient_bytes / share, 1.0) for share in THRESHOLD_SHARES]
    return [*dict.fromkeys((own, *(2.0 ** round(math.log2(part)) for part in parts), math.inf))]
