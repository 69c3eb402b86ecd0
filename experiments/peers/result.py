"""The results of a comparison, as points for programs and as a table: ratios of medians, with intervals."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dpsim import codec
from dpsim.experiments.peers.measure import PeerComparison, SystemResult
from dpsim.experiments.peers.setting import OWN, shown
from dpsim.harness.measurement.statistics import median_interval, median_ratio
from dpsim.units import format_duration


def points(comparison: PeerComparison, results: Sequence[SystemResult]) -> list[dict[str, Any]]:
    """A flat record for each result, raw samples and tried settings included.

    ``images_per_s_ratio`` is dpsim's images/s over this system's in the same rounds, above 1 where dpsim is faster.
    """
    own = {result.devices: result for result in results if result.system == OWN}
    return [_point(comparison, result, own[result.devices]) for result in results]


def _point(comparison: PeerComparison, result: SystemResult, own: SystemResult) -> dict[str, Any]:
    step = median_interval(result.step_s)
    point: dict[str, Any] = {
        "system": result.system,
        "devices": result.devices,
        "model": comparison.model,
        "global_batch": result.devices * comparison.local_batch,
        "local_batch": comparison.local_batch,
        "images_per_s": result.devices * comparison.local_batch / step.median,
        "measured_step_s": step.median,
        "measured_low_s": step.low,
        "measured_high_s": step.high,
        "step_without_communication_s": None,
        "exposed_communication_s": 0.0,
        "images_per_s_ratio": None,
        "images_per_s_ratio_low": None,
        "images_per_s_ratio_high": None,
        "gradient_error": result.gradient_error,
        "loss_error": result.loss_error,
        "setting": codec.to_builtins(result.setting),
        "tried": codec.to_builtins(result.tried),
        "rounds_step_s": list(result.step_s),
        "rounds_step_without_communication_s": list(result.alone_step_s),
    }
    if result.alone_step_s:
        alone_s = statistics.median(result.alone_step_s)
        point["step_without_communication_s"] = alone_s
        point["exposed_communication_s"] = step.median - alone_s
    if result.system != OWN:
        ratio = median_ratio(result.step_s, own.step_s)
        point["images_per_s_ratio"] = ratio.median
        point["images_per_s_ratio_low"], point["images_per_s_ratio_high"] = ratio.low, ratio.high
    return point


def summary(points: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by system and device count, and dpsim's ratio to the fastest peer of each device count."""
    peers = [point for point in points if point["system"] != OWN]
    ratios = {
        f"{point['system']}-{point['devices']}": {
            "ratio": point["images_per_s_ratio"],
            "low": point["images_per_s_ratio_low"],
            "high": point["images_per_s_ratio_high"],
        }
        for point in peers
    }
    fastest: dict[str, dict[str, Any]] = {}
    for point in peers:
        best = fastest.setdefault(str(point["devices"]), point)
        if point["images_per_s"] > best["images_per_s"]:
            fastest[str(point["devices"])] = point
    return {
        "images_per_s_ratio": ratios,
        "best_peer": {n: {"system": p["system"], "ratio": p["images_per_s_ratio"]} for n, p in fastest.items()},
    }


COLUMNS = ("system", "ranks", "images/s", "step", "without comm.", "exposed", "dpsim over it (95 %)")


def rows(points: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table's rows: system, ranks, images/s, step, step without communication, exposed, dpsim's ratio to it."""
    return [_row(point) for point in points]


def _row(point: dict[str, Any]) -> tuple[str, ...]:
    alone_s, ratio = point["step_without_communication_s"], point["images_per_s_ratio"]
    low, high = point["images_per_s_ratio_low"], point["images_per_s_ratio_high"]
    return (
        point["system"],
        str(point["devices"]),
        f"{point['images_per_s']:,.0f}",
        format_duration(point["measured_step_s"]),
        "" if alone_s is None else format_duration(alone_s),
        "" if alone_s is None else format_duration(point["exposed_communication_s"]),
        "" if ratio is None else f"{ratio:.2f} ({low:.2f} to {high:.2f})",
    )


def notes(results: Sequence[SystemResult]) -> list[str]:
    """The setting with which each system was timed, and how many were tried."""
    return [
        f"{result.system} on {result.devices}: best of {max(1, len({t.setting for t in result.tried}))} settings"
        f" ({shown(result.setting)})"
        for result in results
    ]
