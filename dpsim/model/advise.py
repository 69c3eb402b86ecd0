"""Which strategy, with which settings, is predicted to be the fastest of those that fit in memory."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from dpsim.errors import ConfigError
from dpsim.machine import Machine
from dpsim.model.compare import known_mechanisms
from dpsim.model.interval import undecided
from dpsim.model.points import ScriptDefaults, plan_one
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.ranking import plan_thresholds
from dpsim.model.rows import PredictedRow, Ratio
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.setting import Grid
from dpsim.strategy import STRATEGIES, Strategy
from dpsim.workload import Workload

MICRO_BATCHES_A_STAGE = 4
"""The most micro-batches of a pipeline over its stages: its bubble is then a fifth of the step or less."""
SMALL_GAIN = 0.02
"""Plain data parallelism is advised before a strategy that is predicted to be faster by this share or less: predictions
err by more, and it asks the least of whoever trains."""
MOST_DIVISIONS = 4
"""How many times as many micro-batches as the plan's a strategy without stages has where it does not fit otherwise."""


class Refusal(NamedTuple):
    """Strategies with their settings that cannot be used, all for one reason; the error is that of the first one."""

    strategies: tuple[str, ...]
    error: ConfigError


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What is advised for one workload, machine, number of devices and global batch.

    ``choices``: the best row of each strategy, first the advised one, then in the order of ``PredictedRow.rank``.
    ``candidates``: all that were priced, in that order. ``plain``: the best one of plain data parallelism. ``script``
    is what the workload's script told DDP.
    """

    machine: Machine
    choices: tuple[PredictedRow, ...]
    candidates: tuple[PredictedRow, ...]
    refusals: tuple[Refusal, ...]
    plain: PredictedRow
    script: ScriptDefaults

    @property
    def advised(self) -> PredictedRow | None:
        """The fastest choice that may fit, or plain data parallelism (``SMALL_GAIN``); ``None`` where nothing fits."""
        first = self.choices[0]
        return None if first.memory.fits is False else first

    @property
    def equally_fast(self) -> list[PredictedRow]:
        """The other choices that may fit whose step cannot be told apart from the advised one's (``interval``)."""
        fitting = [each for each in self.choices[1:] if each.memory.fits is not False]
        return self.advised.as_fast(fitting) if self.advised else []

    @property
    def over_plain(self) -> Ratio | None:
        """Times as fast as plain data parallelism; ``None`` where nothing fits."""
        return self.advised.over(self.plain) if self.advised else None

    @property
    def undecided(self) -> str | None:
        """What is the most uncertain about the difference of the advised one from the one that comes nearest.

        See ``interval.undecided``. ``None`` where no other is equally fast.
        """
        if self.advised is None or not self.equally_fast:
            return None
        return undecided(self.advised.predicted[1], self.equally_fast[0].predicted[1])


def advise(workload: Workload, machine: Machine, grid: Grid, *, every: bool = False) -> Advice:
    """Return all strategies with their settings, ranked by their predicted step at one global batch.

    The grid has one setting; what is ranked is not among its fields: strategy, micro-batches, threshold and overlap.
    Without a global batch each device has the largest local batch of
    the workload. Each strategy has the settings of its ``Strategy.candidates``. A pipeline has 1, 2, 4 and so on
    micro-batches, up to ``MICRO_BATCHES_A_STAGE`` a stage; any other strategy the plan's own number, and twice and four
    times as many where nothing fits otherwise. Thresholds are those that ``plan_thresholds`` finds for plain data
    parallelism; overlaps are ``compare.known_mechanisms``.

    Without ``every``, candidates are left out that cannot become the best of their strategy: those whose step on a
    network that takes no time is as long as the step of another one that may fit. The choices are the same.

    Raises ``ConfigError`` where plain data parallelism cannot be priced.
    """
    base, script = plan_one(workload, machine, grid)
    price(scheduled(workload, machine, base), machine)
    search = _Search(workload, machine, base, every=every)
    for kind in STRATEGIES.values():
        search.of(kind)
    plain, *others = (min(rows, key=lambda row: row.rank) for rows in search.candidates.values() if rows)
    return Advice(
        machine=machine,
        choices=_in_order(plain, others),
        candidates=tuple(sorted(itertools.chain(*search.candidates.values()), key=lambda row: row.rank)),
        refusals=search.refusals,
        plain=plain,
        script=script,
    )


def _in_order(plain: PredictedRow, others: Sequence[PredictedRow]) -> tuple[PredictedRow, ...]:
    """Return choices in the order of their rank, plain data parallelism first where others gain little."""
    fastest, *_ = ordered = sorted((plain, *others), key=lambda row: row.rank)
    if plain.step_s <= (1 + SMALL_GAIN) * fastest.step_s and plain.memory.fits is not False:
        ordered.sort(key=lambda row: row is not plain)
    return tuple(ordered)


