"""Ranks plans: which strategies, thresholds, batches, accumulations and devices to try, priced, and what each gains."""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import itertools
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec.structs import replace

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError
from dpsim.fusion_rules import OTHER_BY_DEFAULT, threshold_rules
from dpsim.machine import Machine
from dpsim.model.compare import known_mechanisms
from dpsim.model.interval import undecided
from dpsim.model.points import Predicted, ScriptDefaults, plan_one, predict_grid
from dpsim.model.prices import FREE_NETWORK
from dpsim.model.rows import PredictedRow, Ratio, alone_of
from dpsim.model.step import price, scheduled
from dpsim.model.thresholds import plan_thresholds
from dpsim.plan import Plan
from dpsim.records.checks import check_distinct
from dpsim.schedule import Schedule
from dpsim.setting import Grid
from dpsim.strategy import STRATEGIES, Strategy
from dpsim.workload import Workload

ACCUMULATIONS = (1, 2, 4, 8)
"""The micro-batches of a step that are compared, beside the default's."""
LEAST_SHARE = 0.5
"""Added devices pay while they bring at least this share of what as many devices alone would."""
MICRO_BATCHES_A_STAGE = 4
"""The most micro-batches of a pipeline over its stages: its bubble is then a fifth of the step or less."""
MOST_DIVISIONS = 4
"""How many times as many micro-batches as the plan's a strategy without stages has where it does not fit otherwise."""


