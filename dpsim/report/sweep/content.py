"""The content of a sweep's report."""

from __future__ import annotations

from dpsim.records.comparison import Comparison
from dpsim.report.content import Card, Content, Facts
from dpsim.report.sweep import scaling, threshold
from dpsim.report.sweep.facts import RULES
from dpsim.report.sweep.tables import score_tables
from dpsim.report.sweep.warnings import warnings
from dpsim.report.table import Table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import devices_name, network_name


def content(comparison: Comparison, facts: Facts, environment: Facts) -> Content:
    """Return what the report of a sweep says."""
    kind = threshold if comparison.scaling is None else scaling
    return Content(
        name=comparison.experiment.name,
        heading=f"{comparison.experiment.name}: predicted, then measured",
        question=kind.question(comparison),
        answers=answers(comparison),
        cards=tuple(
            Card(
                title=f"{network_name(group)}, {devices_name(group.devices)}" if group.devices else network_name(group),
                tiles=kind.tiles(comparison, group),
            )
            for group in comparison.groups
        ),
        tables=tables(comparison),
        warnings=warnings(comparison),
        facts=facts,
        environment=environment,
        rules=RULES if not comparison.drift_measured else RULES + scaling.RULES,
    )


def answers(comparison: Comparison) -> tuple[str, ...]:
    """Return the answers of a sweep, in sentences."""
    return threshold.answers(comparison) if comparison.scaling is None else scaling.answers(comparison)


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the points, the scores, and what overlap does."""
    points = threshold.points_table if comparison.scaling is None else scaling.points_table
    return points(comparison), *score_tables(comparison)


def for_terminal(comparison: Comparison) -> TerminalReport:
    """Return what ``rich.print`` shows of a sweep."""
    return TerminalReport(tables=tables(comparison), warnings=warnings(comparison), answers=answers(comparison))
