"""Which bucket cap, local batch and accumulation train the most samples per second, and how many devices pay."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import Machine
from dpsim.model.interval import Interval, equally_fast, predict_with_interval, ratio_interval, undecided
from dpsim.model.memory import memory
from dpsim.model.points import ScriptDefaults, plan_one
from dpsim.model.step import Prediction, price, scheduled
from dpsim.plan import Plan
from dpsim.records.checks import check_distinct
from dpsim.setting import Grid
from dpsim.workload import Workload

ACCUMULATIONS = (1, 2, 4, 8)
"""The micro-batches of a step that are compared, beside the default's."""
LEAST_CAP_BYTES = 2.0**10
"""The smallest cap above 0 that is compared."""
LEAST_SHARE = 0.5
"""Added devices pay while they bring at least this share of what as many devices alone would."""
Predicted = tuple[Prediction, Interval]


class Ratio(NamedTuple):
    """A ratio of two speeds, and the ends of its 90 % interval: what is uncertain about both alike does not count."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the first one is faster by more than the interval."""
        return self.low > 1


@dataclass(frozen=True, kw_only=True)
class Option:
    """A plan, its predicted step, and its samples per second over those of the default plan (``gain``)."""

    plan: Plan
    predicted: Predicted
    gain: Ratio

    @property
    def samples_per_s(self) -> float:
        return self.plan.global_batch / self.predicted[0].step_s


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The settings that were compared on one number of devices, those of each field from the fastest on.

    Each list varies one field of the default plan, and contains the default. ``caps`` gives each list of buckets once:
    of several caps that make the same buckets (or, where these
    are decided while running, take the same time) it has the default's, else the smallest. ``together`` is the fastest
    plan of every cap with every batch. What does not fit in memory is left out.
    """

    default: Option
    caps: tuple[Option, ...]
    batches: tuple[Option, ...]
    accumulations: tuple[Option, ...]
    together: Option

    @property
    def advised(self) -> Option:
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
    def as_fast(self) -> tuple[Option, ...]:
        """The other caps that may well be as fast as the fastest one."""
        return tuple(each for each in self.caps[1:] if equally_fast(each.predicted, self.caps[0].predicted))

    def to_measure(self, count: int, *, accumulation: bool, most_samples: float = math.inf) -> tuple[Option, ...]:
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

    ``told`` is what the workload's script told DDP.
    """

    tuned: tuple[Tuned, ...]
    growth: tuple[Growth, ...]
    told: ScriptDefaults

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


def caps_up_to_all(workload: Workload, least_bytes: float) -> list[float]:
    """Caps in bytes, each twice the one before, from a power of two to the first that holds all gradients."""
    last = math.ceil(math.log2(max(workload.gradient_bytes, least_bytes)))
    return [2.0**power for power in range(int(math.log2(least_bytes)), last + 1)]


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
    tuned, told = [], ScriptDefaults({})
    for _, layout in counts:
        default, told = plan_one(workload, machine, grid.changed(devices=layout, **first))
        if FUSION_RULES.find(default.fusion_rule).default_threshold_bytes is None:
            raise ConfigError(
                f"buckets by rule {default.fusion_rule!r}, which has no bucket cap to tune",
                allowed="rules with a threshold, such as ddp",
                remedy="profile a script with DistributedDataParallel: of a trace, or of FSDP, the buckets are given",
            )
        tuned.append(_Search(workload, machine, default).tuned(batches, () if whole else ACCUMULATIONS))
    return Tuning(tuned=tuple(tuned), growth=tuple(_growth(workload, machine, tuned, whole=whole)), told=told)


