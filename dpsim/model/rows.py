"""``PredictedRow``: a plan and what is predicted of it, its columns declared once."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from dpsim.columns import Column, Row, columns_of
from dpsim.fusion_rules import FUSION_RULES
from dpsim.grouping import grouped
from dpsim.machine import Machine
from dpsim.model.bits import plan_bits
from dpsim.model.interval import Interval, equally_fast, predict_with_interval, ratio_interval
from dpsim.model.memory import Memory, memory
from dpsim.model.step import Prediction, PricedStep, price, scheduled
from dpsim.plan import Plan
from dpsim.schedule import Schedule
from dpsim.strategy import DataParallel
from dpsim.workload import Workload

Record = dict[str, Any]
T = TypeVar("T")


class Ratio(NamedTuple):
    """A ratio of two speeds, and the ends of its 90 % interval: what is uncertain about both alike does not count."""

    value: float
    low: float
    high: float

    @property
    def certain(self) -> bool:
        """Whether the first one is faster by more than the interval."""
        return self.low > 1


class _Column(Column["PredictedRow", T]):
    """A column of a predicted row."""


class PredictedRow(Row):
    """A plan on a machine and what is predicted of it, each value computed when it is first asked for.

    ``alone`` is the row of one device that its speedup is over, ``base`` the one that its gain is over; where they are
    missing it is the row itself.
    """

    workload: Workload
    machine: Machine
    plan: Plan
    alone: PredictedRow | None = None
    base: PredictedRow | None = None

    layout = _Column(
        "name", "The devices: `2x4` is 2 nodes with 4 each.", lambda r: r.plan.layout or str(r.plan.devices)
    )
    local_batch = _Column(
        "count", "The samples that a device has at once, on average.", lambda r: r.plan.local_batch, dtype="float64"
    )
    fusion_threshold_bytes = _Column[float | None](
        "bytes",
        "The fusion threshold in force; one device has none, nor has a rule that takes none.",
        lambda r: r.plan.threshold_bytes if r.plan.devices > 1 and r.takes_threshold else None,
        head="threshold",
        form="threshold",
    )
    buckets = _Column("count", "The buckets of a step.", lambda r: r.prediction.buckets, head="buckets")
    optimizer = _Column("name", "The optimizer.", lambda r: r.plan.optimizer.__struct_config__.tag)
    network = _Column("name", "The network that the machine was calibrated on.", lambda r: r.machine.network)
    emulated_compute = _Column("yes or no", "Whether computation is emulated.", lambda r: r.workload.emulated_compute)
    emulated_network = _Column("yes or no", "Whether the network is emulated.", lambda r: r.machine.emulated_network)
    predicted_step_s = _Column("s", "The time of a step.", lambda r: r.step_s, head="step", form="duration")
    predicted_low_s = _Column("s", "The lower end of its interval.", lambda r: r.prediction.low_s)
    predicted_high_s = _Column("s", "The upper end of its interval.", lambda r: r.prediction.high_s)
    interval_level = _Column(
        "ratio",
        "The probability of the interval; missing where its width is assumed.",
        lambda r: r.prediction.interval_level,
    )
    interval_studies = _Column(
        "count", "The past studies that the interval's width is from.", lambda r: r.prediction.interval_studies
    )
    interval_clusters = _Column(
        "count",
        "The published clusters that an assumed width is from; 0 where past studies tell it, or nothing.",
        lambda r: r.prediction.interval_clusters,
    )
    predicted_exposed_communication_s = _Column(
        "s",
        "The time of a step in which communication is not hidden.",
        lambda r: r.prediction.exposed_communication_s,
        head="exposed",
        form="duration",
    )
    predicted_communication_cost_s = _Column(
        "s",
        "The step over the one on a network that takes no time.",
        lambda r: r.prediction.communication_cost_s,
        head="communication cost",
        form="duration",
    )
    waiting_for_slowest_s = _Column(
        "s", "Waiting for the slowest device.", lambda r: r.prediction.waiting_for_slowest_s
    )
    waiting_for_input_s = _Column("s", "Waiting for input.", lambda r: r.prediction.waiting_for_input_s)
    images_per_s = _Column(
        "1/s",
        "Samples per second.",
        lambda r: r.plan.global_batch / r.step_s if r.step_s else math.inf,
        head="samples/s",
        form="four digits",
    )
    images_per_s_low = _Column(
        "1/s",
        "The lower end of their interval.",
        lambda r: r.plan.global_batch / r.prediction.high_s if r.prediction.high_s else math.inf,
    )
    images_per_s_high = _Column(
        "1/s",
        "The upper end of their interval.",
        lambda r: r.plan.global_batch / r.prediction.low_s if r.prediction.low_s else math.inf,
    )
    predicted_speedup = _Column("ratio", "Samples per second over one device's.", lambda r: r.speedup.value)
    predicted_speedup_low = _Column("ratio", "The lower end of the speedup's interval.", lambda r: r.speedup.low)
    predicted_speedup_high = _Column("ratio", "The upper end of the speedup's interval.", lambda r: r.speedup.high)
    calibrated_on = _Column("text", "What the machine was calibrated on.", lambda r: r.machine.calibrated_on)
    extrapolated = _Column(
        "yes or no", "Whether it is beyond what was calibrated.", lambda r: r.prediction.extrapolated
    )
    memory_bytes = _Column(
        "bytes",
        "What a device needs, by part and in total.",
        lambda r: r.memory.parts() | {"total": r.memory.total},
        head="memory",
        form="memory",
    )
    fits = _Column("yes or no", "Whether that fits; missing where it is not known.", lambda r: r.memory.fits)

    __eq__, __hash__ = object.__eq__, object.__hash__

    @property
    def lone(self) -> PredictedRow:
        """The row of one device that this one is compared with."""
        return self.alone or self

    @functools.cached_property
    def predicted(self) -> tuple[Prediction, Interval]:
        """The prediction and its interval."""
        return predict_with_interval(self.workload, self.machine, self.plan)

    @functools.cached_property
    def bits(self) -> bytes | None:
        """The digest of the bits of its steps (``dpsim.model.bits``)."""
        return bits_of(scheduled(self.workload, self.machine, self.plan), self.machine)

    @functools.cached_property
    def step_s(self) -> float:
        """The step, which is priced without its interval where that is not asked for."""
        if "predicted" in vars(self):
            return self.prediction.step_s
        return self.priced.step_s

    @property
    def priced(self) -> PricedStep:
        """The step with the time of each operation."""
        return price(scheduled(self.workload, self.machine, self.plan), self.machine)

    @functools.cached_property
    def memory(self) -> Memory:
        """What a device needs."""
        return memory(self.workload, self.plan, self.machine)

    @property
    def prediction(self) -> Prediction:
        return self.predicted[0]

    @property
    def takes_threshold(self) -> bool:
        """Whether the rule takes a threshold."""
        return FUSION_RULES.find(self.plan.fusion_rule).default_threshold_bytes is not None

    @property
    def rank(self) -> tuple[bool, float]:
        """What rows are sorted by: those that may fit by their speed, then the others by the memory they need."""
        misfit = self.memory.fits is False
        return misfit, self.memory.total if misfit else self.step_s / self.plan.global_batch

    @functools.cached_property
    def speedup(self) -> Ratio:
        """Samples per second over one device's."""
        return self.over(self.alone)

    @functools.cached_property
    def gain(self) -> Ratio:
        """Samples per second over those of ``base``."""
        return self.over(self.base)

    def over(self, other: PredictedRow | None, *, of_two_machines: bool = False) -> Ratio:
        """Return samples per second over those of another row; exactly 1 over an equal prediction."""
        if other is None or (self._as_predicted(other) and not of_two_machines):
            return Ratio(1.0, 1.0, 1.0)
        value = self.images_per_s / other.images_per_s
        if not math.isfinite(value) or not other.step_s > 0:
            return Ratio(*(self.plan.devices / other.plan.devices,) * 3)
        low, high = ratio_interval(other.predicted, self.predicted, of_two_machines=of_two_machines)
        samples = self.plan.global_batch / other.plan.global_batch
        return Ratio(value, samples * low, samples * high)

    def _as_predicted(self, other: PredictedRow) -> bool:
        """Whether both are the same prediction: one device sends nothing, whatever strategy and buckets it has."""
        alone = self.plan.devices == other.plan.devices == 1
        return self.prediction == other.prediction or (alone and self.step_s == other.step_s)

    def as_fast(self, rows: Sequence[PredictedRow]) -> list[PredictedRow]:
        """Return the other rows whose step cannot be told from this one's."""
        return [row for row in rows if row is not self and equally_fast(row.predicted, self.predicted)]

    def record(self, *names: str) -> Record:
        """Return the plan and the values of all columns, or of some, by their names."""
        return (
            msgspec.structs.asdict(self.plan)
            | {"optimizer": self.optimizer}
            | {name: getattr(self, name) for name in names or columns_of(PredictedRow)}
        )


