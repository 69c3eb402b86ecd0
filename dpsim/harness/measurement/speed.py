"""A machine whose speed changes: its two speeds and their shares, from the times of a reference computation."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsim.codec import Noun
from dpsim.errors import ConfigError
from dpsim.harness.measurement.statistics import Interval, median_interval
from dpsim.machine import Speed

Floats = NDArray[np.float64]
_LEAST_CHANGE, _MOST_CHANGE = 1.08, 2.5
_LEAST_SHARE = 0.03
_FEW = 6
ORDINARY = (1.0, 99.0)
"""Percentiles between which a time counts in a mean; beyond them it counts as the nearer one."""
NARROW = 0.03
"""A compute slowdown whose 95 % interval is within so much of it is known well enough."""


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

    def speed(self, devices: int, compute_factor: float) -> Speed:
        """The same for a machine's file, with how many times longer computation takes at the slow speed."""
        return Speed(
            devices=devices,
            reference_s=self.full_s,
            slow_reference_s=self.slow_s,
            slow_share=self.slow_share,
            compute_factor=compute_factor,
        )

    def slow(self, reference_s: Sequence[float]) -> NDArray[np.bool_]:
        """Which of these times are nearer to the slow speed, as ratios."""
        found: NDArray[np.bool_] = np.asarray(reference_s) > np.sqrt(self.full_s * self.slow_s)
        return found & (not self.steady)


def mixture(reference_s: Sequence[float]) -> Mixture:
    """The two speeds whose logarithms lie nearest to these times' (least absolute deviations), or one speed.

    There are two where the slow one takes 1.08 to 2.5 times as long (what takes longer had to wait for its core) and
    each holds for 3 % of the times or more. Speeds are medians, so a few disturbed times do not matter; the slow one's
    share is that which gives the mean of the times, for there are others between the two. Two classes are made of a
    broad single one, too; that does no harm, for what is measured and what is predicted are means over both classes,
    and no estimate jumps where a second speed appears. Raises ``ConfigError``.
    """
    times = np.sort(np.asarray(reference_s, np.float64))
    if len(times) == 0 or not (np.isfinite(times) & (times > 0)).all():
        raise ConfigError(f"{len(times)} times of the reference computation", allowed="1 or more, finite and > 0")
    middle, split = float(np.median(times)), _split(np.log(times))
    one = Mixture(full_s=middle, slow_s=middle)
    if not _LEAST_SHARE * len(times) <= split <= (1 - _LEAST_SHARE) * len(times):
        return one
    full_s, slow_s = float(np.median(times[:split])), float(np.median(times[split:]))
    if not _LEAST_CHANGE <= slow_s / full_s <= _MOST_CHANGE:
        return one
    usual_s = float(np.mean(np.clip(times, *np.percentile(times, ORDINARY))))
    share = float(np.clip((usual_s - full_s) / (slow_s - full_s), _LEAST_SHARE, 1 - _LEAST_SHARE))
    return Mixture(full_s=full_s, slow_s=slow_s, slow_share=share)


def _split(ascending: Floats) -> int:
    """How many values the lower of two classes has that leave the least sum of distances from their medians; 0: few."""
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
    """How many times as long the samples take at the slow speed as at full speed: the ratio of the medians, 1 or more.

    ``reference_s[i]`` is the reference computation's time beside ``samples[i]``. Where either speed has fewer than 6
    samples it is that of the reference computation.
    """
    values, slow = np.asarray(samples, np.float64), speeds.slow(reference_s)
    if speeds.steady or min(slow.sum(), (~slow).sum()) < _FEW:
        return speeds.change
    full = float(np.median(values[~slow]))
    return max(1.0, float(np.median(values[slow])) / full) if full > 0 else 1.0


def factors(reference_s: Sequence[float], speeds: Mixture, factor: float) -> Floats:
    """How many times as long as at full speed a sample takes where the reference computation takes so long.

    (reference time / its time at full speed)^e with that e which gives ``factor`` at the slow speed; 1 on a steady
    machine. So a machine with speeds between the two, or a third, is followed as well.
    """
    times = np.asarray(reference_s, np.float64)
    if speeds.steady:
        return np.ones_like(times)
    exponent = np.log(factor) / np.log(speeds.change)
    found: Floats = (np.clip(times / speeds.full_s, 1 / _MOST_CHANGE, _MOST_CHANGE)) ** exponent
    return found


class Visits:
    """Seconds of one setting's steps, visit by visit, each visit with the reference computation's time beside it."""

    def __init__(self) -> None:
        self.steps_s: list[list[float]] = []
        self.reference_s: list[float] = []

    def add(self, steps_s: list[float], reference_s: float) -> None:
        self.steps_s.append(steps_s)
        self.reference_s.append(reference_s)

    def samples(self) -> tuple[list[float], list[float]]:
        """(seconds of every step, the reference time of each)."""
        rows = list(zip(self.steps_s, self.reference_s, strict=True))
        return [s for steps, _ in rows for s in steps], [r for steps, r in rows for _ in steps]

    def slow_factor(self, speeds: Mixture) -> float:
        return slow_factor(*self.samples(), speeds)

    def full_speed_s(self, speeds: Mixture) -> Floats:
        """The median step of each visit, brought to full speed."""
        medians = np.array([np.median(steps) for steps in self.steps_s])
        found: Floats = medians / factors(self.reference_s, speeds, self.slow_factor(speeds))
        return found


def slowdown(alone: Visits, together: Visits, alone_speeds: Mixture, together_speeds: Mixture) -> Interval:
    """How many times as long steps take on several devices at once, at full speed: the median ratio of paired visits.

    Visit i of both was made back to back, so that what slows the machine for longer than that cancels out.
    """
    return median_interval((together.full_speed_s(together_speeds) / alone.full_speed_s(alone_speeds)).tolist())
