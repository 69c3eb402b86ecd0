"""The lines of the table of accuracy that are about the quality of training."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

import numpy as np

from dpsim.experiments.accuracy.lines import Line
from dpsim.harness.quality.study import read_results, study_quality
from dpsim.progress import Progress
from dpsim.records.quality import read_study
from dpsim.records.quality_results import DivergenceResult, GapResult, StepsResult
from dpsim.report.quality.write import write_quality_report

_PREDICTED = "predicted"


def study(folder: Path, progress: Progress, *, quick: bool) -> None:
    """Run the study of quality in a folder, or go on with it, and write its report."""
    with resources.as_file(
        resources.files("dpsim.experiments.quality") / f"{'quick' if quick else 'full'}.toml"
    ) as path:
        results = study_quality(read_study(path), folder, progress)
    write_quality_report(folder, results)


def quality_lines(folder: Path) -> Iterator[Line]:
    """Yield the lines of a finished study; none without one."""
    results = read_results(folder)
    if results is None:
        return
    yield from _gap_lines(results.gap)
    yield from _divergence_lines(results.divergence)
    yield from _steps_lines(results.steps_to_target)


def _line(
    where: str, quantity: str, errors: Sequence[float], most: float, studies: int, nulls: dict[str, float]
) -> Line:
    value = float(np.median(errors))
    best = min(nulls, key=lambda name: nulls[name])
    return Line(
        where=where,
        quantity=quantity,
        value=value,
        target=f"{most:.0%} or less, below the nulls",
        met=value <= most and value < nulls[best],
        points=len(errors),
        calibrations=studies,
        null=nulls[best],
        note=f"worst {max(errors):.1%}; best null: {best}",
    )


def _gap_lines(results: Sequence[GapResult]) -> Iterator[Line]:
    judged = [result for result in results if result.errors]
    together = {
        name: [error for result in judged for error in result.errors[name]]
        for name in (judged[0].errors if judged else ())
    }
    if not together:
        return
    nulls = {name: float(np.median(together[name])) for name in ("no gap", "linear interpolation in log b")}
    yield _line("quality", "gap of batch norm at held-out batches", together[_PREDICTED], 0.25, len(judged), nulls)


def _divergence_lines(results: Sequence[DivergenceResult]) -> Iterator[Line]:
    errors = [error for result in results for error in result.errors()]
    if errors:
        rows = [error for result in results for error in result.errors("independent_rows")]
        nulls = {"independent rows": float(np.median(rows))}
        yield _line("quality", "divergence of statistics at every batch norm", errors, 0.2, len(results), nulls)


def _steps_lines(results: Sequence[StepsResult]) -> Iterator[Line]:
    for outside, most in ((False, 0.1), (True, 0.2)):
        errors: list[float] = []
        nulls: dict[str, list[float]] = {}
        for result in results:
            chosen = {p.global_batch for p in result.points if p.held_out and p.outside == outside and p.median}
            for index, batch in enumerate(result.predicted.batches):
                if batch in chosen:
                    errors.append(result.errors[_PREDICTED][index])
                    for name in (name for name in result.errors if name != _PREDICTED):
                        nulls.setdefault(name, []).append(result.errors[name][index])
        if errors:
            medians = {name: float(np.median(values)) for name, values in nulls.items()}
            where = "one octave outside the fitted batches" if outside else "inside the fitted batches"
            yield _line("quality", f"steps to a target loss, {where}", errors, most, len(results), medians)