def bits_of(schedule: Schedule, machine: Machine) -> bytes | None:
    """Return the digest of a schedule's bits; None for those of another runtime's script."""
    if schedule.workload.ddp is not None:
        return None
    return plan_bits(schedule, shares_memory=machine.network == "node").digest


def alone_of(plan: Plan, *, weak: bool) -> Plan:
    """Return the plan on one device that a plan's speedup is over; it is divided into no parts or stages."""
    strategy = plan.strategy if plan.parallelism.classes == 1 else DataParallel.name
    batch = plan.global_batch // plan.data_devices if weak else plan.global_batch
    return plan.on_one_device(strategy=strategy, global_batch=batch, fusion_threshold_bytes=None, overlap="off")


def best_of(rows: Sequence[PredictedRow]) -> list[Record]:
    """Return the fastest of the rows that differ in their threshold alone, with the thresholds that may be as fast."""
    return [_best(group) for group in _by_threshold(rows)]


def fastest_of(rows: Sequence[PredictedRow]) -> list[PredictedRow]:
    """Return the fastest of the rows that differ in their threshold alone."""
    return [min(group, key=lambda row: row.step_s) for group in _by_threshold(rows)]


def _by_threshold(rows: Sequence[PredictedRow]) -> list[list[PredictedRow]]:
    return [*grouped(rows, lambda row: (row.lone.plan, row.plan.strategy, row.layout)).values()]


def _best(rows: Sequence[PredictedRow]) -> Record:
    """Return the fastest row of a device count, and the thresholds that cannot be told apart from it."""
    fastest = min(rows, key=lambda row: row.step_s)
    near = [row.fusion_threshold_bytes for row in fastest.as_fast(rows)]
    names = ["layout", "local_batch", "fusion_threshold_bytes", "buckets"]
    names += ["predicted_step_s", "predicted_low_s", "predicted_high_s"]
    names += ["images_per_s", "images_per_s_low", "images_per_s_high"]
    return fastest.record(*names) | {
        "speedup": fastest.speedup.value,
        "speedup_low": fastest.speedup.low,
        "speedup_high": fastest.speedup.high,
        "scaling_efficiency": fastest.speedup.value / fastest.plan.devices,
        "thresholds_compared": len(rows),
        "equally_fast_bytes": near,
        "any_threshold": len(near) == len(rows) - 1 and len(rows) > 1,
    }
