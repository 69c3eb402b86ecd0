"""Ranks plans: which thresholds, batches, accumulations and devices are worth trying, priced, and what each gains."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError
from dpsim.fusion_rules import OTHER_BY_DEFAULT, threshold_rules
from dpsim.machine import Machine
from dpsim.model.interval import undecided
from dpsim.model.points import Predicted, ScriptDefaults, plan_one, predict_grid
from dpsim.model.rows import PredictedRow, Ratio, alone_of
from dpsim.model.step import price, scheduled
from dpsim.plan import Plan
from dpsim.records.checks import check_distinct
from dpsim.setting import Grid
from dpsim.workload import Workload

LEAST_CAP_BYTES = 2.0**10
"""The smallest cap above 0 that is compared."""
ACCUMULATIONS = (1, 2, 4, 8)
"""The micro-batches of a step that are compared, beside the default's."""
LEAST_SHARE = 0.5
"""Added devices pay while they bring at least this share of what as many devices alone would."""
T = TypeVar("T")


def caps_up_to_all(workload: Workload, least_bytes: float) -> list[float]:
    """Return caps in bytes, each twice the one before, from a power of two to the first that holds all gradients."""
    last = math.ceil(math.log2(max(workload.gradient_bytes, least_bytes)))
    return [2.0**power for power in range(int(math.log2(least_bytes)), last + 1)]


def distinguishing(caps: Iterable[T], buckets: Callable[[T], Hashable]) -> list[T]:
    """Return the first cap of each list of buckets: others would only repeat a price or a measurement."""
    found: dict[Hashable, T] = {}
    for cap in caps:
        found.setdefault(buckets(cap), cap)
    return list(found.values())


def plan_thresholds(workload: Workload, machine: Machine, plan: Plan) -> list[float | None]:
    """Return the thresholds that make different buckets of a plan, its own first.

    Where buckets are decided while running, those that take different times.
    """
    own = plan.fusion_threshold_bytes
    if plan.data_devices == 1 or plan.fusion_rule not in threshold_rules():
        return [own]

    def buckets(threshold: float | None) -> Hashable:
        schedule = scheduled(workload, machine, replace(plan, fusion_threshold_bytes=threshold))
        if schedule.dynamic:
            return price(schedule, machine).step_s
        return tuple(schedule.bucket_size_bytes.tolist())

    return distinguishing((own, 0.0, *caps_up_to_all(workload, LEAST_CAP_BYTES)), buckets)


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


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that were compared on one number of devices, those of each field from the fastest on.

    Each list varies one field of the default plan, and contains the default. ``caps`` gives each list of buckets once:
    of several caps that make the same buckets (or, where these
    are decided while running, take the same time) it has the default's, else the smallest. ``together`` is the fastest
    plan of every cap with every batch. What does not fit in memory is left out.
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

    def to_measure(self, count: int, *, accumulation: bool, most_samples: float = math.inf) -> tuple[PredictedRow, ...]:
        """Return up to ``count`` options to measure beside the default, with or without other accumulations.

        None of them has more than ``most_samples`` a step, which is what a data set may have.

        The fastest cap, the fastest batch, both together, the fastest accumulation, then the next caps.
        """
        firsts = [self.caps[0], self.batches[0], self.together, *self.accumulations[:accumulation]]
        options = {each.plan: each for each in (*firsts, *self.caps) if each.plan.global_batch <= most_samples}
        return tuple(each for plan, each in options.items() if plan != self.default.plan)[:count]


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
    """The answer: for each number of devices, and from each to the next one, starting with one device.

    ``script`` is what the workload's script script DDP.
    """

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
    whole = bool(grid.values("global_batch"))
    if whole and local_batches:
        raise ConfigError(
            f"a global batch of {grid.value('global_batch')} and local batches {', '.join(map(str, local_batches))}",
            allowed="one of the two: under one global batch each device has its share",
        )
    batches = () if whole else local_batches or workload.local_batches
    first = {} if whole else {"local_batch": batches[0]}
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
        tuned.append(_tuned(workload, machine, default, batches, () if whole else ACCUMULATIONS))
    return Tuning(tuned=tuple(tuned), growth=tuple(_growth(tuned, whole=whole)), script=script)


def _tuned(
    workload: Workload, machine: Machine, default: Plan, batches: Iterable[float], accumulations: Iterable[int]
) -> Tuned:
    """Return the plans around a default plan that fit in memory, ranked by each field, and the best combination."""
    base = PredictedRow(workload=workload, machine=machine, plan=default)

    def ranked(plans: Iterable[Plan]) -> tuple[PredictedRow, ...]:
        """Return the rows of plans that fit, the default among them in any case, from the fastest on."""
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
