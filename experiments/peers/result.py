"""What a contest came to: ratios of medians with intervals from paired rounds, as points for programs and a table."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from dpsim import codec
from dpsim.experiments.peers.contest import Contest, Standing
from dpsim.experiments.peers.setting import OWN, shown
from dpsim.harness.measurement.statistics import median_interval, median_ratio
from dpsim.units import format_duration


def points(contest: Contest, standings: Sequence[Standing]) -> list[dict[str, Any]]:
    """A flat record a standing, raw samples and tried settings included.

    ``images_per_s_ratio`` is dpsim's images/s over this system's in the same rounds, above 1 where dpsim is faster.
    """
    own = {one.devices: one for one in standings if one.system == OWN}
    return [_point(contest, one, own[one.devices]) for one in standings]


def _point(contest: Contest, one: Standing, own: Standing) -> dict[str, Any]:
    step = median_interval(one.step_s)
    point: dict[str, Any] = {
        "system": one.system,
        "devices": one.devices,
        "model": contest.model,
        "global_batch": one.devices * contest.local_batch,
        "local_batch": contest.local_batch,
        "images_per_s": one.devices * contest.local_batch / step.median,
        "measured_step_s": step.median,
        "measured_low_s": step.low,
        "measured_high_s": step.high,
        "step_without_communication_s": None,
        "exposed_communication_s": 0.0,
        "images_per_s_ratio": None,
        "images_per_s_ratio_low": None,
        "images_per_s_ratio_high": None,
        "gradient_error": one.gradient_error,
        "loss_error": one.loss_error,
        "setting": codec.to_builtins(one.setting),
        "tried": codec.to_builtins(one.tried),
        "rounds_step_s": list(one.step_s),
        "rounds_step_without_communication_s": list(one.alone_step_s),
    }
    if one.alone_step_s:
        alone_s = statistics.median(one.alone_step_s)
        point["step_without_communication_s"] = alone_s
        point["exposed_communication_s"] = step.median - alone_s
    if one.system != OWN:
        ratio = median_ratio(one.step_s, own.step_s)
        point["images_per_s_ratio"] = ratio.median
        point["images_per_s_ratio_low"], point["images_per_s_ratio_high"] = ratio.low, ratio.high
    return point


def summary(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Ratios by system and device count, and dpsim's ratio to the fastest peer of each device count."""
    ratios = {
        f"{point['system']}-{point['devices']}": {
            "ratio": point["images_per_s_ratio"],
            "low": point["images_per_s_ratio_low"],
            "high": point["images_per_s_ratio_high"],
        }
        for point in found
        if point["system"] != OWN
    }
    best: dict[str, dict[str, Any]] = {}
    for point in found:
        if point["system"] != OWN:
            fastest = best.setdefault(str(point["devices"]), point)
            if point["images_per_s"] > fastest["images_per_s"]:
                best[str(point["devices"])] = point
    return {
        "images_per_s_ratio": ratios,
        "best_peer": {n: {"system": p["system"], "ratio": p["images_per_s_ratio"]} for n, p in best.items()},
    }


def rows(found: Sequence[dict[str, Any]]) -> list[tuple[str, ...]]:
    """The table's rows: system, ranks, images/s, step, step without communication, exposed, dpsim over it."""
    made: list[tuple[str, ...]] = []
    for point in found:
        alone_s, ratio = point["step_without_communication_s"], point["images_per_s_ratio"]
        low, high = point["images_per_s_ratio_low"], point["images_per_s_ratio_high"]
        made.append(
            (
                point["system"],
                str(point["devices"]),
                f"{point['images_per_s']:,.0f}",
                format_duration(point["measured_step_s"]),
                "" if alone_s is None else format_duration(alone_s),
                "" if alone_s is None else format_duration(point["exposed_communication_s"]),
                "" if ratio is None else f"{ratio:.2f} ({low:.2f} to {high:.2f})",
            )
        )
    return made


COLUMNS = ("system", "ranks", "images/s", "step", "without comm.", "exposed", "dpsim over it (95 %)")


def notes(standings: Sequence[Standing]) -> list[str]:
    """The setting that each system competed with, out of how many tried."""
    return [
        f"{one.system} on {one.devices}: best of {max(1, len({t.setting for t in one.tried}))} settings"
        f" ({shown(one.setting)})"
        for one in standings
    ]