class _Group(NamedTuple):
    """Plans that differ in threshold and overlap alone.

    ``step_s`` is their step on a network that takes no time: none is shorter. ``first`` has the smallest threshold,
    with which memory is least, and no overlap.
    """

    step_s: float
    first: PredictedRow


class _Search:
    """The candidates of each strategy that were priced and sized, and the settings that were refused."""

    def __init__(self, workload: Workload, machine: Machine, base: Plan, *, every: bool) -> None:
        self._workload, self._machine, self._base, self._every = workload, machine, base, every
        self._thresholds = plan_thresholds(workload, machine, base)
        self.candidates: dict[str, list[PredictedRow]] = {}
        self._refused: list[tuple[str, ConfigError]] = []
        self._usable: set[str] = set()

    def of(self, kind: type[Strategy]) -> None:
        """Find the best candidate of a strategy."""
        strategies = kind.candidates(self._base.devices, len(self._workload.layers), self._workload.column_blocks)
        groups = [group for strategy in strategies for group in self._groups(strategy)]
        self.candidates[kind.name] = [*(self._all(groups) if self._every else self._until_one_fits(groups))]

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
            plan: Plan = replace(self._base, strategy=strategy.text, accumulate=accumulate, overlap="off")
            plan = min(self._with_thresholds(plan), key=lambda each: each.threshold_bytes)
            schedule = scheduled(self._workload, self._machine, plan)
            first = self._row(plan, price(schedule, self._machine).step_s)
            free_s = 0.0 if schedule.dynamic else price(schedule, self._machine, FREE_NETWORK).step_s
        except ConfigError as error:
            self._refused.append((strategy.text, error))
            return None
        self._usable.add(strategy.text)
        return _Group(free_s, first)

    def _smaller(self, plan: Plan) -> _Group | None:
        """Return the group that needs less memory than that of a plan, and more time."""
        recomputing, accumulate = plan.parallelism.recomputing, 2 * plan.accumulate
        if recomputing is not None:
            return self._group(recomputing, plan.accumulate)
        possible = (
            accumulate <= MOST_DIVISIONS * self._base.accumulate and accumulate * plan.data_devices <= plan.global_batch
        )
        return self._group(plan.parallelism, accumulate) if plan.parallelism.stages == 1 and possible else None

    def _until_one_fits(self, groups: Iterable[_Group]) -> Iterator[PredictedRow]:
        """Yield candidates from the fastest on, the last of which is the first that may fit (best-first search).

        A group of which not even the smallest threshold fits is represented by that; a smaller one follows it.
        """
        queue: list[tuple[float, int, _Group | PredictedRow]] = []
        numbers = itertools.count()

        def push(each: _Group | PredictedRow) -> None:
            heapq.heappush(queue, (each.step_s, next(numbers), each))

        for group in groups:
            push(group)
        while queue:
            _, _, first = heapq.heappop(queue)
            row = first.first if isinstance(first, _Group) else first
            if row.memory.fits is False:
                yield row
                if isinstance(first, _Group) and (smaller := self._smaller(row.plan)):
                    push(smaller)
            elif isinstance(first, _Group):
                for each in self._variants(row.plan):
                    push(each)
            else:
                yield row
                return

    def _all(self, groups: Iterable[_Group]) -> Iterator[PredictedRow]:
        """Yield every candidate, with the smaller groups of those that do not fit."""
        for first in groups:
            group: _Group | None = first
            while group is not None:
                plan = group.first.plan
                rows = list(self._variants(plan))
                yield from rows
                fits = any(row.memory.fits is not False for row in rows)
                group = None if fits else self._smaller(plan)

    def _row(self, plan: Plan, step_s: float) -> PredictedRow:
        row = PredictedRow(workload=self._workload, machine=self._machine, plan=plan)
        row.step_s = step_s
        return row

    def _with_thresholds(self, plan: Plan) -> list[Plan]:
        """Return the plan with each threshold; without devices that have the same layers there is nothing to fuse."""
        thresholds = self._thresholds if plan.data_devices > 1 else self._thresholds[:1]
        return [replace(plan, fusion_threshold_bytes=threshold) for threshold in thresholds]

    def _variants(self, plan: Plan) -> Iterator[PredictedRow]:
        """Yield the plan with each threshold and overlap, priced."""
        mechanisms = known_mechanisms(self._machine, [plan]) if plan.data_devices > 1 else ["off"]
        for bucketed in self._with_thresholds(plan):
            plans = []
            for overlap in mechanisms:
                with contextlib.suppress(ConfigError):  # some rules that decide while running refuse inline
                    plans.append(replace(bucketed, overlap=overlap))
            yield from self._priced(plans)

    def _priced(self, plans: Sequence[Plan]) -> Iterator[PredictedRow]:
        """Yield plans that differ in their overlap alone with their steps: they have one schedule."""
        schedule = scheduled(self._workload, self._machine, plans[0])
        for plan in plans:
            yield self._row(plan, price(dataclasses.replace(schedule, plan=plan), self._machine).step_s)
