"""The learning rate of each step of a training."""

from __future__ import annotations

from collections.abc import Callable

from dpsim.learning_rate import learning_rate
from dpsim.records.train import TrainConfig


def rate_of(config: TrainConfig, samples: int) -> tuple[int, Callable[[int], float]]:
    """Return the number of steps on so many training samples, and the learning rate of each, counted from 0."""
    plan = config.plan
    steps_per_epoch = -(-samples // plan.global_batch)
    total = config.total_steps(steps_per_epoch)

    def rate(step: int) -> float:
        return learning_rate(
            config.rate_schedule,
            plan.optimizer.learning_rate,
            step,
            global_batch=plan.global_batch,
            steps_per_epoch=steps_per_epoch,
            total_steps=total,
        )

    return total, rate
