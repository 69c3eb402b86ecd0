"""The drift of parameters and statistics from one device, as sentences, a table and a chart, of any record of it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from dpsim.grouping import grouped
from dpsim.records.reproduce import MeasuredDrift, PredictedDrift, ReproduceRecord
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.table import Column, Table, table
from dpsim.report.words import digits

_PARAMETERS = "|w_n - w_1| / |w_1| after the last step"
_MEANS = "error of a device's batch-norm means, in standard deviations"


def drift_chart(record: ReproduceRecord) -> Chart | None:
    """Return, for each mode, a panel of the drift of the parameters, then one of that of its statistics.

    A mode that was measured on one number of devices has no panel: its one dot stands in the table.
    """
    panels = list(_panels(record))
    return Chart(panels=panels, height_in=3.6) if panels else None


def _panels(record: ReproduceRecord) -> Iterator[Lines]:
    measured = [(point, drift) for point, drift in record.drifts() if drift]
    for mode in dict.fromkeys(point.batch_norm for point, _ in measured):
        of_mode = [pair for pair in measured if pair[0].batch_norm == mode]
        of_statistics = [pair for pair in of_mode if pair[0].statistics is not None]
        for pairs, name, subtitle in ((of_mode, "parameters", _PARAMETERS), (of_statistics, "statistics", _MEANS)):
            devices = sorted({point.devices for point, _ in pairs})
            if len(devices) < 2:
                continue
            predicted = [(point.devices, value) for point, _ in pairs if (value := getattr(point, name))]
            dots = [(d.plan.devices, value) for _, ds in pairs for d in ds if (value := getattr(d, name))]
            series = [
                Series(name="predicted", x=[x for x, _ in predicted], y=[y for _, y in predicted], look="predicted"),
                Series(name="measured", x=[x for x, _ in dots], y=[y for _, y in dots], look="measured"),
            ]
            drawn = [value for each in series for value in each.y]
            yield Lines(
                title=f"batch norm {mode}",
                subtitle=subtitle,
                x_label="devices",
                series=series,
                x_ticks={float(count): str(count) for count in devices},
                log_x=True,
                log_y=True,
                x_span=(devices[0] / 1.2, devices[-1] * 1.2),
                y_span=(min(drawn) / 2, max(drawn) * 2) if drawn else None,
                names="legend",
            )


def drift_sentences(predicted: PredictedDrift, measured: Sequence[MeasuredDrift]) -> Iterator[str]:
    """Yield how far parameters and statistics drifted, and how far that was predicted."""
    mode = f"Batch norm {predicted.batch_norm}, {predicted.devices} devices"
    prediction = predicted.reason if predicted.parameters is None else f"predicted {predicted.parameters:.3g}"
    if prediction and measured:
        drift = _span([each.parameters for each in measured])
        yield f"{mode}: parameters drifted by {drift} of their size; {prediction}."
    if predicted.statistics is not None and (statistics := _statistics(measured)):
        yield (
            f"{mode}: the first batch norm's means were off by {_span(statistics)} standard deviations of a sample; "
            f"predicted {predicted.statistics:.3g}."
        )


def drift_table(record: ReproduceRecord) -> Table:
    """Return a row for each number of devices with drift that was measured."""
    measured = ((predicted, runs) for predicted, runs in record.drifts() if runs)
    sections = grouped(measured, lambda row: f"batch norm {row[0].batch_norm}")
    columns: tuple[Column[tuple[PredictedDrift, list[MeasuredDrift]]], ...] = (
        Column(head="devices", cell=lambda row: str(row[0].devices)),
        Column(head="parameters", cell=lambda row: _span([drift.parameters for drift in row[1]])),
        Column(head="predicted", cell=lambda row: digits(row[0].parameters, 3)),
        Column(head="batch-norm means", cell=lambda row: _span(_statistics(row[1]))),
        Column(head="predicted", cell=lambda row: digits(row[0].statistics, 3)),
        Column(head="last loss", cell=lambda row: _span([drift.loss for drift in row[1]])),
    )
    return table(
        title="Drift from one device",
        columns=columns,
        sections=sections,
        note="Parameters: |w_n - w_1| / |w_1| after the last step, predicted from rounding as a random walk (which "
        "no longer holds once a rectifier or a maximum switches). "
        "Batch-norm means: the difference between a device's mean and the whole batch's, in the first batch norm "
        "before training, as a root mean square over the first 16 batches, in standard deviations of a sample; "
        "predicted as the square root of 1/b - 1/B. Last loss: relative difference. Ranges are over thresholds, "
        "algorithms and overlaps.",
    )


def _span(values: Sequence[float]) -> str:
    """Return one number, the range of several, or nothing."""
    texts = [digits(value, 3) for value in (min(values), max(values))] if values else [""]
    return " to ".join(dict.fromkeys(texts))


def _statistics(measured: Sequence[MeasuredDrift]) -> list[float]:
    return [drift.statistics for drift in measured if drift.statistics is not None]
