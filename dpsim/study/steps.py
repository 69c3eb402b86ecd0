"""A visit to a training: steps that warm up, then steps that count, each as long as the slowest rank takes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from dpsim.runtime.step import StepOutcome
    from dpsim.runtime.trainer import Trainer
    from dpsim.study.disturbance import Watcher

WARM_UP_STEPS, COUNTED_STEPS = 2, 6
"""Steps of a visit. The first ones find another training's data in the caches."""
_MOST_STEPS = 256


def train(trainer: Trainer, watcher: Watcher) -> list[StepOutcome]:
    """Train for the steps of a visit, watched; a training that has done many steps begins anew first.

    A model that has learned its data computes with other numbers: its gradients become zero, and from them momentum
    becomes subnormal, with which some processors compute several times as slowly. What is profiled does more steps
    than what is measured, so that its times would be others.
    """
    steps = WARM_UP_STEPS + COUNTED_STEPS
    if trainer.runner.steps + steps > _MOST_STEPS:
        trainer.begin_anew()
    watcher.begin()
    outcomes = []
    for _ in range(steps):
        outcomes.append(trainer.step())
        watcher.sample_ends()
    return outcomes


def step_times_s(end_s: Sequence[Sequence[float]], warm_up: int = WARM_UP_STEPS) -> list[float]:
    """Seconds of every step of a visit after the first ``warm_up``: max_r end(r, k) - max_r end(r, k - 1).

    ``end_s[r][k]`` is when rank r ended step k, on a clock that all ranks share.
    """
    times: list[float] = np.diff(np.max(end_s, axis=0))[warm_up - 1 :].tolist()
    return times
