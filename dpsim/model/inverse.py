"""Inverse questions: which bandwidth, latency, number of devices or local batch reaches a target.

Every answer is a search over ``dpsim.model.predict_points``: a prediction with the value that was found reaches it.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar, get_args

import numpy as np

from dpsim.collective import parse_devices
from dpsim.errors import ConfigError, unknown
from dpsim.machine import Link, Machine
from dpsim.model.defaults import for_prediction
from dpsim.model.hours import NO_TRAINING, Training
from dpsim.model.other_link import joining_link, with_link
from dpsim.model.points import predict_points
from dpsim.model.rows import Record
from dpsim.setting import Grid
from dpsim.strategy import DataParallel, parse_strategy
from dpsim.workload import Workload

Prepare = Callable[[Machine], Machine]
"""Fills in what a machine leaves open, for these numbers of devices."""
T = TypeVar("T")
_OF_TRAINING = ("hours", "cost")
Goal = Literal["efficiency", "speedup", "step-time", "hours", "cost"]
GOALS: tuple[Goal, ...] = get_args(Goal)
QUANTITIES = ("bandwidth", "latency", "devices", "local-batch", "bucket")
BANDWIDTHS, LATENCIES = (1e6, 1e13), (1e-8, 1.0)
"""The ends of the search, in bytes a second and in seconds."""
MOST_DEVICES = 65536
BATCHES_BEYOND = 64
"""How many times as large as the largest profiled one the local batches are that are tried."""
_A_DECADE = 6
_DIGITS, _PRECISION = 3, 1e-4


@dataclass(frozen=True, kw_only=True)
class Target:
    """What a prediction is to reach: a scaling efficiency (0 to 1), a speedup, or a step of at most so many seconds.

    Or it is the most that a ``training`` may take, in hours, or cost on all devices. Raises ``ConfigError`` for an
    efficiency above 1, for anything that is not a finite number above 0, and for hours or a cost of no training.
    """

    goal: Goal
    value: float
    training: Training = NO_TRAINING

    def __post_init__(self) -> None:
        if self.goal in _OF_TRAINING and getattr(self.training, "samples" if self.goal == "hours" else "price") is None:
            raise ConfigError(
                f"a target of {self.goal} without {'--samples' if self.goal == 'hours' else '--samples and --price'}",
                allowed="hours or a cost of a number of samples",
                remedy="give the samples of an epoch and what a device costs an hour: --samples 1.28M --price 2.50",
            )
        if self.goal == "efficiency" and not 0 < self.value <= 1:
            raise ConfigError(
                f"a target of {100 * self.value:.6g}% scaling efficiency",
                allowed="above 0% and up to 100%, where n devices are n times as fast as one",
                remedy="write it like --target efficiency=90%",
            )
        if not 0 < self.value < math.inf:
            raise ConfigError(f"a target {self.goal} of {self.value}", allowed="a finite number above 0")

    @property
    def most(self) -> bool:
        """Whether the target is the most that is allowed, and not the least that is wanted."""
        return self.goal in ("step-time", *_OF_TRAINING)

    def of(self, point: Record) -> tuple[float, float, float]:
        """Return what a predicted point has of the goal: (the worse end of its interval, as predicted, the better)."""
        if self.most:
            times_s = (point[name] for name in ("predicted_high_s", "predicted_step_s", "predicted_low_s"))
            of_step = {"hours": self.training.hours, "cost": self.training.cost}.get(self.goal)
            worse, predicted, better = (each if of_step is None else of_step(point, each) for each in times_s)
            return worse, predicted, better
        over = point["devices"] if self.goal == "efficiency" else 1
        keys = ("predicted_speedup_low", "predicted_speedup", "predicted_speedup_high")
        worse, predicted, better = (point[key] / over for key in keys)
        return worse, predicted, better

    def reached(self, value: float) -> bool:
        """Whether the goal is reached by a value of it."""
        return value <= self.value if self.most else value >= self.value

    def nearest(self, values: Sequence[T], goal: Callable[[T], float]) -> T:
        """Return the first of the values that come nearest to the target, or go farthest beyond it."""
        return (min if self.most else max)(values, key=goal)


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The value of a quantity with which a prediction reaches the target.

    ``least`` says whether it is the least such value (a bandwidth) or the most (a latency, a number of devices).
    ``value`` is ``None`` where none of the values that were ``tried``, from the first to the last, reaches it. ``low``
    and ``high`` are those at which one end of the prediction's interval reaches it (``None``: none does). ``point`` is
    predicted ``at`` the value, or where there is none at what comes nearest to the target: for bandwidths and latencies
    that may be infinity and 0. ``until`` is the last value beyond ``value`` that reaches the target, where what follows
    does not (``None``: all do). ``summary`` is that of ``predict_points`` there. ``link`` is what joins the devices
    now, where its bandwidth or latency is asked for, and ``has_tables`` whether tables change with it.
    """

    quantity: str
    target: Target
    least: bool
    value: float | None
    low: float | None
    high: float | None
    tried: tuple[float, float]
    until: float | None
    at: float
    point: Record
    summary: Record
    link: Link | None = None
    has_tables: bool = False

    @property
    def anything(self) -> bool:
        """Whether every value that was tried reaches the target."""
        return self.value == self.tried[0 if self.least else 1]


