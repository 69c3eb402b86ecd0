"""The chart of drift: from one device against the number of devices, measured and predicted."""

from __future__ import annotations

from collections.abc import Iterator

from dpsim.records.reproduce import ReproduceRecord
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.reproduce.tables import drifts

_PARAMETERS = "|w_n - w_1| / |w_1| after the last step"
_MEANS = "error of a device's batch-norm means, in standard deviations"


def drift_chart(record: ReproduceRecord) -> Chart | None:
    """Return, for each mode, a panel of the drift of the parameters, then one of that of its statistics.

    A mode that was measured on one number of devices has no panel: its one dot stands in the table.
    """
    panels = list(_panels(record))
    return Chart(panels=panels, height_in=3.6) if panels else None


def _panels(record: ReproduceRecord) -> Iterator[Lines]:
    measured = [(point, drift) for point, drift in drifts(record) if drift]
    for mode in dict.fromkeys(point.batch_norm for point, _ in measured):
        of_mode = [pair for pair in measured if pair[0].batch_norm == mode]
        of_statistics = [pair for pair in of_mode if pair[0].statistics is not None]
        for pairs, name, subtitle in ((of_mode, "parameters", _PARAMETERS), (of_statistics, "statistics", _MEANS)):
            devices = sorted({point.devices for point, _ in pairs})
            if len(devices) < 2:
                continue
            predicted = [(point.devices, value) for point, _ in pairs if (value := getattr(point, name))]
            dots = [(d.configuration.devices, value) for _, ds in pairs for d in ds if (value := getattr(d, name))]
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
