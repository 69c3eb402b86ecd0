"""Compared runs for programs: flat points and a summary under fixed names, and the points as CSV."""

from __future__ import annotations

import csv
import io
from typing import Any

from dpsim.codec import to_builtins
from dpsim.records.run_comparison import RunComparison
from dpsim.report.words import spreadsheet_text


def points_json(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the points of ``--json``: the fields that name the setting stand beside all others."""
    points = []
    for point in to_builtins(comparison.points):
        setting = point.pop("setting")
        points.append({"a": point.pop("a"), "b": point.pop("b")} | setting | point)
    return points


def summary_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the summary of ``--json``: the runs, the means of each pair of them, and what was not compared."""
    summary: dict[str, Any] = to_builtins(comparison)
    del summary["points"]
    return summary


def points_csv(comparison: RunComparison) -> str:
    """Return the points as CSV, with one header line; what a setting does not have is empty."""
    points = points_json(comparison)
    settings = dict.fromkeys(name for point in comparison.points for name in point.setting)
    names = list(dict.fromkeys(["a", "b", *settings, *points[0]]))
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_text(value) for name, value in point.items()} for point in points)
    return text.getvalue()
