"""The tables of a reproduction: digests, differences and drift."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.records.reproduce import Configuration, Difference, MeasuredDrift, PredictedDrift, ReproduceRecord, Run
from dpsim.report.table import Column, Table, table
from dpsim.report.words import digits
from dpsim.units import format_size

ALL_RUNS = "Digests of all runs"
_SHOWN = 12
"""Digits of a digest that a table shows."""


def modes(record: ReproduceRecord) -> dict[str, list[Run]]:
    """Return the runs by the name of their mode, in the order of the reproduction's batch-norm modes."""
    groups: dict[str, list[Run]] = {}
    for run in sorted(record.runs, key=lambda run: record.reproduction.batch_norms.index(run.configuration.batch_norm)):
        groups.setdefault(mode_name(run.configuration), []).append(run)
    return groups


def mode_name(configuration: Configuration) -> str:
    """Return ``batch norm leaf, 8 leaves`` or ``batch norm local, plain sums``."""
    sums = f"{configuration.leaves} leaves" if configuration.promised else "plain sums"
    return f"batch norm {configuration.batch_norm}, {sums}"


def place(difference: Difference) -> str:
    """Return the first tensor that differs, with its first element that differs."""
    element = f"[{', '.join(map(str, difference.element))}]" if difference.element else ""
    return difference.tensor + element


def span(values: Sequence[float]) -> str:
    """Return one number, or the range of several."""
    low, high = digits(min(values), 3), digits(max(values), 3)
    return low if low == high else f"{low} to {high}"


def drifts(record: ReproduceRecord) -> list[tuple[PredictedDrift, list[MeasuredDrift]]]:
    """Return each prediction of drift with the measurements of the same mode and device count."""
    points = record.predictions.points if record.predictions is not None else ()
    return [
        (point, [drift for drift in record.drift if record.predicted_drift(drift.configuration) == point])
        for point in points
    ]


def _devices(configuration: Configuration) -> str:
    return configuration.layout or str(configuration.devices)


def _threshold(configuration: Configuration) -> str:
    return format_size(configuration.fusion_threshold_bytes)


def counts_table(record: ReproduceRecord) -> Table:
    """Return, for each number of devices, how many of its runs have the bits of one device."""
    sections = {}
    for name, runs in modes(record).items():
        by_count: dict[int, list[Run]] = {}
        for run in sorted(runs, key=lambda run: run.configuration.devices):
            by_count.setdefault(run.configuration.devices, []).append(run)
        sections[name] = list(by_count.values())

    def results(runs: Sequence[Run]) -> set[int]:
        return {run.trajectory for run in runs}

    def digest(runs: Sequence[Run], name: str) -> str:
        return str(getattr(record.trajectories[runs[0].trajectory], name))[:_SHOWN] if len(results(runs)) == 1 else ""

    columns: tuple[Column[list[Run]], ...] = (
        Column(head="devices", cell=lambda runs: str(runs[0].configuration.devices)),
        Column(head="runs", cell=lambda runs: str(len(runs))),
        Column(head="as on 1 device", cell=lambda runs: f"{sum(map(record.identical, runs))} of {len(runs)}"),
        Column(head="different results", cell=lambda runs: str(len(results(runs)))),
        Column(head="digest", cell=lambda runs: digest(runs, "digest"), left=True),
        Column(head="losses", cell=lambda runs: digest(runs, "losses_digest"), left=True),
    )
    return table(
        title="Digests by number of devices",
        columns=columns,
        sections=sections,
        note="Over all thresholds, algorithms and overlaps. The digest is shown where all runs have the same.",
    )


def digests_table(record: ReproduceRecord) -> Table:
    """Return every run with its digests."""

    def sent(run: Run, text: str) -> str:
        return text if run.configuration.devices > 1 else ""

    columns: tuple[Column[Run], ...] = (
        Column(head="devices", cell=lambda run: _devices(run.configuration)),
        Column(head="threshold", cell=lambda run: sent(run, _threshold(run.configuration))),
        Column(head="algorithm", cell=lambda run: sent(run, run.configuration.algorithm), left=True),
        Column(head="overlap", cell=lambda run: sent(run, run.configuration.overlap), left=True),
        Column(head="digest", cell=lambda run: record.trajectories[run.trajectory].digest[:_SHOWN], left=True),
        Column(head="losses", cell=lambda run: record.trajectories[run.trajectory].losses_digest[:_SHOWN], left=True),
        Column(head="against 1 device", cell=lambda run: _verdict(record, run), left=True),
    )
    return table(
        title=ALL_RUNS,
        columns=columns,
        sections=modes(record),
        strong=lambda run: run.configuration.promised and not record.identical(run),
        note=f"The first {_SHOWN} digits of the SHA-256 of the trained state and of all losses.",
    )


