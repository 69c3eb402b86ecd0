"""Means over seeds with Student's 95 % intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from dpsim.errors import ConfigError
from dpsim.records.quality_results import MeanInterval


def mean_interval(values: Sequence[float]) -> MeanInterval:
    """The mean and its 95 % interval by Student's t, one value a seed. Raises ``ConfigError`` for fewer than two."""
    if len(values) < 2:
        raise ConfigError(f"an interval from {len(values)} seeds", allowed="2 or more")
    from scipy.stats import t

    mean = float(np.mean(values))
    half = float(t.ppf(0.975, len(values) - 1)) * float(np.std(values, ddof=1)) / math.sqrt(len(values))
    return MeanInterval(mean=mean, low=mean - half, high=mean + half)