class _Search:
    """The plans around a default plan, priced where they fit in memory."""

    def __init__(self, workload: Workload, machine: Machine, default: Plan) -> None:
        self._workload, self._machine = workload, machine
        self._default = default
        self._predicted = predict_with_interval(workload, machine, default)

    def tuned(self, batches: Iterable[float], accumulations: Iterable[int]) -> Tuned:
        default, replace = self._default, msgspec.structs.replace
        caps = [replace(default, fusion_threshold_bytes=cap) for cap in self._caps()]
        of_batches = [default, *(_with_batch(default, batch) for batch in batches)]
        counts = [default, *(_accumulating(default, count) for count in accumulations)]
        combined = [_with_batch(cap, batch.local_batch) for cap in caps for batch in of_batches]
        every = [self._options(plans) for plans in (caps, of_batches, counts)]
        fastest = min((plan for plan in combined if self._fits(plan)), key=self._s_per_sample, default=default)
        option = next(each for each in every[0] if each.plan == default)
        return Tuned(
            default=option, caps=every[0], batches=every[1], accumulations=every[2], together=self._option(fastest)
        )

    def _caps(self) -> list[float | None]:
        """The caps that make different buckets, the default's first."""
        caps: dict[Any, float | None] = {}
        for cap in (self._default.fusion_threshold_bytes, 0.0, *caps_up_to_all(self._workload, LEAST_CAP_BYTES)):
            plan = msgspec.structs.replace(self._default, fusion_threshold_bytes=cap)
            schedule = scheduled(self._workload, self._machine, plan)
            buckets = tuple(schedule.bucket_size_bytes.tolist())
            caps.setdefault(price(schedule, self._machine).step_s if schedule.dynamic else buckets, cap)
        return list(caps.values())

    def _options(self, plans: Iterable[Plan]) -> tuple[Option, ...]:
        """Return the plans that fit, the default among them in any case, from the fastest on."""
        fitting = [plan for plan in dict.fromkeys(plans) if plan == self._default or self._fits(plan)]
        return tuple(sorted(map(self._option, fitting), key=lambda option: -option.samples_per_s))

    def _option(self, plan: Plan) -> Option:
        predicted = predict_with_interval(self._workload, self._machine, plan)
        samples = plan.global_batch / self._default.global_batch
        return Option(plan=plan, predicted=predicted, gain=_ratio(self._predicted, predicted, samples))

    def _fits(self, plan: Plan) -> bool:
        return memory(self._workload, plan, self._machine).fits is not False

    def _s_per_sample(self, plan: Plan) -> float:
        return price(scheduled(self._workload, self._machine, plan), self._machine).step_s / plan.global_batch


def _with_batch(plan: Plan, local_batch: float) -> Plan:
    return msgspec.structs.replace(plan, global_batch=round(local_batch * plan.data_devices * plan.accumulate))


def _accumulating(plan: Plan, accumulate: int) -> Plan:
    """The plan with other micro-batches a step, each of as many samples as before."""
    batch = plan.global_batch // plan.accumulate * accumulate
    return msgspec.structs.replace(plan, accumulate=accumulate, global_batch=batch)


def _ratio(before: Predicted, after: Predicted, samples: float) -> Ratio:
    """The speed of ``after`` over that of ``before``, of a step with ``samples`` times as many samples."""
    if before[0] == after[0]:
        return Ratio(1.0, 1.0, 1.0)
    low, high = ratio_interval(before, after)
    return Ratio(samples * before[0].step_s / after[0].step_s, samples * low, samples * high)


def _growth(workload: Workload, machine: Machine, tuned: Sequence[Tuned], *, whole: bool) -> Iterable[Growth]:
    """Yield what each number of devices brings over the largest one before it that pays."""
    first = tuned[0].default.plan
    alone = first.on_one_device(global_batch=first.global_batch if whole else first.global_batch // first.data_devices)
    before = alone, predict_with_interval(workload, machine, alone)
    for option in (each.default for each in tuned):
        samples = option.plan.global_batch / before[0].global_batch
        growth = Growth(fewer=before[0], more=option.plan, speedup=_ratio(before[1], option.predicted, samples))
        yield growth
        if growth.pays:
            before = option.plan, option.predicted
