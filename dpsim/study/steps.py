"""A visit to a training: steps that warm up, then steps that count, each as long as the slowest rank takes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

WARM_UP_STEPS, COUNTED_STEPS = 2, 6
"""Steps of a visit. The first ones find another training's data in the caches."""


def step_times_s(end_s: Sequence[Sequence[float]], warm_up: int = WARM_UP_STEPS) -> list[float]:
    """Seconds of every step of a visit after the first ``warm_up``: max_r end(r, k) - max_r end(r, k - 1).

    ``end_s[r][k]`` is when rank r ended step k, on a clock that all ranks share.
    """
    times: list[float] = np.diff(np.max(end_s, axis=0))[warm_up - 1 :].tolist()
    return times
