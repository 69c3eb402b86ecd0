"""The statistics of every measurement: a median, or the ratio of two, with its 95 % confidence interval."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun
from dpsim.errors import ConfigError

RESAMPLES = 1000
CONFIDENCE = 0.95
_BATCH_ELEMENTS = 2**20


class Interval(Noun, frozen=True):
    """A median and the ends of its 95 % confidence interval."""

    median: float
    low: float
    high: float

    @property
    def relative_half_width(self) -> float:
        """Half the interval's width over the median."""
        return (self.high - self.low) / 2 / self.median if self.median > 0 else 0.0


def median_interval(samples: Sequence[float], *, resamples: int = RESAMPLES) -> Interval:
    """The median of ``samples`` with its 95 % percentile bootstrap interval.

    BCa would divide by zero on tied samples. One sample, or samples that are all equal, give an interval of no width:
    their spread is then unknown, not zero. Raises ``ConfigError`` where there is no sample, or one is not finite.
    """
    values = np.asarray(samples, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        finite = int(np.isfinite(values).sum())
        raise ConfigError(f"{values.size} samples, {finite} of them finite", allowed="1 or more, all finite")
    median = float(np.median(values))
    if len(values) == 1 or values.min() == values.max():
        return Interval(median=median, low=median, high=median)
    low, high = _percentiles(lambda drawn: np.median(values[drawn], axis=-1), len(values), resamples)
    return Interval(median=median, low=low, high=high)


def median_ratio(above: Sequence[float], below: Sequence[float]) -> Interval:
    """median(above) / median(below) with its 95 % percentile bootstrap interval over paired rounds.

    ``above[i]`` and ``below[i]`` (> 0) are of the same round. A round is resampled as a whole, because what slowed the
    machine in it slowed both. Rounds that are all equal give an interval of no width. Raises ``ConfigError``.
    """
    pairs = np.array([above, below], np.float64) if len(above) == len(below) else np.empty((2, 0))
    if pairs.shape[1] == 0 or not (np.isfinite(pairs) & (pairs > 0)).all():
        raise ConfigError(
            f"{len(above)} and {len(below)} times of paired rounds", allowed="as many of each, finite and > 0"
        )
    ratio = float(np.median(pairs[0]) / np.median(pairs[1]))
    if (pairs == pairs[:, :1]).all():
        return Interval(median=ratio, low=ratio, high=ratio)

    low, high = _percentiles(
        lambda drawn: np.median(pairs[0, drawn], axis=-1) / np.median(pairs[1, drawn], axis=-1),
        pairs.shape[1],
        RESAMPLES,
    )
    return Interval(median=ratio, low=low, high=high)


def _percentiles(
    statistic: Callable[[NDArray[np.int64]], NDArray[np.float64]], count: int, resamples: int
) -> tuple[float, float]:
    """The 2.5 % and 97.5 % quantiles of a statistic over bootstrap resamples of ``count`` samples.

    ``statistic`` gets the indices of the samples drawn, a row for each resample, some rows at once. The numbers are
    those of ``scipy.stats.bootstrap``, whose import takes a second of every process that measures.
    """
    rng = np.random.default_rng(0)
    rows = max(1, _BATCH_ELEMENTS // count)
    drawn = [min(rows, resamples - first) for first in range(0, resamples, rows)]
    values = np.concatenate([statistic(rng.integers(0, count, (size, count))) for size in drawn])
    tail = (1 - CONFIDENCE) / 2
    low, high = np.quantile(values, [tail, 1 - tail])
    return float(low), float(high)
