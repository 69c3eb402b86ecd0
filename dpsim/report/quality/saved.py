"""A study of training quality as data: what it says of local batch, batch norm and global batch; a point is a
prediction."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from dpsim.codec import to_builtins
from dpsim.records.quality_results import QualityResults
from dpsim.report.charts import Lines
from dpsim.report.quality.charts import divergence_panel, gap_panel, steps_panel
from dpsim.report.saved import Samples
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted

_OF_A_RUN = ("final_loss", "training_set_loss", "test_loss", "test_accuracy")
_SETTING = ("model", "dataset", "global_batch", "local_batch", "target_loss", "layer", "statistic")


def title(results: QualityResults) -> str:
    """Return what was studied, in how many trainings, and until when."""
    record = results.record
    return (
        f"training quality, study {record.predictions.study.name}: {counted(len(points(results)), 'point')}, "
        f"{counted(len(record.runs), 'training')}, measured until {record.measured_until}"
    )


def points(results: QualityResults) -> list[dict[str, Any]]:
    """Return a row for each value that was fitted or predicted, beside what was measured."""
    return list(_points(results))


def _points(results: QualityResults) -> Iterator[dict[str, Any]]:
    for gap in results.gap:
        for batch in gap.points:
            yield _row("gap", gap.study, batch, batch.held_out, batch.predicted, batch.gap.mean)
    for divergence in results.divergence:
        for layer, measured in zip(divergence.points, divergence.measured, strict=True):
            yield _row("divergence", divergence.study, layer, True, layer.predicted, measured)
    for steps in results.steps_to_target:
        for point in steps.points:
            yield _row("steps_to_target", steps.study, point, point.held_out, point.predicted, point.median)


def _row(
    measure: str, study: object, point: object, held_out: bool, predicted: float | None, measured: float | None
) -> dict[str, Any]:
    """Return the row of a point, whose setting is that of its study where the point has none."""
    fields = {name: getattr(point, name, getattr(study, name, None)) for name in _SETTING}
    error = predicted / measured - 1 if predicted is not None and measured else None
    values = {"held_out": held_out, "predicted": predicted, "measured": measured, "error": error}
    return {"measure": measure} | fields | values


def samples(results: QualityResults) -> Samples:
    """Return each training: its setting, and its losses and accuracy at the end."""
    rows = [
        to_builtins(run.case)
        | {name: getattr(run, name) for name in _OF_A_RUN}
        | {"target_loss": run.case.target_loss or None}
        for run in results.record.runs
    ]
    return rows, [1] * len(rows), {}


def panel(results: QualityResults) -> Lines:
    """Return the first figure of what the study has: the gap of batch norm, the divergence, or the steps."""
    if results.gap:
        return gap_panel(results.gap[0])
    if results.divergence:
        return divergence_panel(results.divergence[0])
    return steps_panel(results.steps_to_target[0])


def summary(results: QualityResults) -> dict[str, str]:
    """Return the summary of ``--json``."""
    return {"title": title(results)}


def write(folder: Path, results: QualityResults, pages: Collection[str]) -> list[Path]:
    """Write the report; returns the paths. Raises ``ConfigError``."""
    from dpsim.report.quality.write import write_quality_report

    return write_quality_report(folder, results, pages)


def show(results: QualityResults, page: Path | None, _: bool) -> Iterator[Any]:
    """Yield the tables, warnings and answers, and where the report is."""
    from dpsim.report.quality.content import content

    shown = content(results)
    yield TerminalReport(tables=shown.tables, warnings=shown.warnings, answers=shown.answers)
    if page is not None:
        yield f"report: {page}"