def find(
    quantity: str,
    target: Target,
    workload: Workload,
    machine: Machine,
    grid: Grid,
    prepare: Prepare | None = None,
) -> Answer:
    """Return the bandwidth, latency, number of devices or local batch at which predictions begin to miss a target.

    A grid is predicted from the values with which the target is hardest to reach on, to the first one that reaches it,
    and the interval before it is bisected. The grid has one number of devices, or a layout; where devices are what is
    asked for, it is the most that are tried (``MOST_DEVICES``). Bandwidth and latency are those of the link that joins
    the devices, and tables change with it (``dpsim.model.other_link``). Of several values
    of another field the one counts that comes nearest to the target. ``prepare`` fills in what the machine leaves open
    (``for_prediction``). Raises ``ConfigError``, also for a machine without a link.
    """
    if quantity not in QUANTITIES[:-1]:
        raise unknown("quantity to find", quantity, QUANTITIES)
    devices = grid.value("devices")
    within = _range(quantity, workload, machine, grid)
    link = joining_link(machine, devices)[0] if devices and quantity in ("bandwidth", "latency") else None
    prepared = functools.partial(for_prediction, workload) if prepare is None else prepare
    inputs_at = functools.partial(_inputs, quantity, machine, grid, within.unit)

    @functools.cache
    def predicted(value: float) -> tuple[Record, Record]:
        machine_there, grid_there = inputs_at(value)
        machine_there = prepared(machine_there)
        points, summary = predict_points(workload, machine_there, grid_there)
        on_several = [point for point in points if point["devices"] > 1] or points
        return target.nearest(on_several, lambda point: target.of(point)[1]), summary

    least = _least(quantity, target, weak=not grid.values("global_batch"))

    def reached_at(end: int) -> Callable[[float], bool]:
        return lambda value: target.reached(target.of(predicted(value)[0])[end])

    certain, value, possible = (_boundary(reached_at(end), within, least=least) for end in range(3))
    ends = {"bandwidth": [math.inf], "latency": [0.0]}.get(quantity, [])
    at = value
    if at is None:
        tried = [*ends, *within.values(least=not least)]
        at = target.nearest(tried, lambda each: target.of(predicted(each)[0])[1])
    point, summary = predicted(at)

    def scaled(number: float | None) -> float | None:
        return None if number is None else number * within.unit

    return Answer(
        quantity=quantity,
        target=target,
        least=least,
        value=scaled(value),
        low=scaled(possible if least else certain),
        high=scaled(certain if least else possible),
        tried=(within.first * within.unit, within.last * within.unit),
        until=None if value is None else scaled(_end(reached_at(1), within, value, least=least)),
        at=at * within.unit,
        point=point,
        summary=summary,
        link=link,
        has_tables=link is not None and bool(machine.allreduce or machine.halves or machine.overlap),
    )


def _inputs(quantity: str, machine: Machine, grid: Grid, unit: int, value: float) -> tuple[Machine, Grid]:
    """Return machine and grid with a value of the quantity, in units of ``unit``."""
    devices = grid.value("devices") or 1
    match quantity:
        case "bandwidth":
            machine = with_link(machine, devices, "bandwidth_bytes_per_s", value)
        case "latency":
            machine = with_link(machine, devices, "latency_s", value)
        case "local-batch":
            grid = grid.changed(local_batch=int(value))
        case _:
            devices = f"{value:.0f}x{unit}" if parse_devices(devices)[1] else int(value) * unit
    return machine, grid.changed(devices=devices)


