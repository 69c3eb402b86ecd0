"""The one statistic of every measurement: a median with its 95 % confidence interval."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from scipy.stats import bootstrap

from dpsim.codec import Noun
from dpsim.errors import ConfigError

RESAMPLES = 1000
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


def median_interval(samples: Sequence[float], *, seed: int = 0, resamples: int = RESAMPLES) -> Interval:
    """The median of ``samples`` with its 95 % percentile bootstrap interval.

    The percentile method, for BCa divides by zero on tied samples. One sample, or samples that are all
    equal, give an interval of no width: it says that nothing is known of the spread, not that there is none.
    Raises ``ConfigError`` when there is no sample, or one that is not finite.
    """
    values = np.asarray(samples, np.float64)
    if values.ndim != 1 or len(values) == 0 or not np.isfinite(values).all():
        finite = int(np.isfinite(values).sum())
        raise ConfigError(f"{values.size} samples, {finite} of them finite", allowed="1 or more, all finite")
    median = float(np.median(values))
    if len(values) == 1 or values.min() == values.max():
        return Interval(median=median, low=median, high=median)
    result = bootstrap(
        (values,),
        np.median,
        confidence_level=0.95,
        n_resamples=resamples,
        method="percentile",
        vectorized=True,
        batch=max(1, _BATCH_ELEMENTS // len(values)),
        rng=np.random.default_rng(seed),
    )
    interval = result.confidence_interval
    return Interval(median=median, low=float(interval.low), high=float(interval.high))
