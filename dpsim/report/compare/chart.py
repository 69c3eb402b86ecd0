"""The chart of compared runs: a row for each setting, sorted by ratio, with intervals and the noise."""

from __future__ import annotations

from dpsim.records.run_comparison import RunComparison
from dpsim.report.charts import Chart, Dot, Rows
from dpsim.report.compare.tables import furthest, group_name, setting_name, varying_fields

MOST_ROWS = 40


def ratio_chart(comparison: RunComparison) -> Chart:
    """Return one panel with a row for each setting, and a dot in it for each run beside the first."""
    shown = sorted(furthest(comparison, MOST_ROWS)[0], key=lambda row: row[0]["ratio"])
    labels, first = [run.label for run in comparison.runs[1:]], comparison.runs[0].label
    fields = varying_fields(point["setting"] for point in comparison.points)
    named = [name for name in fields if name != "network"]
    noises = [max((point["noise"] or 0.0 for point in row), default=0.0) for row in shown]
    rows = {
        setting_name(row[0]["setting"], named)
        + (f", {group_name(comparison.points, row[0]['group'])}" if "network" in fields else ""): [
            Dot(
                value=point["ratio"],
                low=point["ratio_low"],
                high=point["ratio_high"],
                look=labels.index(point["b"]),
                faint=point["verdict"] == "not_distinguishable",
            )
            for point in row
        ]
        for row in shown
    }
    panel = Rows(
        title=f"{labels[0]} against {first}" if len(labels) == 1 else f"against {first}",
        subtitle=f"time of one {comparison.quantity} / that in {first}",
        x_label="",
        rows=rows,
        bands=[(1 / (1 + noise), 1 + noise) if noise else None for noise in noises],
        log=True,
        legend=labels,
    )
    return Chart(panels=[panel], height_in=1.25 + (0.3 + 0.09 * (len(labels) - 1)) * len(shown), columns=1)