def _least(quantity: str, target: Target, *, weak: bool) -> bool:
    """Whether the target becomes easier to reach as the quantity grows, so that the least value is asked for."""
    match quantity:
        case "bandwidth":
            return True
        case "devices":
            return target.goal in ("speedup", "hours") or (target.goal == "step-time" and not weak)
        case "local-batch":
            return target.goal != "step-time"
    return False


class _Range(NamedTuple):
    """The values to try: from ``first`` to ``last`` in units of ``unit``; whole numbers or any."""

    first: float
    last: float
    whole: bool = False
    unit: int = 1

    def values(self, *, least: bool) -> list[float]:
        """Return a grid of the range, from the value that is hardest on the target on."""
        if self.whole:
            doubled = [int(self.first) << doublings for doublings in range(int(self.last // self.first).bit_length())]
            grid = [float(value) for value in dict.fromkeys((*doubled, int(self.last)))]
        else:
            decades = math.log10(self.last / self.first)
            grid = np.geomspace(self.first, self.last, round(_A_DECADE * decades) + 1).tolist()
        return grid if least else grid[::-1]


def _range(quantity: str, workload: Workload, machine: Machine, grid: Grid) -> _Range:
    """Return the values of a quantity to try. Raises ``ConfigError``."""
    devices, batches = grid.value("devices"), grid.values("global_batch")
    if devices is None and quantity != "devices":
        raise ConfigError(f"the {quantity} for no number of devices", allowed="a number of devices, or a layout")
    count, layout = parse_devices(MOST_DEVICES if devices is None else devices)
    if quantity != "devices" and count < 2:
        raise ConfigError(f"the {quantity} for {count} device, which sends nothing", allowed="2 devices or more")
    match quantity:
        case "bandwidth":
            return _Range(*BANDWIDTHS)
        case "latency":
            return _Range(*LATENCIES)
        case "devices":
            unit = layout.of_a_node if layout else parse_strategy(grid.value("strategy") or DataParallel.name).classes
            inside = math.inf if layout else machine.largest_node or math.inf
            units = int(min(count, inside, *batches) // unit)
            if units * unit < 2:
                raise ConfigError(f"up to {count} devices to search in", allowed="2 or more, and no more than samples")
            first = 1 if unit > 1 else 2
            if machine.of_several_nodes:  # which says nothing of devices inside a node
                first = 2 if layout else max(first, machine.devices_a_node // unit + 1)
            return _Range(first, max(first, units), whole=True, unit=unit)
    if batches:
        raise ConfigError(
            "the local batch that reaches a target, of a global batch",
            allowed="a local batch to find, or a global batch that is the same on any number of devices",
            remedy="leave the global batch out",
        )
    return _Range(1, BATCHES_BEYOND * workload.local_batches[-1], whole=True)


def _boundary(reached: Callable[[float], bool], within: _Range, *, least: bool) -> float | None:
    """Return the value nearest to the hard end of a range that reaches the target; ``None`` where none does."""
    grid = within.values(least=least)
    first = next((number for number, value in enumerate(grid) if reached(value)), None)
    if not first:
        return None if first is None else grid[0]
    return _bisected(reached, grid[first - 1], grid[first], within)


def _end(reached: Callable[[float], bool], within: _Range, value: float, *, least: bool) -> float | None:
    """Return the value farthest on the easy side up to which the target stays reached; ``None``: to the end."""
    before = value
    for easier in within.values(least=least):
        if (easier > value) if least else (easier < value):
            if not reached(easier):
                return _bisected(reached, easier, before, within)
            before = easier
    return None


def _bisected(reached: Callable[[float], bool], misses: float, reaches: float, within: _Range) -> float:
    """Return the value next to the one that misses the target which reaches it.

    A number that need not be whole is rounded to three digits, away from the one that misses.
    """
    least = reaches > misses
    while abs(reaches - misses) > 1 if within.whole else abs(math.log(reaches / misses)) > _PRECISION:
        middle = float((misses + reaches) // 2) if within.whole else math.sqrt(misses * reaches)
        misses, reaches = (misses, middle) if reached(middle) else (middle, reaches)
    if within.whole:
        return reaches
    power = math.floor(math.log10(reaches)) - _DIGITS + 1
    rounded = float(f"{(math.ceil if least else math.floor)(reaches / 10.0**power)}e{power}")
    return rounded if reached(rounded) else reaches
