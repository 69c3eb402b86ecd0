"""Uncertainty of a later mean step time on a machine whose speed drifts (Allan deviation), from visits."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from dpsim.errors import ConfigError

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


def later_error(visits: Sequence[tuple[ArrayLike, ArrayLike]]) -> float:
    """Return one standard error, relative, of the mean step of a later run, from the visits of several settings.

    ``visits`` are the instants of each setting's visits, in seconds, and its mean steps there.
    """
    paces = [
        (np.asarray(at_s), np.asarray(means) / np.median(np.asarray(means))) for at_s, means in visits if np.size(means)
    ]
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
