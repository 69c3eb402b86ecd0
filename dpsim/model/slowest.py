"""How long the slowest of several devices computes, which every step of synchronous training waits for.

A device computes for its factor (1, or more on a slow device) times a draw from the workload's ``step_spread``. With
``step_correlation`` rho the draws of a step are dependent: that of device i is the quantile Phi(x_i) of the spread,
with x_i = sqrt(rho) z + sqrt(1 - rho) e_i, a z common to all devices and an e_i of each, standard normal (a Gaussian
copula with one factor). Where z is known the draws are independent; an expectation is a sum over z.
"""

from __future__ import annotations

import functools
import math
from collections import Counter

import numpy as np
from numpy.typing import NDArray

from dpsim.workload import Workload

Floats = NDArray[np.float64]
EXACT_DEVICES = 8
"""Up to so many devices the quantiles of a workload say what the slowest takes; beyond, a tail is assumed."""
_MARGIN = 1e-6
_LARGEST_Z, _STEP, _LEAST_STEP = 8.5, 0.25, 1e-3
"""Where the sum over z ends, and its steps: a quarter of the width over which a probability changes, in these limits.
The trapezoidal rule of a Gaussian converges faster than any power of the step: at a quarter it is exact to rounding."""


@functools.lru_cache(maxsize=4096)
def expected_slowest(
    step_spread: tuple[float, ...], devices: int, *, correlation: float = 0.0, slow_devices: tuple[float, ...] = ()
) -> float:
    """E[max over n devices] of a step's relative computing time, from the k quantiles q of one (all 1 without any).

    Of independent draws on equal devices E[max] = sum_i (F_i^n - F_{i-1}^n) q_i, F_i = (i + 1) / k, exact where steps
    take those k values alike. ``slow_devices`` are the factors of those among the n that are slower; of more than n,
    the slowest take part. ``correlation`` is rho: with 1 all devices draw the same, and none waits for another.

    Beyond 8 devices the k quantiles say little of the largest value: the maximum of m devices with one factor is then
    that of 8 and b ln(m / 8) more, as in a light (exponential) tail, with b from its growth between 4 and 8 devices.
    """
    slow = sorted(slow_devices, reverse=True)[:devices]
    counts = Counter(slow)
    counts[1.0] += devices - len(slow)
    quantiles = np.array(step_spread or (1.0,))
    growth = 0.0
    if max(counts.values()) > EXACT_DEVICES:
        counted_exactly = (EXACT_DEVICES // 2, EXACT_DEVICES)
        of_half, of_all = (_expected_largest([(n, quantiles)], correlation) for n in counted_exactly)
        growth = (of_all - of_half) / math.log(2)
    groups = [
        (min(count, EXACT_DEVICES), factor * (quantiles + growth * math.log(max(1.0, count / EXACT_DEVICES))))
        for factor, count in counts.items()
        if count
    ]
    return _expected_largest(groups, correlation)


def _expected_largest(groups: list[tuple[int, Floats]], correlation: float) -> float:
    """E[max] over groups of devices, each of whose devices takes these ascending values alike."""
    if correlation == 1:  # every device draws the same quantile
        slowest: Floats = np.max([values for _, values in groups], axis=0)
        return float(slowest.mean())
    values = np.unique(np.concatenate([each for _, each in groups]))
    z, weights = _common(correlation)
    below = np.ones((len(z), len(values)))
    for count, each in groups:
        below *= _given(np.searchsorted(each, values, side="right") / len(each), correlation, z) ** count
    return float(weights @ (np.diff(below, prepend=0.0) @ values))


def median_slowest(workload: Workload, devices: int) -> float:
    """The median over steps of the largest of ``devices`` computing times, over the median of one.

    Synchronous training waits for the slowest device, and a measured step is a median.
    """
    return workload.spread_at(_share_of_one(0.5, devices, workload.step_correlation))


def median_slowest_error(workload: Workload, devices: int, steps: int) -> float:
    """The relative standard error of that median over so many steps, each of which draws anew.

    The share of steps below the median of all scatters by 0.5 / sqrt(steps) around one half. Where a few steps take
    much longer than the others, whether those are the half above the median is then a matter of chance.
    """
    share = 0.5 / math.sqrt(steps)
    low, high = (
        workload.spread_at(_share_of_one(each, devices, workload.step_correlation))
        for each in (0.5 - share, 0.5 + share)
    )
    return math.log(high / low) / 2


def _share_of_one(share: float, devices: int, correlation: float) -> float:
    """The probability that one device is below the value that all are below with probability ``share``.

    share^(1/n) of independent devices, and ``share`` itself where all draw the same.
    """
    if correlation in (0, 1):
        return float(share ** (1 / devices if correlation == 0 else 1.0))
    from scipy.optimize import brentq
    from scipy.special import ndtr, ndtri

    z, weights = _common(correlation)

    def excess(x: float) -> float:
        return float(weights @ _given(ndtr(np.array([x])), correlation, z)[:, 0] ** devices) - share

    alike, apart = ndtri(share), ndtri(share ** (1 / devices))  # what it is with a correlation of 1, and of 0
    return float(ndtr(brentq(excess, alike - _MARGIN, apart + _MARGIN)))


def _common(correlation: float) -> tuple[Floats, Floats]:
    """Values of the common z, and their probabilities: a single one where it does not matter."""
    if correlation == 0:
        return np.zeros(1), np.ones(1)
    width = math.sqrt((1 - correlation) / correlation)
    step = min(max(width / 4, _LEAST_STEP), _STEP)
    z = np.arange(-_LARGEST_Z, _LARGEST_Z + step, step)
    weights = np.exp(-(z**2) / 2)
    return z, weights / weights.sum()


def _given(share: Floats, correlation: float, z: Floats) -> Floats:
    """Phi((Phi^-1(share) - sqrt(rho) z) / sqrt(1 - rho)): (z, shares), the probabilities of shares where z is known."""
    if correlation == 0:
        return share[None]
    from scipy.special import ndtr, ndtri

    probabilities: Floats = ndtr((ndtri(share) - math.sqrt(correlation) * z[:, None]) / math.sqrt(1 - correlation))
    return probabilities
