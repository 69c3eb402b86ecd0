"""What a prediction says: its table, its advice for each number of devices, and what several rows show together."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsim.columns import columns_of
from dpsim.grouping import grouped
from dpsim.model.rows import PredictedRow
from dpsim.report.table import Column
from dpsim.report.words import FORMS, devices_name, interval_name, interval_sentence
from dpsim.units import format_duration, format_size

_NEARLY = 0.9
"""The share of the most samples per second from which a batch is large enough."""
SETTING = ("fusion_rule", "algorithm", "batch_norm", "accumulate")
"""What tells the settings of one batch apart."""
Point = dict[str, Any]


def notes(points: list[Point], summary: Point) -> list[str]:
    """Sentences that explain the table."""
    notes = [interval_sentence(summary["interval_level"], summary["interval_studies"], summary["interval_clusters"])]
    if summary["extrapolated"]:
        notes.append("rows marked 'extrapolated' lie beyond the calibrated range: treat them as rough")
    if summary["from_script"]:
        notes.append(summary["from_script"])
    if any(point["memory_bytes"]["activations"] is None for point in points):
        notes.append("activation memory, which the workload file does not state, comes on top (+)")
    return notes


def declared(*names: str, shown: bool = True) -> list[Column[Point]]:
    """Return columns of ``PredictedRow`` as tables of its records have them."""
    columns = (columns_of(PredictedRow)[name] for name in names)
    return [each.in_table(functools.partial(_cell, each), shown=shown) for each in columns]


def _cell(column: Column[Any], point: Point) -> str:
    return FORMS[column.form](point[column.name])


def columns(points: list[Point], *, weak: bool) -> tuple[Column[Point], ...]:
    """Return the columns of the table of a prediction; those in which all rows are equal are left out."""
    batch = "local_batch" if weak else "global_batch"
    level = None if any(point["interval_level"] is None for point in points) else points[0]["interval_level"]

    def several(key: str) -> bool:
        return len({point[key] for point in points}) > 1

    return (
        Column(
            head="machine",
            cell=lambda point: Path(point.get("machine", "")).stem,
            left=True,
            shown="machine" in points[0],
        ),
        Column(head="devices", cell=lambda point: point["layout"], left=True),
        Column(head=batch.replace("_", " "), cell=lambda point: f"{point[batch]:g}", shown=several(batch)),
        Column(head="micro-batches", cell=lambda point: str(point["accumulate"]), shown=several("accumulate")),
        Column(head="rule", cell=lambda point: point["fusion_rule"], shown=several("fusion_rule")),
        Column(head="algorithm", cell=lambda point: point["algorithm"], shown=several("algorithm")),
        Column(head="batch norm", cell=lambda point: point["batch_norm"], shown=several("batch_norm")),
        *declared("fusion_threshold_bytes", "buckets"),
        Column(head="overlap", cell=lambda point: point["overlap"]),
        Column(
            head="bits",
            cell=lambda point: point["bits"],
            left=True,
            dispensable=1,
            shown="bits" in points[0] and 1 < len({point["bits"] for point in points}) < len(points),
        ),
        *declared("predicted_step_s"),
        *([_of_training("images_per_s")] if _asks(points[0]) else declared("images_per_s")),
        Column(head=interval_name(level), cell=lambda point: band(point["predicted_low_s"], point["predicted_high_s"])),
        *declared("predicted_exposed_communication_s"),
        *declared("predicted_communication_cost_s", shown=any(point["devices"] > 1 for point in points)),
        Column(
            head="waiting",
            cell=lambda point: format_duration(point["waiting_for_slowest_s"] + point["waiting_for_input_s"]),
            shown=any(point["waiting_for_slowest_s"] + point["waiting_for_input_s"] > 0 for point in points),
        ),
        Column(
            head="to target",
            cell=lambda point: format_duration(point["time_to_target_s"]),
            shown="time_to_target_s" in points[0],
        ),
        *(_of_training(name) for name in ("hours", "cost", "tokens_per_s") if name in points[0]),
        *declared("memory_bytes"),
        Column(
            head="",
            cell=lambda point: "does not fit " * (point["fits"] is False) + "extrapolated" * point["extrapolated"],
        ),
    )


def _of_training(name: str) -> Column[Point]:
    """Return the column of hours, cost or tokens a second, with the ends of its interval."""

    head = name.replace("images", "samples").replace("_per_s", "/s")
    return Column(head=head, cell=lambda point: _with_ends(point, name))


def _asks(point: Point) -> bool:
    """Whether somebody asked for what a training takes, or for tokens."""
    return "hours" in point or "tokens_per_s" in point


def _with_ends(point: Point, name: str) -> str:
    value, low, high = (amount(point[f"{name}{end}"]) for end in ("", "_low", "_high"))
    return f"{value} ({low} to {high})"


def of_training(point: Point, before: str = "; all samples") -> str:
    """Return what the training takes and costs at a point, in words that follow ``before``; empty of none."""
    if "hours" not in point:
        return ""
    cost = f" and cost {_with_ends(point, 'cost')}" if "cost" in point else ""
    return f"{before} take {_with_ends(point, 'hours')} hours{cost}"


def amount(value: float) -> str:
    """``1,280,000``, ``24.1``: hours, money or a rate with three significant digits, or in whole numbers."""
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}"


def band(low_s: float, high_s: float) -> str:
    """``368-415 ms``; ``368 ms or more`` where the interval is open."""
    if math.isinf(high_s):
        return f"{format_duration(low_s)} or more"
    low, high = format_duration(low_s).split(), format_duration(high_s).split()
    return f"{low[0]}-{high[0]} {high[1]}" if low[1] == high[1] else f"{' '.join(low)}-{' '.join(high)}"


def faster_with_fewer(best: Point, others: list[Point], batch: str) -> Point | None:
    """The prediction with the fewest devices that still trains more samples per second, with the same settings."""
    keys = (*SETTING, batch)
    same = [point for point in others if all(point[key] == best[key] for key in keys)]
    same = [point for point in same if point.get("machine") == best.get("machine")]
    fewer = [p for p in same if p["devices"] < best["devices"] and p["images_per_s"] > best["images_per_s"]]
    return min(fewer, key=lambda point: int(point["devices"]), default=None)


def _devices_and_batch(best: Point, *, weak: bool) -> str:
    """``8 devices (2x4), local batch 16 (128 in all)``, or under strong scaling ``global batch 128``."""
    layout = "" if best["layout"] == str(best["devices"]) else f" ({best['layout']})"
    each = f" x {best['accumulate']} micro-batches" if best["accumulate"] > 1 else ""
    batch = f"local batch {best['local_batch']:g}{each} ({best['global_batch']} in all)"
    batch = batch if weak else f"global batch {best['global_batch']}"
    return f"{devices_name(best['devices'])}{layout}, {batch}"


def best_sentence(best: Point, faster: Point | None, *, weak: bool, cap: str = "threshold") -> str:
    """Return the advice for one number of devices: the best setting and its speed, or fewer devices that are faster.

    ``cap`` is what the threshold is called.
    """
    machine = f"{Path(best['machine']).stem}: " if "machine" in best else ""
    if best["devices"] == 1:
        return f"{machine}1 device: {format_duration(best['predicted_step_s'])} per step{of_training(best)}."
    norm = ", batch norm over all" if best["batch_norm"] == "global" else ""
    setting = f"{machine}{_devices_and_batch(best, weak=weak)}, {best['fusion_rule']}, {best['algorithm']}{norm}"
    low, high = best["speedup_low"], best["speedup_high"]
    speed = (
        f"{format_duration(best['predicted_step_s'])} per step, speedup {best['speedup']:.2f} ({low:.2f} to {high:.2f})"
        f", scaling efficiency {best['scaling_efficiency']:.0%}{', no certain gain' if low < 1 <= high else ''}"
        f"{of_training(best)}"
    )
    if faster is not None:
        return f"{setting}: do not use them, {devices_name(faster['devices'])} would be faster: {speed}."
    if high < 1:
        return f"{setting}: do not use them, they are slower than one device: {speed}."
    if best["any_threshold"]:
        return f"{setting}: the {cap} makes no difference (within its uncertainty): {speed}."
    if best["fusion_threshold_bytes"] is None:
        return f"{setting}: {speed}."
    threshold = format_size(best["fusion_threshold_bytes"])
    if best["thresholds_compared"] == 1:
        return f"{setting}, {cap} {threshold}: {speed}."
    near = ", ".join(map(format_size, best["equally_fast_bytes"]))
    others = f" (no certain difference: {near})" if near else ""
    return f"{setting}: fastest at {cap} {threshold}{others}: {speed}."


def verdicts(summary: Point, *, weak: bool) -> Iterator[str]:
    """Sentences over several rows: which local batch is enough, what global batch norm costs, what a machine gains."""

    def groups(*keys: str) -> Iterator[list[Point]]:
        """The best points of more than one device that differ in nothing but what is not among the keys."""
        names = (*keys, "machine", "layout", "fusion_rule", "algorithm", "accumulate")
        on_several = (best for best in summary["best"] if best["devices"] > 1)
        by_key = grouped(on_several, lambda best: tuple(map(best.get, names)))
        yield from (group for group in by_key.values() if len(group) > 1)

    batch = "local_batch" if weak else "global_batch"
    for group in groups("batch_norm"):
        most = max(group, key=lambda best: best["images_per_s"])
        enough = min((b for b in group if b["images_per_s"] >= _NEARLY * most["images_per_s"]), key=lambda b: b[batch])
        machine = f"{Path(most['machine']).stem}, " if "machine" in most else ""
        where = f"{machine}{devices_name(most['devices'])}"
        if enough is most:
            yield f"{where}: {_batch(most, batch)} trains most samples per second, {most['images_per_s']:.4g}."
        else:
            yield (
                f"{where}: {_batch(enough, batch)} is enough, with {enough['images_per_s'] / most['images_per_s']:.0%}"
                f" of the {most['images_per_s']:.4g} samples per second of {most[batch]:g}."
            )
    for group in groups(batch):
        of_norm = {best["batch_norm"]: best for best in group}
        if len(of_norm) == 2:
            local_s, global_s = of_norm["local"]["predicted_step_s"], of_norm["global"]["predicted_step_s"]
            yield (
                f"{_devices_and_batch(group[0], weak=weak)}: batch norm over all devices costs"
                f" {format_duration(global_s - local_s)} a step ({(global_s - local_s) / local_s:.1%})."
            )
    for upgrade in summary.get("upgrades", []):
        low, high = upgrade["ratio_low"], upgrade["ratio_high"]
        yield (
            f"{_devices_and_batch(upgrade, weak=weak)}, {upgrade['fusion_rule']}: {Path(upgrade['machine']).stem} takes"
            f" {format_duration(upgrade['predicted_step_s'])} instead of {format_duration(upgrade['first_step_s'])}:"
            f" {upgrade['ratio']:.2f} times as fast ({low:.2f} to {high:.2f})"
            f"{', no certain difference' if low <= 1 <= high else ', more than is uncertain about it'}."
        )


def _batch(best: Point, batch: str) -> str:
    return f"{batch.replace('_', ' ')} {best[batch]:g}"
