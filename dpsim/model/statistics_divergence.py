"""How far the batch-norm statistics of a local batch are from those of the global batch, from one forward pass.

A channel's statistics over a local batch are means over its samples: of each sample's mean m, and of each sample's mean
squared distance r from the channel's mean. Pixels of a sample are alike, so samples are independent and pixels are not.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray

from dpsim.codec import Noun

Values = NDArray[np.float64]
STATISTICS = ("mean", "variance")
_DEAD = 1e-6
"""Variances of channels below this are those of channels that are zero for (almost) every sample; they do not count."""


class Spread(Noun, frozen=True):
    """The spread of samples, as means over channels and batches, in units of a channel's standard deviation sigma.

    ``mean``: Var(m) / sigma^2. ``square``: Var(r) / sigma^4. ``mean_fourth``: (Var(m) / sigma^2)^2. ``cross``:
    Cov(r, (m - mu)^2) / sigma^4. ``rows`` of a sample, and their ``kurtosis``, serve the baseline.
    """

    mean: float
    square: float
    mean_fourth: float
    cross: float
    rows: int
    kurtosis: float


def spread(m_NC: Values, q_NC: Values, fourth_C: Values, rows: int) -> Spread:
    """The spread of N samples from their means and mean squares, a channel each.

    ``fourth_C`` is the mean of (x - mu)^4 over all rows.
    """
    mu = m_NC.mean(axis=0)
    variance = q_NC.mean(axis=0) - mu * mu
    alive = variance > _DEAD
    if not alive.any():
        return Spread(mean=0.0, square=0.0, mean_fourth=0.0, cross=0.0, rows=rows, kurtosis=1.0)
    m, q, mu, variance = m_NC[:, alive], q_NC[:, alive], mu[alive], variance[alive]
    of_means = m.var(axis=0, ddof=1) / variance
    r = (q - 2 * mu * m + mu * mu) / variance
    squared = (m - mu) ** 2 / variance
    return Spread(
        mean=float(of_means.mean()),
        square=float(r.var(axis=0, ddof=1).mean()),
        mean_fourth=float((of_means**2).mean()),
        cross=float(((r - r.mean(axis=0)) * squared).mean()),
        rows=rows,
        kurtosis=float((fourth_C[alive] / variance**2).mean()),
    )


def divergence(of_samples: Spread, local_batch: int, global_batch: int) -> dict[str, float]:
    """RMS over channels and batches of a local batch's (mean - mu) / sigma and (variance - sigma^2) / sigma^2.

    With k = 1/b - 1/B, b of B samples without replacement: E[dm^2] = Var(m) k, and since the local variance is about
    the local mean, v - sigma^2 = dr - dm^2: E = Var(r) k + 3 Var(m)^2 k^2 - 2 Cov(r, (m - mu)^2) k / b.
    """
    k = 1 / local_batch - 1 / global_batch
    of_variance = of_samples.square * k + 3 * of_samples.mean_fourth * k * k - 2 * of_samples.cross * k / local_batch
    return {"mean": math.sqrt(of_samples.mean * k), "variance": math.sqrt(max(of_variance, 0.0))}


def independent_rows(of_samples: Spread, local_batch: int, global_batch: int) -> dict[str, float]:
    """The baseline, which takes every pixel for independent: sigma^2 / rows, and (kurtosis - 1) sigma^4 / rows."""
    k = (1 / local_batch - 1 / global_batch) / of_samples.rows
    return {"mean": math.sqrt(k), "variance": math.sqrt(max(of_samples.kurtosis - 1, 0.0) * k)}


def rms_difference(m_NC: Values, q_NC: Values, of_all_m_NC: Values, of_all_q_NC: Values, b: int) -> dict[str, float]:
    """Mean over channels and local batches of the squared differences whose RMS ``divergence`` predicts.

    ``m_NC`` and ``q_NC`` are of the forward pass in which neighbouring ``b`` samples were normalised together, the
    others of the pass in which all were.
    """
    mu = of_all_m_NC.mean(axis=0)
    variance = of_all_q_NC.mean(axis=0) - mu * mu
    alive = variance > _DEAD
    if not alive.any():
        return dict.fromkeys(STATISTICS, 0.0)
    means = m_NC.reshape(-1, b, m_NC.shape[1]).mean(axis=1)
    variances = q_NC.reshape(-1, b, q_NC.shape[1]).mean(axis=1) - means * means
    of_means = ((means - mu) ** 2)[:, alive] / variance[alive]
    of_variances = ((variances - variance)[:, alive] / variance[alive]) ** 2
    return {"mean": float(of_means.mean()), "variance": float(of_variances.mean())}