def _verdict(record: ReproduceRecord, run: Run) -> str:
    difference = record.difference(run)
    if not run.ranks_agree and (run.configuration.devices == 1 or difference is None):
        return "ranks differ"
    if run.configuration.devices == 1:
        return ""
    if record.identical(run):
        return "identical"
    if difference is None:
        return "other digest"
    return f"step {difference.step}, {place(difference)}: {difference.cause}"


@dataclass(frozen=True, kw_only=True)
class _DifferenceRow:
    configuration: Configuration
    difference: Difference


def differences_table(record: ReproduceRecord) -> Table:
    """Return where every trajectory that differs from its reference first does."""
    sections = {}
    for name, runs in modes(record).items():
        rows: dict[int, _DifferenceRow] = {}
        for run in runs:
            difference = record.difference(run)
            if difference is not None:
                rows.setdefault(run.trajectory, _DifferenceRow(configuration=run.configuration, difference=difference))
        if rows:
            sections[name] = list(rows.values())
    return table(
        title="Where they first differ",
        columns=(
            Column(head="devices", cell=lambda row: _devices(row.configuration)),
            Column(head="threshold", cell=lambda row: _threshold(row.configuration)),
            Column(head="algorithm", cell=lambda row: row.configuration.algorithm, left=True),
            Column(head="step", cell=lambda row: str(row.difference.step)),
            Column(head="first tensor", cell=lambda row: place(row.difference), left=True),
            Column(head="ULPs", cell=lambda row: f"{row.difference.ulps:,}"),
            Column(head="relative", cell=lambda row: f"{row.difference.relative:.2g}"),
            Column(head="most ULPs", cell=lambda row: f"{row.difference.max_ulps:,}"),
            Column(
                head="elements", cell=lambda row: f"{row.difference.elements_differing} of {row.difference.elements}"
            ),
            Column(head="tensors", cell=lambda row: f"{row.difference.tensors_differing} of {row.difference.tensors}"),
            Column(head="cause", cell=lambda row: str(row.difference.cause), left=True),
        ),
        sections=sections,
        note="The first element that differs in the first tensor that differs, in the order in which a step makes "
        "tensors: running statistics, the loss, then layer by layer backwards. ULPs: how many floating-point numbers "
        "the two values are apart; most ULPs: the largest in that tensor. Elements of that tensor and tensors: how "
        "many differ after that step. Runs with the same bits are shown once.",
    )


@dataclass(frozen=True, kw_only=True)
class _DriftRow:
    predicted: PredictedDrift
    measured: list[MeasuredDrift]

    def statistics(self) -> str:
        values = [drift.statistics for drift in self.measured if drift.statistics is not None]
        return span(values) if values else ""


def drift_table(record: ReproduceRecord) -> Table:
    """Return the measured and the predicted drift."""
    sections: dict[str, list[_DriftRow]] = {}
    for predicted, measured in drifts(record):
        if measured:
            row = _DriftRow(predicted=predicted, measured=measured)
            sections.setdefault(f"batch norm {predicted.batch_norm}", []).append(row)
    return table(
        title="Drift from one device",
        columns=(
            Column(head="devices", cell=lambda row: str(row.predicted.devices)),
            Column(head="parameters", cell=lambda row: span([drift.parameters for drift in row.measured])),
            Column(head="predicted", cell=lambda row: digits(row.predicted.parameters, 3)),
            Column(head="batch-norm means", cell=_DriftRow.statistics),
            Column(head="predicted", cell=lambda row: digits(row.predicted.statistics, 3)),
            Column(head="last loss", cell=lambda row: span([drift.loss for drift in row.measured])),
        ),
        sections=sections,
        note="Parameters: |w_n - w_1| / |w_1| after the last step, predicted from rounding as a random walk (which "
        "no longer holds once a rectifier or a maximum switches). "
        "Batch-norm means: the difference between a device's mean and the whole batch's, in the first batch norm "
        "before training, as a root mean square over the first 16 batches, in standard deviations of a sample; "
        "predicted as the square root of 1/b - 1/B. Last loss: relative difference. Ranges are over thresholds, "
        "algorithms and overlaps.",
    )
