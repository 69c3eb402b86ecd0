"""The steps of a visit to a training that is timed."""

from __future__ import annotations

from dpsim.runtime.step import StepOutcome
from dpsim.runtime.trainer import Trainer
from dpsim.study.steps import COUNTED_STEPS, WARM_UP_STEPS

_MOST_STEPS = 256


def train(trainer: Trainer) -> list[StepOutcome]:
    """Train for the steps of a visit; a training that has done many steps begins anew first.

    A model that has learned its data computes with other numbers: its gradients become zero, and from them momentum
    becomes subnormal, with which some processors compute several times as slowly. What is profiled does more steps
    than what is measured, so that its times would be others.
    """
    steps = WARM_UP_STEPS + COUNTED_STEPS
    if trainer.runner.steps + steps > _MOST_STEPS:
        trainer.begin_anew()
    return [trainer.step() for _ in range(steps)]
