"""The bootstrap of several settings of one run: whole rounds are drawn, the same ones for all settings."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from dpsim.harness.compare.runs import RoundSamples
from dpsim.harness.measurement.statistics import RESAMPLES

Floats = NDArray[np.float64]
Counts = NDArray[np.int64]


def draws(rounds: int, *, seed: int) -> Counts:
    """Return how often each of ``rounds`` rounds occurs in each resample: shape (resamples, rounds).

    Rounds are drawn as a whole because what slowed the machine in one of them slowed all of its samples.
    """
    return np.random.default_rng(seed).multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES)


def medians(samples: RoundSamples, drawn: Counts) -> Floats:
    """Return the median of each resample; NaN where none of the drawn rounds has a sample."""
    order = np.argsort(samples.time_s, kind="stable")
    times = samples.time_s[order]
    cumulated = np.cumsum(drawn[:, samples.round[order]], axis=1)
    total = cumulated[:, -1:]
    lower = np.minimum((2 * cumulated < total).sum(axis=1), len(times) - 1)
    upper = np.minimum((2 * cumulated <= total).sum(axis=1), len(times) - 1)
    middle: Floats = (times[lower] + times[upper]) / 2
    return np.where(total[:, 0] > 0, middle, np.nan)


def means(samples: RoundSamples, drawn: Counts) -> Floats:
    """Return the mean of each resample; NaN where none of the drawn rounds has a sample."""
    weights = drawn[:, samples.round]
    total = weights.sum(axis=1)
    sums = weights @ samples.time_s
    averages: Floats = np.divide(sums, total, out=np.full(len(total), np.nan), where=total > 0)
    return averages


def interval(values: Floats) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval of resampled values, without those that are NaN."""
    low, high = np.nanpercentile(values, (2.5, 97.5))
    return float(low), float(high)


def geometric_mean(values: Floats) -> Floats:
    """Return the geometric mean over the first axis (settings), without those that are NaN."""
    known = np.isfinite(values)
    count = known.sum(axis=0)
    sums = np.log(np.where(known, values, 1.0)).sum(axis=0)
    averages: Floats = np.exp(np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0))
    return averages