class Refusal(NamedTuple):
    """Strategies with their settings that cannot be used, all for one reason; the error is that of the first one."""

    strategies: tuple[str, ...]
    error: ConfigError


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that were compared on one number of devices, those of each field from the fastest on.

    Each list varies one field of the default plan, and contains the default; ``caps`` are those of ``plan_thresholds``.
    ``together`` is the fastest plan of every cap with every batch. What does not fit in memory is left out.
    """

    default: PredictedRow
    caps: tuple[PredictedRow, ...]
    batches: tuple[PredictedRow, ...]
    accumulations: tuple[PredictedRow, ...]
    together: PredictedRow

    @property
    def advised(self) -> PredictedRow:
        """The fastest cap if it is certainly faster than the default, else the default."""
        return self.caps[0] if self.caps[0].gain.certain else self.default

    @property
    def undecided(self) -> str | None:
        """What is the most uncertain about the gain of the fastest cap (``interval.undecided``); ``None``: no doubt."""
        best = self.caps[0]
        if best is self.default or best.gain.certain:
            return None
        return undecided(self.default.predicted[1], best.predicted[1])

    @property
    def as_fast(self) -> tuple[PredictedRow, ...]:
        """The other caps that may well be as fast as the fastest one."""
        return tuple(self.caps[0].as_fast(self.caps[1:]))


@dataclass(frozen=True, kw_only=True)
class Growth:
    """What more devices bring with the default settings: samples per second over those of ``fewer`` devices.

    ``fewer`` is the largest number before them that pays, or one device.
    """

    fewer: Plan
    more: Plan
    speedup: Ratio

    @property
    def share(self) -> float:
        """Of the speed that the added devices alone would add, the share that they do."""
        return (self.speedup.value - 1) / (self.more.devices / self.fewer.devices - 1)

    @property
    def pays(self) -> bool:
        return self.speedup.certain and self.share >= LEAST_SHARE


@dataclass(frozen=True, kw_only=True)
class Tuning:
    """The answer: for each number of devices, and from each to the next one, starting with one device."""

    tuned: tuple[Tuned, ...]
    growth: tuple[Growth, ...]
    script: ScriptDefaults

    @property
    def first_not_paying(self) -> Growth | None:
        """The first growth beyond the last one that pays; ``None`` where the most devices pay."""
        pays = [each.pays for each in self.growth]
        last = max((number for number, each in enumerate(pays) if each), default=-1)
        return next(iter(self.growth[last + 1 :]), None)

    @property
    def advised(self) -> Tuned:
        """The answer for the most devices that pay, or for the fewest where none do."""
        stop = self.first_not_paying
        paying = [each for each in self.tuned if stop is None or each.default.plan.devices <= stop.fewer.devices]
        return paying[-1] if paying else self.tuned[0]


def tune(workload: Workload, machine: Machine, grid: Grid) -> Tuning:
    """Return the fastest bucket cap, local batch and accumulation on each number of devices, and which devices pay.

    The grid has numbers of devices and local batches; its other fields have one value each. The default plan has the
    first local batch (without them the smallest that was profiled), the grid's threshold or the one that the script or
    the rule has, and the script's accumulation, or none. With a ``global_batch`` neither local batches nor
    accumulation are compared: both follow from it. Speeds are samples per second: other batches train differently.

    Raises ``ConfigError`` for a rule without a threshold, without a number of devices above 1, and where the default
    cannot be priced.
    """
    devices, local_batches = grid.values("devices"), grid.values("local_batch")
    has_global_batch = bool(grid.values("global_batch"))
    if has_global_batch and local_batches:
        raise ConfigError(
            f"a global batch of {grid.value('global_batch')} and local batches {', '.join(map(str, local_batches))}",
            allowed="one of the two: under one global batch each device has its share",
        )
    batches = () if has_global_batch else local_batches or workload.local_batches
    first = {} if has_global_batch else {"local_batch": batches[0]}
    check_distinct("devices", devices, key=lambda each: parse_devices(each)[0])
    counts = sorted((number, each) for each in devices if (number := parse_devices(each)[0]) > 1)
    if not counts:
        raise ConfigError(
            f"--devices {', '.join(map(str, devices))}, on which nothing is communicated",
            allowed="numbers of devices, at least one of them above 1",
        )
    tuned, script = [], ScriptDefaults({})
    for _, layout in counts:
        default, script = plan_one(workload, machine, grid.changed(devices=layout, **first))
        if default.fusion_rule not in threshold_rules():
            raise ConfigError(
                f"buckets by rule {default.fusion_rule!r}, which has no bucket cap to tune",
                allowed="rules with a threshold, such as ddp",
                remedy="profile a script with DistributedDataParallel: of a trace, or of FSDP, the buckets are given",
            )
        tuned.append(_tuned(workload, machine, default, batches, () if has_global_batch else ACCUMULATIONS))
    return Tuning(tuned=tuple(tuned), growth=tuple(_growth(tuned, whole=has_global_batch)), script=script)


def _tuned(
    workload: Workload, machine: Machine, default: Plan, batches: Iterable[float], accumulations: Iterable[int]
) -> Tuned:
    """Return the plans around a default plan that fit in memory, ranked by each field, and the best combination."""
    base = PredictedRow(workload=workload, machine=machine, plan=default)

    def ranked(plans: Iterable[Plan]) -> tuple[PredictedRow, ...]:  # those that fit, and the default
        others = (base.replaced(plan=plan, base=base) for plan in dict.fromkeys(plans) if plan != default)
        rows = [base, *(row for row in others if row.memory.fits is not False)]
        return tuple(sorted(rows, key=lambda row: -row.images_per_s))

    caps = [replace(default, fusion_threshold_bytes=cap) for cap in plan_thresholds(workload, machine, default)]
    of_batches = [default, *(_with_batch(default, batch) for batch in batches)]
    combined = [_with_batch(cap, batch.local_batch) for cap in caps for batch in of_batches]
    return Tuned(
        default=base,
        caps=ranked(caps),
        batches=ranked(of_batches),
        accumulations=ranked(_accumulating(default, count) for count in accumulations),
        together=ranked(combined)[0],
    )


def _with_batch(plan: Plan, local_batch: float) -> Plan:
    return replace(plan, global_batch=round(local_batch * plan.data_devices * plan.accumulate))


def _accumulating(plan: Plan, accumulate: int) -> Plan:
    """The plan with other micro-batches a step, each of as many samples as before."""
    batch = plan.global_batch // plan.accumulate * accumulate
    return replace(plan, accumulate=accumulate, global_batch=batch)


def _growth(tuned: Sequence[Tuned], *, whole: bool) -> Iterator[Growth]:
    """Yield what each number of devices brings over the largest one before it that pays."""
    first = tuned[0].default
    before = first.replaced(plan=alone_of(first.plan, weak=not whole))
    for row in (each.default for each in tuned):
        growth = Growth(fewer=before.plan, more=row.plan, speedup=row.over(before))
        yield growth
        if growth.pays:
            before = row


def ranked_strategies(
    workload: Workload, machine: Machine, base: Plan, *, every: bool
) -> tuple[dict[str, list[PredictedRow]], tuple[Refusal, ...]]:
    """Return the rows of each strategy's candidates in the order of their rank, and why others have no candidate.

    Without ``every`` those are left out that cannot be the first of their strategy; see ``advise``.
    """
    search = _Search(workload, machine, base, every=every)
    ranked = {name: sorted(search.rows(kind), key=lambda row: row.rank) for name, kind in STRATEGIES.items()}
    return ranked, search.refusals


_Group = tuple[float, PredictedRow]
"""Plans that differ in threshold and overlap: what no step is shorter than, and the one with the least memory."""


class _Search:
    """A best-first search for the fastest candidate of each strategy that may fit; refused settings are remembered."""

    def __init__(self, workload: Workload, machine: Machine, base: Plan, *, every: bool) -> None:
        self._workload, self._machine, self._base, self._every = workload, machine, base, every
        self._thresholds = plan_thresholds(workload, machine, base)
        self._refused: list[tuple[str, ConfigError]] = []
        self._usable: set[str] = set()

    def rows(self, kind: type[Strategy]) -> Iterator[PredictedRow]:
        """Yield candidates of a strategy from the fastest on, the last of which is the first that may fit, or all.

        A group of which not even the smallest threshold fits is represented by that; a smaller one follows it.
        """
        base, workload = self._base, self._workload
        strategies = kind.candidates(base.devices, base.layout.nodes, len(workload.layers), workload.column_blocks)
        numbers = itertools.count()
        queue = [(bound_s, next(numbers), True, row) for of in strategies for bound_s, row in self._groups(of)]
        heapq.heapify(queue)
        while queue:
            _, _, of_group, row = heapq.heappop(queue)
            fits = row.memory.fits is not False
            for bound_s, smaller in self._smaller(row.plan) if of_group and not fits else ():
                heapq.heappush(queue, (bound_s, next(numbers), True, smaller))
            if of_group and (fits or self._every):
                for each in self._variants(row.plan):
                    heapq.heappush(queue, (each.step_s, next(numbers), False, each))
                continue
            yield row
            if fits and not self._every:
                return

    @property
    def refusals(self) -> tuple[Refusal, ...]:
        """The strategies of which no plan was possible, each reason once."""
        reasons: dict[tuple[str, str], dict[str, ConfigError]] = {}
        for strategy, error in self._refused:
            if strategy not in self._usable:
                reasons.setdefault((error.allowed, error.remedy), {}).setdefault(strategy, error)
        return tuple(Refusal(tuple(errors), next(iter(errors.values()))) for errors in reasons.values())

    def _groups(self, strategy: Strategy) -> Iterator[_Group]:
        """Yield the group of each number of micro-batches; where one is refused, so would be more."""
        base, classes = self._base, strategy.classes
        most = (MICRO_BATCHES_A_STAGE * classes).bit_length()
        samples = max(base.global_batch * classes // base.devices, 1)
        for accumulate in [1 << power for power in range(most)] if strategy.stages > 1 else [base.accumulate]:
            if accumulate > samples or not (group := self._group(strategy, accumulate)):
                return
            yield from group

    def _group(self, strategy: Strategy, accumulate: int) -> list[_Group]:
        """Return the group of a strategy's plans with so many micro-batches; none where it is refused."""
        try:
            plan: Plan = replace(self._base, strategy=strategy.text, accumulate=accumulate, overlap="off")
            plan = min(self._with_thresholds(plan), key=lambda each: each.threshold_bytes)
            schedule = scheduled(self._workload, self._machine, plan)
            first = self._row(schedule)
            free_s = 0.0 if schedule.dynamic else price(schedule, self._machine, FREE_NETWORK).step_s
        except ConfigError as error:
            self._refused.append((strategy.text, error))
            return []
        self._usable.add(strategy.text)
        return [(free_s, first)]

    def _smaller(self, plan: Plan) -> list[_Group]:
        """Return the group that needs less memory than that of a plan, and more time."""
        strategy, accumulate = plan.parallelism, 2 * plan.accumulate
        if strategy.recomputing is not None:
            return self._group(strategy.recomputing, plan.accumulate)
        most = min(MOST_DIVISIONS * self._base.accumulate, plan.global_batch // plan.data_devices)
        return self._group(strategy, accumulate) if strategy.stages == 1 and accumulate <= most else []

    def _with_thresholds(self, plan: Plan) -> list[Plan]:
        """Return the plan with each threshold; without devices that have the same layers there is nothing to fuse."""
        thresholds = self._thresholds if plan.data_devices > 1 else self._thresholds[:1]
        return [replace(plan, fusion_threshold_bytes=each) for each in thresholds]

    def _variants(self, plan: Plan) -> Iterator[PredictedRow]:
        """Yield the plan with each threshold and overlap, priced; plans that differ in overlap have one schedule."""
        mechanisms = known_mechanisms(self._machine, [plan]) if plan.data_devices > 1 else ["off"]
        for bucketed in self._with_thresholds(plan):
            schedule = scheduled(self._workload, self._machine, bucketed)
            for overlap in mechanisms:
                with contextlib.suppress(ConfigError):  # some rules that decide while running refuse inline
                    yield self._row(dataclasses.replace(schedule, plan=replace(bucketed, overlap=overlap)))

    def _row(self, schedule: Schedule) -> PredictedRow:
        row = PredictedRow(workload=self._workload, machine=self._machine, plan=schedule.plan)
        row.step_s = price(schedule, self._machine).step_s
        return row


class BestBucket(NamedTuple):
    """The fastest threshold's row, whose ``gain`` is over ``default``: no threshold; and those that were compared.

    ``alike`` are the ends of the thresholds around it whose difference from it is within its uncertainty.
    """

    row: PredictedRow
    default: PredictedRow
    alike: tuple[float, float]
    predicted: Predicted


def best_bucket(workload: Workload, machine: Machine, grid: Grid) -> BestBucket:
    """Return the fastest fusion threshold of a rule, beside what the rule does without one.

    The grid has one setting. Raises ``ConfigError``, also for a rule without a threshold.
    """
    plan, _ = plan_one(workload, machine, grid)
    if plan.devices == 1 or plan.fusion_rule not in threshold_rules():
        why = "which has no threshold" if plan.devices > 1 else "on 1 device, which sends nothing"
        raise ConfigError(
            f"the best bucket of rule {plan.fusion_rule!r}, {why}",
            allowed=f"2 devices or more, and {', '.join(threshold_rules())}",
        )
    own, *others = plan_thresholds(workload, machine, plan)
    if plan.fusion_rule not in OTHER_BY_DEFAULT:  # where no threshold makes the buckets of none
        others.append(plan.threshold_bytes if own is None else own)
    thresholds = tuple(sorted(size for size in others if size is not None))
    predicted = predict_grid(workload, machine, grid.changed(overlap=plan.overlap, fusion_threshold_bytes=thresholds))
    rows, best = predicted.rows, min(predicted.rows, key=lambda row: row.step_s)
    best.base = default = PredictedRow(workload=workload, machine=machine, plan=plan)
    place, near = rows.index(best), best.as_fast(rows)
    alike = [best]
    for side in (rows[:place][::-1], rows[place + 1 :]):
        alike += itertools.takewhile(near.__contains__, side)
    ends = [row.plan.threshold_bytes for row in alike]
    return BestBucket(best, default, (min(ends), max(ends)), predicted)
