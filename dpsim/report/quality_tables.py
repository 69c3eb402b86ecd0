"""The tables of a study of training quality."""

from __future__ import annotations

import math

from dpsim.records.quality import (
    DivergencePoint,
    DivergenceResult,
    GapPoint,
    GapResult,
    MeanInterval,
    StepsPoint,
    StepsResult,
)
from dpsim.report.table import Column, Table, table
from dpsim.report.words import digits

EMULATED = "devices are emulated as leaves of one rank"


def gap_table(result: GapResult) -> Table:
    """Return a row for each local batch of a study of the gap."""
    columns: tuple[Column[GapPoint], ...] = (
        Column(head="local batch", cell=lambda point: str(point.local_batch)),
        Column(head="", cell=lambda point: "held out" if point.held_out else "fitted", left=True),
        Column(head="training loss", cell=lambda point: digits(point.training_loss.mean, 3)),
        Column(head="gap", cell=lambda point: _interval(point.gap)),
        Column(head="predicted", cell=lambda point: digits(point.predicted, 3)),
        Column(head="gap, evaluated", cell=lambda point: _interval(point.training_set_gap)),
        Column(head="gap in test loss", cell=lambda point: _interval(point.test_gap)),
        Column(head="accuracy", cell=lambda point: share_text(point.accuracy)),
    )
    return table(
        title="Gap of batch norm",
        columns=columns,
        sections={result.study.name: list(result.points)},
        note="A gap is the log of the loss over that with the global batch's statistics, paired by seed, with its 95 % "
        f"interval. The training loss is that of the last epoch, with batch statistics; evaluated: the training "
        f"set, with running statistics. {EMULATED.capitalize()}.",
    )


def others_table(result: GapResult) -> Table:
    """Return a row for each model without batch norm."""
    columns: tuple[Column[GapPoint], ...] = (
        Column(head="model", cell=lambda other: other.model, left=True),
        Column(head="gap", cell=lambda other: _interval(other.gap)),
        Column(head="gap in test loss", cell=lambda other: _interval(other.test_gap)),
        Column(head="accuracy", cell=lambda other: share_text(other.accuracy)),
    )
    return table(
        title="Instead of batch norm",
        columns=columns,
        sections={result.study.name: list(result.others)},
        note="The same at any local batch. Gaps are against batch norm with the global batch's statistics.",
    )


def divergence_table(result: DivergenceResult) -> Table:
    """Return a row for each statistic of each norm, by local batch."""
    rows = list(zip(result.points, result.measured, strict=True))
    sections = {
        f"local batch {b}": [row for row in rows if row[0].local_batch == b] for b in result.study.local_batches
    }
    columns: tuple[Column[tuple[DivergencePoint, float]], ...] = (
        Column(head="batch norm", cell=lambda row: row[0].layer, left=True),
        Column(head="statistic", cell=lambda row: row[0].statistic, left=True),
        Column(head="measured", cell=lambda row: digits(row[1], 3)),
        Column(head="predicted", cell=lambda row: digits(row[0].predicted, 3)),
        Column(head="unscaled", cell=lambda row: digits(row[0].unscaled, 3)),
        Column(head="independent rows", cell=lambda row: digits(row[0].independent_rows, 3)),
    )
    return table(
        title=f"Divergence of statistics: {result.study.name}",
        columns=columns,
        sections=sections,
        note="RMS over channels and local batches; means in standard deviations, variances in variances. "
        f"{EMULATED.capitalize()}.",
    )


def steps_table(result: StepsResult) -> Table:
    """Return a row for each global batch."""
    columns: tuple[Column[StepsPoint], ...] = (
        Column(head="global batch", cell=lambda point: str(point.global_batch)),
        Column(head="", cell=lambda point: "held out" if point.held_out else "fitted", left=True),
        Column(head="steps, median", cell=lambda point: digits(point.median, 4)),
        Column(head="least", cell=lambda point: digits(min(point.steps, default=math.nan), 4)),
        Column(head="most", cell=lambda point: digits(max(point.steps, default=math.nan), 4)),
        Column(head="predicted", cell=lambda point: digits(point.predicted, 4)),
        Column(head="runs", cell=lambda point: f"{len(point.steps)} of {point.seeds}"),
    )
    study = result.study
    return table(
        title="Steps to target",
        columns=columns,
        sections={result.study.name: list(result.points)},
        note=f"Learning rate {study.learning_rate:g} at batch {study.reference_batch}, growing with the batch; "
        f"momentum {study.momentum:g}; loss on the whole training set.",
    )


def _interval(value: MeanInterval) -> str:
    text = f"{value.mean:.3f} ({value.low:.3f} to {value.high:.3f})"
    return text if value.visible else f"{text}, no gap visible"


def share_text(value: MeanInterval) -> str:
    """Return a share with its interval."""
    return f"{value.mean:.1%} ({value.low:.1%} to {value.high:.1%})"
