"""A study of training quality as data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from dpsim.codec import to_builtins
from dpsim.records.quality_results import QualityResults
from dpsim.report.saved.result import SavedResult
from dpsim.report.words import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

_OF_A_RUN = ("final_loss", "training_set_loss", "test_loss", "test_accuracy")


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SavedQuality(SavedResult):
    """A study of what local batch, batch norm and global batch do to training; a point is a prediction."""

    kind: ClassVar[str] = "quality"
    results: QualityResults

    @property
    def title(self) -> str:
        """What was studied, in how many trainings, and until when."""
        record = self.results.record
        return (
            f"training quality, study {record.predictions.study.name}: {counted(len(self.points()), 'point')}, "
            f"{counted(len(record.runs), 'training')}, measured until {record.measured_until}"
        )

    def points(self) -> list[dict[str, Any]]:
        """Return a row for each value that was fitted or predicted, beside what was measured."""
        return [*self._gaps(), *self._divergences(), *self._steps()]

    def samples(self) -> pd.DataFrame:
        """Return a row for each training: its setting, and its losses and accuracy at the end."""
        from dpsim.report.frames import table

        rows = [
            to_builtins(run.case)
            | {name: getattr(run, name) for name in _OF_A_RUN}
            | {"target_loss": run.case.target_loss or None}
            for run in self.results.record.runs
        ]
        return table(rows, self.columns("samples"))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the first of what the study has: the gap of batch norm, the divergence, or the steps to a target."""
        from dpsim.report.figures import quality
        from dpsim.report.figures.style import on_axes

        results = self.results
        if results.gap:
            return on_axes(ax, lambda axis: quality.gap_panel(axis, results.gap[0]))
        if results.divergence:
            return on_axes(ax, lambda axis: quality.divergence_panel(axis, results.divergence[0]))
        return on_axes(ax, lambda axis: quality.steps_panel(axis, results.steps_to_target[0]))

    def _gaps(self) -> Iterator[dict[str, Any]]:
        for result in self.results.gap:
            of_all = {"model": result.study.model, "dataset": result.study.dataset}
            for point in result.points:
                yield _row(
                    of_all | {"global_batch": result.study.global_batch, "local_batch": point.local_batch},
                    "gap",
                    point.held_out,
                    point.predicted,
                    point.gap.mean,
                )

    def _divergences(self) -> Iterator[dict[str, Any]]:
        for result in self.results.divergence:
            of_all = {"model": result.study.model, "dataset": result.study.dataset}
            for point, measured in zip(result.points, result.measured, strict=True):
                of_point = {
                    "global_batch": result.study.global_batch,
                    "local_batch": point.local_batch,
                    "layer": point.layer,
                    "statistic": point.statistic,
                }
                yield _row(of_all | of_point, "divergence", True, point.predicted, measured)

    def _steps(self) -> Iterator[dict[str, Any]]:
        for result in self.results.steps_to_target:
            study = result.study
            of_all = {"model": study.model, "dataset": study.dataset, "target_loss": study.target_loss}
            for point in result.points:
                of_point = of_all | {"global_batch": point.global_batch}
                yield _row(of_point, "steps_to_target", point.held_out, point.predicted, point.median)


def _row(
    setting: dict[str, Any], measure: str, held_out: bool, predicted: float | None, measured: float | None
) -> dict[str, Any]:
    error = predicted / measured - 1 if predicted is not None and measured else None
    names = ("model", "dataset", "global_batch", "local_batch", "target_loss", "layer", "statistic")
    values = {"held_out": held_out, "predicted": predicted, "measured": measured, "error": error}
    return {"measure": measure} | {name: setting.get(name) for name in names} | values
