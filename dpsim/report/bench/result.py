"""An allreduce benchmark for programs: its flat points and its summary, under fixed names."""

from __future__ import annotations

from typing import Any

from dpsim.codec import to_builtins
from dpsim.records.bench_result import BenchResult


def points_json(result: BenchResult) -> list[dict[str, Any]]:
    """Return the points of ``--json``."""
    points: list[dict[str, Any]] = to_builtins(result.points)
    return points


def summary_json(result: BenchResult) -> dict[str, Any]:
    """Return the summary of ``--json``."""
    return {
        "sizes": to_builtins(result.sizes),
        "rounds": result.rounds,
        "wrong": result.wrong,
        "simulated": result.simulated,
    }
