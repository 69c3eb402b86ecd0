"""The content of a sweep's report."""

from __future__ import annotations

from pathlib import Path

from dpsim.records.comparison import Comparison, Group
from dpsim.registry import Registry
from dpsim.report.content import Card, Content, Facts, Tile
from dpsim.report.quality import RULES as QUALITY_RULES
from dpsim.report.quality import answers as quality_answers
from dpsim.report.quality import tables as quality_tables
from dpsim.report.sweep import batch_norm, devices, local_batch, settings, threshold
from dpsim.report.sweep.facts import RULES
from dpsim.report.sweep.question import QuestionReport
from dpsim.report.sweep.reliability import disturbance, nothing_said
from dpsim.report.sweep.tables import errors_sentence, group_title, own_runtime_sentence, score_tables
from dpsim.report.sweep.target import time_to_target
from dpsim.report.sweep.warnings import warnings
from dpsim.report.table import Table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import percent

REPORTS: Registry[QuestionReport] = Registry("question", QuestionReport, group="dpsim.question_reports")
"""What reports say to the questions of ``dpsim.harness.sweep.questions``."""
for _module in (threshold, devices, local_batch, batch_norm, settings):
    REPORTS.register(_module.REPORT)


def content(comparison: Comparison, facts: Facts, environment: Facts) -> Content:
    """Return what the report of a sweep says."""
    report = REPORTS.find(comparison.experiment.question)
    return Content(
        name=comparison.experiment.name,
        heading=f"{_title(comparison)}: predicted, then measured",
        question=report.question(comparison),
        answers=answers(comparison),
        cards=tuple(Card(title=group_title(group), tiles=tiles(comparison, group)) for group in comparison.groups),
        tables=tables(comparison),
        warnings=warnings(comparison),
        facts=facts,
        environment=environment,
        rules=(
            *RULES,
            *(report.rules if comparison.drift_measured else ()),
            *(QUALITY_RULES if comparison.quality is not None else ()),
        ),
    )


def _title(comparison: Comparison) -> str:
    """Return the experiment's name, or what PyTorch's DDP trained."""
    experiment = comparison.experiment
    return f"{Path(experiment.script).name} under PyTorch's DDP" if experiment.script else experiment.name


def answers(comparison: Comparison) -> tuple[str, ...]:
    """Return the answers of a sweep, in sentences, of its times and then of the quality of training."""
    report = REPORTS.find(comparison.experiment.question)
    of_times = (*(answer(comparison, group) for group in comparison.groups), *report.more_answers(comparison))
    if comparison.quality is None:
        return of_times
    return (*of_times, *quality_answers(comparison.quality), *time_to_target(comparison))


def answer(comparison: Comparison, group: Group) -> str:
    """Return the verdict on one group, with the numbers that support it."""
    if nothing := nothing_said(comparison, group):
        return f"On {group_title(group)}, {nothing}"
    verdict = REPORTS.find(comparison.experiment.question).answer(comparison, group)
    return f"{verdict} {errors_sentence(group)}" + own_runtime_sentence(comparison.members(group))


def tiles(comparison: Comparison, group: Group) -> tuple[Tile, ...]:
    """Return the numbers of a group that are worth seeing at first sight."""
    report = REPORTS.find(comparison.experiment.question)
    if disturbance(comparison, group):
        of_times: tuple[Tile, ...] = (Tile(value="disturbed", label="nothing can be said; run the sweep again"),)
    else:
        of_times = report.tiles(comparison, group)
    baseline = f"the best baseline's is {percent(group.step.null_median_abs_error)}"
    error = Tile(value=percent(group.step.median_abs_error), label=f"median error; {baseline}")
    return *of_times, error, *report.more_tiles(comparison, group)


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """Return the points, the scores, and what overlap does."""
    report = REPORTS.find(comparison.experiment.question)
    of_quality = quality_tables(comparison.quality) if comparison.quality is not None else ()
    return report.points(comparison), *score_tables(comparison, report), *of_quality


def for_terminal(comparison: Comparison) -> TerminalReport:
    """Return all of a sweep as ``rich.print`` shows it; ``Summary`` is its short form."""
    return TerminalReport(tables=tables(comparison), warnings=warnings(comparison), answers=answers(comparison))
