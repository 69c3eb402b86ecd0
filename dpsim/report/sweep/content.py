"""The content of a sweep's report."""

from __future__ import annotations

from dpsim.records.comparison import Comparison
from dpsim.report.content import Card, Content, Facts
from dpsim.report.sweep import batch_norm, devices, local_batch, settings, threshold
from dpsim.report.sweep.facts import RULES
from dpsim.report.sweep.tables import group_title, score_tables
from dpsim.report.sweep.warnings import warnings
from dpsim.report.table import Table
from dpsim.report.terminal import TerminalReport

REPORTS = {
    "fusion-threshold": threshold.REPORT,
    "devices": devices.REPORT,
    "local-batch": local_batch.REPORT,
    "batch-norm": batch_norm.REPORT,
    "settings": settings.REPORT,
}
"""What reports say to the questions of ``dpsim.harness.sweep.questions``."""


def content(comparison: Comparison, facts: Facts, environment: Facts) -> Content:
    """Return what the report of a sweep says."""
    report = REPORTS[comparison.experiment.question]
    return Content(
        name=comparison.experiment.name,
        heading=f"{comparison.experiment.name}: predicted, then measured",
        question=report.question(comparison),
        answers=answers(comparison),
        cards=tuple(
            Card(
                title=group_title(group),
                tiles=report.tiles(comparison, group),
            )
            for group in comparison.groups
        ),
        tables=tables(comparison),
        warnings=warnings(comparison),
        facts=facts,
        environment=environment,
        rules=RULES if not comparison.drift_measured else RULES + report.rules,
    )


def answers(comparison: Comparison) -> tuple[str, ...]:
    """Return the answers of a sweep, in sentences."""
    return REPORTS[comparison.experiment.question].answers(comparison)


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the points, the scores, and what overlap does."""
    report = REPORTS[comparison.experiment.question]
    return report.points(comparison), *score_tables(comparison, report)


def for_terminal(comparison: Comparison) -> TerminalReport:
    """Return what ``rich.print`` shows of a sweep."""
    return TerminalReport(tables=tables(comparison), warnings=warnings(comparison), answers=answers(comparison))
