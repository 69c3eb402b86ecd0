"""What a study of training quality comes to: derived from its record, for reports and programs; never stored."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from dpsim.codec import Noun
from dpsim.records.convergence import ConvergenceFile
from dpsim.records.quality import DivergencePoint, DivergenceStudy, GapStudy, PredictedCurve, QualityRecord, StepsStudy


class MeanInterval(Noun, frozen=True):
    """A mean over seeds with its 95 % interval."""

    mean: float
    low: float
    high: float

    @property
    def visible(self) -> bool:
        """Whether the interval leaves 0 out."""
        return self.low > 0 or self.high < 0


class GapPoint(Noun, frozen=True):
    """A local batch: gaps in the log of the training loss and of the test loss, and the accuracy itself.

    ``training_set_gap`` is of the whole training set, evaluated at the end with running statistics.
    """

    local_batch: int
    held_out: bool
    predicted: float | None
    gap: MeanInterval
    test_gap: MeanInterval
    training_set_gap: MeanInterval
    accuracy: MeanInterval
    training_loss: MeanInterval


class WayOut(Noun, frozen=True):
    """A model whose norm does not depend on the batch, against batch norm with the global batch's statistics."""

    model: str
    gap: MeanInterval
    test_gap: MeanInterval
    accuracy: MeanInterval


class GapResult(Noun, frozen=True):
    """The gap of one study; ``errors`` are relative, at the held-out batches, by name of the prediction."""

    study: GapStudy
    predicted: PredictedCurve
    points: tuple[GapPoint, ...]
    accuracy: MeanInterval
    others: tuple[WayOut, ...]
    errors: dict[str, tuple[float, ...]]


class DivergenceResult(Noun, frozen=True):
    """The measured divergence beside each predicted point."""

    study: DivergenceStudy
    points: tuple[DivergencePoint, ...]
    measured: tuple[float, ...]

    def errors(self, prediction: str = "predicted", statistic: str | None = None) -> list[float]:
        """Relative errors of ``predicted``, ``unscaled`` or ``independent_rows``, of one statistic or of both."""
        return [
            abs(getattr(point, prediction) / value - 1)
            for point, value in zip(self.points, self.measured, strict=True)
            if value > 0 and statistic in (None, point.statistic)
        ]


class StepsPoint(Noun, frozen=True):
    """Steps to the target at a global batch: of each seed that reached it, and their median."""

    global_batch: int
    held_out: bool
    outside: bool
    predicted: float | None
    steps: tuple[float, ...]
    seeds: int

    @property
    def median(self) -> float | None:
        """The median, ``None`` where not every seed reached the target."""
        return statistics.median(self.steps) if len(self.steps) == self.seeds else None


class StepsResult(Noun, frozen=True):
    """Steps to one target; ``noise_interval`` is of B_noise over resampled seeds.

    ``gradient_noise_batch`` is tr(Sigma) / |G|^2 on the way to the target.
    """

    study: StepsStudy
    predicted: PredictedCurve
    points: tuple[StepsPoint, ...]
    errors: dict[str, tuple[float, ...]]
    gradient_noise_batch: float | None
    noise_interval: tuple[float, float] | None


class QualityResults(Noun, frozen=True):
    """All results of a record, in the order of its studies."""

    record: QualityRecord
    gap: tuple[GapResult, ...]
    divergence: tuple[DivergenceResult, ...]
    steps_to_target: tuple[StepsResult, ...]
    convergence: ConvergenceFile


def median(values: Sequence[float]) -> float | None:
    """The median, ``None`` of nothing."""
    return statistics.median(values) if values else None
