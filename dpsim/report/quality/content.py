"""The report of a study of training quality: its answers, tables and facts."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import replace

from dpsim.records.quality_results import QualityResults
from dpsim.report.content import Card, Content, Facts, Tile, environment_facts
from dpsim.report.quality.sections import (
    divergence_sentences,
    divergence_table,
    gap_sentences,
    gap_table,
    gaps_together,
    others_table,
    steps_sentences,
    steps_table,
)
from dpsim.report.table import Table
from dpsim.report.words import counted, percent

RULES = (
    "Devices are emulated as leaves of one rank: batch norm with B / b leaves takes the statistics that B / b devices "
    "with b samples each take. No number here is a time.",
    "Fitted runs came first; the predictions were then written and hashed, and only then were the others trained.",
    "The gap is in the log of the mean training loss of the last epoch, with batch statistics, paired by seed. "
    "Noisy statistics raise it in every step, so it tells local batches apart where other losses do not; a part of it "
    "is the noise of the forward passes themselves, which an evaluation with running statistics does not have: see the "
    "gap there, in test loss and in accuracy. Intervals are Student's 95 % intervals of the mean over seeds.",
    "The divergence is predicted from the spread of samples in one forward pass with the global batch's statistics, "
    "and scaled at each norm by a pass at one small local batch. It is measured on other batches.",
    "Steps to the target are interpolated in the log of the loss on the whole training set. The gradient noise scale "
    "is from the gradients of the eighths of a global batch and of the whole, each averaged over the training.",
)


_FEW_GAPS = 2
"""Studies of the gap whose every sentence stands at the top of the page; of more, the details stand at the tables."""


def answers(results: QualityResults) -> Iterator[str]:
    """Yield every figure of the study with its baseline, as sentences; of many gaps the main one of each."""
    for gap in results.gap:
        sentences = list(gap_sentences(gap))
        yield from sentences if len(results.gap) <= _FEW_GAPS else sentences[:1]
    yield from gaps_together(results.gap)
    yield from divergence_sentences(results.divergence)
    for steps in results.steps_to_target:
        yield from steps_sentences(steps)


def tables(results: QualityResults) -> tuple[Table, ...]:
    """Return a table for each part of the study, with the sentences that ``answers`` leaves out."""
    of_gaps: list[Table] = []
    for gap in results.gap:
        _, *details = gap_sentences(gap)
        own = [table(gap) for table in (gap_table, others_table) if gap.others or table is gap_table]
        if len(results.gap) > _FEW_GAPS:
            own = [
                replace(table, note=" ".join((*of_table, table.note)))
                for table, of_table in zip(own, (details[:1], details[1:]), strict=False)
            ]
        of_gaps += own
    return (*of_gaps, *map(divergence_table, results.divergence), *map(steps_table, results.steps_to_target))


def _cards(results: QualityResults) -> tuple[Card, ...]:
    """The median errors of what was predicted, over all studies of a kind."""
    errors: dict[str, list[Sequence[float]]] = {
        "gap of batch norm at held-out local batches": [gap.errors.get("predicted", ()) for gap in results.gap],
        "divergence of statistics": [each.errors("predicted") for each in results.divergence],
        "steps to the target at held-out batches": [
            each.errors.get("predicted", ()) for each in results.steps_to_target
        ],
    }
    tiles = []
    for label, studies in errors.items():
        finite = [value for values in studies for value in values if math.isfinite(value)]
        if finite:
            tiles.append(Tile(value=percent(statistics.median(finite)), label=f"{label} ({len(finite)} values)"))
    return (Card(title="Median errors of what was predicted", tiles=tuple(tiles)),) if tiles else ()


def content(results: QualityResults) -> Content:
    """Return what the report says."""
    return Content(
        name=results.record.predictions.study.name,
        heading="What local batch, batch norm and global batch do to the quality of training",
        question="How much worse does training become with small local batches and large global ones, and can it be "
        "predicted?",
        answers=tuple(answers(results)),
        cards=_cards(results),
        tables=tables(results),
        warnings=(),
        rules=RULES,
        facts=_facts(results),
        environment=environment_facts(results.record.environment),
    )


def _facts(results: QualityResults) -> Facts:
    record = results.record
    return (
        ("study", record.predictions.study.name),
        ("trainings", counted(len(record.runs), "run")),
        ("emulation", record.emulation),
        ("predicted at", record.predictions.predicted_at),
        ("predictions' SHA-256", record.predictions_sha256),
        ("measured until", record.measured_until),
    )
