"""Uncertainty of a later mean step time on a machine whose speed drifts (Allan deviation), from visits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsim.errors import ConfigError
from dpsim.harness.measurement.statistics import median_interval
from dpsim.machine import LEAST_SLOWDOWN, ComputeSlowdown

Floats = NDArray[np.float64]
_BLOCKS = (4, 6, 8, 12, 16)
"""Into how many blocks of equal length a calibration is cut."""
_USUAL_DECAY, _DECAY_ERROR = 0.1, 0.15
"""How the scatter of means falls with their length: on shared machines it was length^-0.23 where one training ran alone
for 200 s (11 % over 5 s, 8 % over 20 s), and length^-0.05 beside others; the prior lies between."""
_LEAST_DECAY, _MOST_DECAY = -0.25, 0.5
_FEW_BLOCKS = 2.015 / 1.645
"""The scatter of so few blocks is itself uncertain: 90 % of Student's t with 5 degrees of freedom over the normal."""
_MEDIAN_EFFICIENCY = math.sqrt(math.pi / 2)
TICK_S = 1e-9
"""The resolution of the clock: a difference of times that is less was not measured."""
NARROW = 0.03
"""The relative half-width of the 95 % interval at which a compute slowdown is known well enough."""


class Visits:
    """Seconds of one setting's steps, visit by visit."""

    def __init__(self) -> None:
        self.steps_s: list[list[float]] = []
        self.at_s: list[float] = []

    def add(self, steps_s: Sequence[float], at_s: float = 0.0) -> None:
        """Keep a visit that ended at the instant ``at_s``. No step is shorter than the clock's tick."""
        self.steps_s.append([max(step_s, TICK_S) for step_s in steps_s])
        self.at_s.append(at_s)

    def samples(self) -> Floats:
        """Return the seconds of every step."""
        return np.concatenate(self.steps_s)

    def medians_s(self) -> Floats:
        """Return the median step of each visit."""
        return np.array([np.median(steps) for steps in self.steps_s])

    def paces(self) -> tuple[Floats, Floats]:
        """Return the instant of each visit, and its mean step over the median of all visits."""
        kept = [(at_s, np.mean(steps)) for at_s, steps in zip(self.at_s, self.steps_s, strict=True) if steps]
        at_s, means = np.array(kept).T
        return at_s, means / np.median(means)


def compute_slowdown(devices: int, alone: Visits, together: Visits) -> ComputeSlowdown:
    """Return how much longer steps take on ``devices`` devices at once: the median ratio of paired visits.

    The visits i of both were made back to back, so that a longer disturbance of the machine cancels out. A factor below
    the least that a machine may have was measured while something else slowed the one device down.
    """
    ratio = median_interval((together.medians_s() / alone.medians_s()).tolist())
    factor = max(ratio.median, LEAST_SLOWDOWN)
    return ComputeSlowdown(devices=devices, factor=factor, half_width=ratio.relative_half_width)


def later_error(cases: Sequence[Visits]) -> float:
    """One standard error, relative, of the mean step of a later run, from the visits of several settings together."""
    paces = [case.paces() for case in cases if any(case.steps_s)]
    if not paces:
        return 0.0
    at_s, times = (np.concatenate(columns) for columns in zip(*paces, strict=True))
    order = np.argsort(at_s, kind="stable")
    return later_mean_error(at_s[order], times[order])


def later_mean_error(at_s: ArrayLike, times: ArrayLike) -> float:
    """One standard error, relative, of the mean of such times over the next stretch as long as this one.

    sigma(T) = sqrt(<(m_{i+1} - m_i)^2>), m_i the logarithms of the means over neighbouring blocks of length T (the
    Allan deviation times sqrt 2). It contains what this stretch misses of the long-time mean as well as what the next
    one does. It is observed for blocks of 1/4 to 1/16 of the whole, and continued to the whole by sigma(T) ~ T^-h,
    where h is from -1/4 (the speed drifts away) through 0 (it wanders on every scale) to 1/2 (independent times),
    estimated together with a prior for what is usual. Few blocks make it larger (Student's t).

    ``at_s`` are instants in seconds, ascending, ``times`` any relative times. 0 with fewer than 8 times. Raises
    ``ConfigError`` for times that are not finite and > 0.
    """
    instants, values = np.asarray(at_s, np.float64), np.asarray(times, np.float64)
    if instants.shape != values.shape or not (np.isfinite(values) & (values > 0)).all():
        raise ConfigError(f"{len(values)} times at {len(instants)} instants", allowed="as many of each, finite and > 0")
    if len(values) < 2 * _BLOCKS[0]:
        return 0.0
    lengths, variances, weights = [], [], []
    for count in _BLOCKS:
        differences = np.diff(_block_means(instants, values, count))
        differences = differences[np.isfinite(differences)]
        variance = float(np.mean(differences**2)) if len(differences) else 0.0
        if len(values) >= 2 * count and variance > 0:
            lengths.append(1 / count)
            variances.append(variance)
            weights.append(len(differences) / 2)  # the logarithm of a mean of k squares has a variance of about 2/k
    if not lengths:
        return 0.0
    return _FEW_BLOCKS * math.sqrt(_continued(np.log(lengths), np.log(variances), np.array(weights)))


def _block_means(at_s: Floats, values: Floats, count: int) -> Floats:
    """Logarithms of the means over ``count`` stretches of equal duration; NaN where one is empty."""
    span = at_s[-1] - at_s[0]
    places = np.minimum(((at_s - at_s[0]) / span * count).astype(int), count - 1) if span > 0 else np.zeros(len(at_s))
    means = np.full(count, np.nan)
    for block in range(count):
        of_block = values[places == block]
        if len(of_block):
            means[block] = math.log(of_block.mean())
    return means


def _continued(log_length: Floats, log_variance: Floats, weight: Floats) -> float:
    """The variance at length 1 of variance = a length^(-2 h), least squares with the usual h as a prior."""
    mean_length = float(np.average(log_length, weights=weight))
    mean_variance = float(np.average(log_variance, weights=weight))
    apart = log_length - mean_length
    prior = 1 / (2 * _DECAY_ERROR) ** 2
    slope = (weight * apart) @ (log_variance - mean_variance) - prior * 2 * _USUAL_DECAY
    decay = float(np.clip(-slope / ((weight * apart) @ apart + prior) / 2, _LEAST_DECAY, _MOST_DECAY))
    return math.exp(mean_variance + 2 * decay * mean_length)


def median_error(values: ArrayLike) -> float:
    """One standard error of the median of positive values, relative, from the scatter of the middle two thirds.

    1.25 s / sqrt(k): k independent values, such as one a visit, of which 68 % lie within +- s of the median.
    """
    logarithms = np.log(np.asarray(values, np.float64))
    if len(logarithms) < 2:
        return 0.0
    low, high = np.quantile(logarithms, [0.16, 0.84])
    return float(_MEDIAN_EFFICIENCY * (high - low) / 2 / math.sqrt(len(logarithms)))
