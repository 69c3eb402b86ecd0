"""What a curve of local batches tells: from which one a device is busy, and from which one communication hides."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dpsim.records.comparison import ComparedPoint

BUSY = 0.9
"""The share of a device's best samples/s from which on it counts as busy."""
HIDDEN = 0.05
"""The share of a step up to which exposed communication counts as hidden."""
Value = Callable[[ComparedPoint], float]


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A local batch as it was measured and predicted; ``None``: at no batch of the curve."""

    measured: float | None
    predicted: float | None


def busy_from(points: Sequence[ComparedPoint]) -> Measured:
    """The smallest local batch from which on samples/s stay at 90 % of the best of the curve or more."""

    def of(step_s: Value) -> float | None:
        rates = [(point.local_batch, point.global_batch / step_s(point)) for point in points]
        best = max(rate for _, rate in rates)
        return _from(rates, lambda rate: rate >= BUSY * best)

    return Measured(
        measured=of(lambda point: point.measured_step_s), predicted=of(lambda point: point.predicted_step_s)
    )


def hidden_from(points: Sequence[ComparedPoint]) -> Measured:
    """The smallest local batch from which on at most 5 % of the step are exposed communication."""

    def of(exposed_s: Value, step_s: Value) -> float | None:
        shares = [(point.local_batch, exposed_s(point) / step_s(point)) for point in points]
        return _from(shares, lambda share: share <= HIDDEN)

    return Measured(
        measured=of(lambda point: point.exposed_communication_s, lambda point: point.measured_step_s),
        predicted=of(lambda point: point.predicted_exposed_communication_s, lambda point: point.predicted_step_s),
    )


def _from(values: Sequence[tuple[float, float]], fulfilled: Callable[[float], bool]) -> float | None:
    """The smallest batch from which on every value is as wanted."""
    smallest = None
    for batch, value in sorted(values, reverse=True):
        if not fulfilled(value):
            break
        smallest = batch
    return smallest
