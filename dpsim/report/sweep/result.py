"""A sweep for programs: its flat points and its summary, under fixed names."""

from __future__ import annotations

from typing import Any

import msgspec

from dpsim.codec import to_builtins
from dpsim.records.columns import without_threshold
from dpsim.records.comparison import Comparison


def points_json(comparison: Comparison) -> list[dict[str, Any]]:
    """Return the points of ``--json``. Without a threshold it is null, as on one device; infinity is ``"inf"``."""
    return [to_builtins(without_threshold(point.values(), point.setting)) for point in comparison.points]


def summary_json(comparison: Comparison) -> dict[str, Any]:
    """Return the summary of ``--json``: the overall scores, then those of the parts."""
    parts: dict[str, Any] = to_builtins(msgspec.structs.replace(comparison, points=(), quality=None))
    overall: dict[str, Any] = parts["overall"] or {}
    step: dict[str, Any] = overall.get("step", {})
    names = [
        "groups",
        "networks",
        "single_device_median_abs_error",
        "overlap",
        "chosen_overlap",
        "predictions_sha256",
        "predicted_at",
        "measured_from",
        "measured_until",
        "not_measured",
        "relative_uncertainty",
        "blind_predicted_at",
        "beforehand_median_abs_error",
        "machine_change",
    ]
    summary = {name: step.get(name) for name in ("median_abs_error", "p90_abs_error", "null_median_abs_error", "skill")}
    summary |= {"regret": overall.get("regret"), "null": step.get("null"), "null_errors": step.get("null_errors")}
    summary |= {name: overall.get(name) for name in ("shape", "exposed_communication", "noise", "effect")}
    summary |= {name: parts[name] for name in names}
    interval = comparison.interval
    summary |= {
        "interval_level": interval.level if interval else None,
        "coverage": interval.coverage if interval else None,
        "interval_score": interval.interval_score if interval else None,
        "constant_interval_score": interval.constant_score if interval else None,
        "intervals": parts["intervals"],
    }
    if comparison.experiment.question == "devices":
        first = comparison.points[0]
        summary["scaling"] = {
            "kind": "weak" if comparison.experiment.weak else "strong",
            "batch_norm": first.batch_norm,
            "leaves": first.leaves,
            "steps": comparison.experiment.steps,
        }
        summary |= {name: parts[name] for name in ("identical", "drift_predictions_sha256")}
    return summary
