"""A reproduction as data: a point for each run, the losses of its steps, a summary, a figure, and a terminal's text."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from dpsim.codec import to_builtins
from dpsim.errors import ConfigError
from dpsim.records.reproduce import ReproduceRecord, Run
from dpsim.report.charts import Panel
from dpsim.report.reproduce.chart import drift_chart
from dpsim.report.reproduce.content import content
from dpsim.report.reproduce.tables import ALL_RUNS
from dpsim.report.saved import Samples
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted
from dpsim.report.write import DRIFT_CAPTION, PAGES, figure, write_content

_MOST_SHOWN = 40


def title(record: ReproduceRecord) -> str:
    """Return what was trained, in how many configurations, and when."""
    of, runs = record.reproduction, counted(len(record.runs), "run")
    results = counted(len(record.trajectories), "different result")
    return f"reproducibility of {of.model} on {of.dataset}: {runs}, {results}, measured from {record.measured_from}"


def points(record: ReproduceRecord) -> list[dict[str, Any]]:
    """Return every run: its configuration and digests, where it first differs from one device, and its drift."""
    return [_point(record, run) for run in record.runs]


def _point(record: ReproduceRecord, run: Run) -> dict[str, Any]:
    trajectory, difference = record.trajectories[run.trajectory], record.difference(run)
    drift = record.measured_drift(run.configuration)
    predicted = record.predicted_drift(run.configuration)
    return dict(to_builtins(run.configuration)) | {
        "promised": run.configuration.promised,
        "digest": trajectory.digest,
        "losses_digest": trajectory.losses_digest,
        "final_loss": trajectory.losses[-1],
        "identical": record.identical(run),
        "first_difference": None if difference is None else to_builtins(difference),
        "parameter_drift": drift.parameters if drift else None,
        "loss_drift": drift.loss if drift else None,
        "statistics_drift": drift.statistics if drift else None,
        "predicted_parameter_drift": predicted.parameters if predicted else None,
        "predicted_statistics_drift": predicted.statistics if predicted else None,
    }


def summary(record: ReproduceRecord) -> dict[str, Any]:
    """Return the summary; ``identical`` says whether all promises were kept (``None``: nothing was promised)."""
    promised = any(run.configuration.promised for run in record.runs)
    saved = record.saved_comparison
    return {
        "identical": record.kept_promises if promised else None,
        "runs": len(record.runs),
        "different_results": len(record.trajectories),
        "digests": {
            run.configuration.batch_norm: record.trajectories[run.trajectory].digest
            for run in record.runs
            if run.configuration.devices == 1
        },
        "predictions_sha256": record.predictions_sha256,
        "against": None if saved is None else to_builtins(saved),
    }


def samples(record: ReproduceRecord) -> Samples:
    """Return each step of each run: its configuration and its loss. Runs are not timed."""
    losses = [record.trajectories[run.trajectory].losses for run in record.runs]
    values = {
        "step": [step for each in losses for step in range(1, len(each) + 1)],
        "loss": np.array([loss for each in losses for loss in each], np.float64),
    }
    return [to_builtins(run.configuration) for run in record.runs], [len(each) for each in losses], values


def panel(record: ReproduceRecord) -> Panel:
    """Return the figure of the drift from one device. Raises ``ConfigError`` where there is none."""
    chart = drift_chart(record)
    if chart is None:
        raise ConfigError(
            "no drift was measured: every configuration is promised to have the bits of one device",
            allowed="a figure of a record with configurations that drift",
            remedy="look at .frame(), whose column identical says which have the same bits",
        )
    return chart.panels[0]


def write(folder: Path, record: ReproduceRecord, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write the page, the Markdown and, where drift was measured, its figure. Raises ``ConfigError``."""
    drawn = figure("drift", "Drift", DRIFT_CAPTION, drift_chart(record))
    return write_content(folder, content(record), [drawn], pages)


def show(record: ReproduceRecord, page: Path | None, _: bool) -> Iterator[Any]:
    """Yield the tables, warnings and answers; of many runs without the table of each."""
    report, many = content(record), len(record.runs) > _MOST_SHOWN
    tables = [table for table in report.tables if table.title != ALL_RUNS or not many]
    yield TerminalReport(tables=tables, warnings=report.warnings, answers=report.answers)
    if many:
        where = "use --output FOLDER or --json" if page is None else "see the report"
        yield f"each of the {len(record.runs)} runs: {where}"
    if page is not None:
        yield f"report: {page}"
