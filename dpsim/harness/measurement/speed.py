"""A machine whose speed changes: its two speeds and their shares, by the times of a reference computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.harness.measurement.scatter import later_mean_error
from dpsim.harness.measurement.statistics import Interval, median_interval
from dpsim.machine import Speed

Floats = NDArray[np.float64]
_LEAST_CHANGE, _MOST_CHANGE = 1.08, 2.5
_LEAST_SHARE = 0.03
_FEW = 6
TICK_S = 1e-9
"""The resolution of the clock: a difference of times that is less was not measured."""
ORDINARY = (1.0, 99.0)
"""Percentiles between which a time counts in a mean; a time beyond them counts as the nearer percentile."""
NARROW = 0.03
"""The relative half-width of the 95 % interval at which a compute slowdown is known well enough."""


class Mixture(Noun, frozen=True):
    """Two speeds: the reference computation takes ``full_s`` at one, ``slow_s`` for ``slow_share`` of the time.

    On a steady machine both are its median, and the share is 0.
    """

    full_s: float
    slow_s: float
    slow_share: float = 0.0

    @property
    def steady(self) -> bool:
        return self.slow_share == 0

    @property
    def change(self) -> float:
        """How many times longer the reference computation takes at the slow speed."""
        return self.slow_s / self.full_s

    def speed(self, devices: int, compute_factor: float, relative_uncertainty: float) -> Speed:
        """These speeds for a machine file; computation takes ``compute_factor`` times as long at the slow speed.

        ``relative_uncertainty`` is that of a later mean of its times (``scatter.later_mean_error``).
        """
        return Speed(
            devices=devices,
            reference_s=self.full_s,
            slow_reference_s=self.slow_s,
            slow_share=self.slow_share,
            compute_factor=compute_factor,
            relative_uncertainty=relative_uncertainty,
        )

    def slow(self, reference_s: Sequence[float]) -> NDArray[np.bool_]:
        """Which of these times are nearer to the slow speed, as ratios. On a steady machine none is."""
        slow: NDArray[np.bool_] = np.asarray(reference_s) > np.sqrt(self.full_s * self.slow_s)
        return slow & (not self.steady)


def mixture(reference_s: Sequence[float]) -> Mixture:
    """The one or two speeds whose logarithms are nearest to those of the times (least absolute deviations).

    There are two where the slow one takes 1.08 to 2.5 times as long (a time beyond that had to wait for its core), and
    each holds for 3 % of the times or more. Speeds are medians, so that a few disturbed times do not matter. The share
    of the slow speed is the one that gives the mean of the times, because some times lie between the two. A broad
    single class is split, too; that does no harm, because measured and predicted times are means over both classes,
    and no estimate jumps where a second speed appears. Raises ``ConfigError``.
    """
    times = np.sort(np.asarray(reference_s, np.float64))
    if len(times) == 0 or not (np.isfinite(times) & (times > 0)).all():
        raise ConfigError(f"{len(times)} times of the reference computation", allowed="1 or more, finite and > 0")
    middle, split = float(np.median(times)), _split(np.log(times))
    steady = Mixture(full_s=middle, slow_s=middle)
    if not _LEAST_SHARE * len(times) <= split <= (1 - _LEAST_SHARE) * len(times):
        return steady
    full_s, slow_s = float(np.median(times[:split])), float(np.median(times[split:]))
    if not _LEAST_CHANGE <= slow_s / full_s <= _MOST_CHANGE:
        return steady
    mean_s = float(np.mean(np.clip(times, *np.percentile(times, ORDINARY))))
    share = float(np.clip((mean_s - full_s) / (slow_s - full_s), _LEAST_SHARE, 1 - _LEAST_SHARE))
    return Mixture(full_s=full_s, slow_s=slow_s, slow_share=share)


def _split(ascending: Floats) -> int:
    """Where to split values into two classes with the least sum of distances from their medians; 0 for too few."""
    count = len(ascending)
    if count < 2 * _FEW:
        return 0
    sums = np.concatenate([[0.0], np.cumsum(ascending)])
    lower = np.arange(1, count)
    upper = count - lower
    below = sums[lower] - sums[lower - lower // 2] - sums[lower // 2]
    above = sums[-1] - sums[count - upper // 2] - (sums[lower + upper // 2] - sums[lower])
    return int(lower[np.argmin(below + above)])


def slow_factor(samples: ArrayLike, reference_s: Sequence[float], speeds: Mixture) -> float:
    """How many times as long the samples take at the slow speed as at full speed: the ratio of medians, 1 or more.

    ``reference_s[i]`` is the reference time of the visit of ``samples[i]``. Where either speed has fewer than 6
    samples, the ratio is that of the reference computation.
    """
    values, slow = np.asarray(samples, np.float64), speeds.slow(reference_s)
    if speeds.steady or min(slow.sum(), (~slow).sum()) < _FEW:
        return speeds.change
    full = float(np.median(values[~slow]))
    return max(1.0, float(np.median(values[slow])) / full) if full > 0 else 1.0


def factors(reference_s: Sequence[float], speeds: Mixture, factor: float) -> Floats:
    """How many times as long as at full speed each sample takes, by the reference time of its visit.

    (reference time / its time at full speed)^e, where e is such that the slow speed gives ``factor``; 1 on a steady
    machine. This also follows a machine with more speeds than two.
    """
    times = np.asarray(reference_s, np.float64)
    if speeds.steady:
        return np.ones_like(times)
    exponent = np.log(factor) / np.log(speeds.change)
    slowdowns: Floats = (np.clip(times / speeds.full_s, 1 / _MOST_CHANGE, _MOST_CHANGE)) ** exponent
    return slowdowns


class Visits:
    """Seconds of one setting's steps, visit by visit, each visit with its reference time."""

    def __init__(self) -> None:
        self.steps_s: list[list[float]] = []
        self.reference_s: list[float] = []
        self.at_s: list[float] = []

    def add(self, steps_s: list[float], reference_s: float, at_s: float = 0.0) -> None:
        """Keep a visit that ended at the instant ``at_s``. No step is shorter than the clock's tick."""
        self.steps_s.append([max(step_s, TICK_S) for step_s in steps_s])
        self.reference_s.append(reference_s)
        self.at_s.append(at_s)

    def samples(self) -> tuple[list[float], list[float]]:
        """(seconds of every step, the reference time of each)."""
        visits = list(zip(self.steps_s, self.reference_s, strict=True))
        return [step for steps, _ in visits for step in steps], [time for steps, time in visits for _ in steps]

    def slow_factor(self, speeds: Mixture) -> float:
        return slow_factor(*self.samples(), speeds)

    def paces(self) -> tuple[Floats, Floats]:
        """(the instant of each visit, its mean step over the median of all visits)."""
        means = np.array([np.mean(steps) for steps in self.steps_s if steps])
        return np.array([at for at, steps in zip(self.at_s, self.steps_s, strict=True) if steps]), means / np.median(
            means
        )

    def full_speed_s(self, speeds: Mixture) -> Floats:
        """The median step of each visit, divided by how much slower the machine was in it."""
        medians = np.array([np.median(steps) for steps in self.steps_s])
        full_s: Floats = medians / factors(self.reference_s, speeds, self.slow_factor(speeds))
        return full_s


def slowdown(alone: Visits, together: Visits, alone_speeds: Mixture, together_speeds: Mixture) -> Interval:
    """How many times as long steps take on several devices at once, at full speed: the median ratio of paired visits.

    The visits i of both were made back to back, so that a longer disturbance of the machine cancels out.
    """
    return median_interval((together.full_speed_s(together_speeds) / alone.full_speed_s(alone_speeds)).tolist())


def later_error(cases: Sequence[Visits]) -> float:
    """One standard error, relative, of the mean step of a later run, from the visits of several settings together."""
    paces = [case.paces() for case in cases if case.steps_s]
    if not paces:
        return 0.0
    at_s, times = (np.concatenate(columns) for columns in zip(*paces, strict=True))
    order = np.argsort(at_s, kind="stable")
    return later_mean_error(at_s[order], times[order])
