"""Time to a target loss of predicted points: steps to the target times the predicted step, and which devices pay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from dpsim.predict.critical_batch import LEAST_GAIN, StepsFit, paying_devices
from dpsim.records.convergence import Convergence
from dpsim.units import format_duration

Record = dict[str, Any]


def add_time_to_target(points: Sequence[Record], summary: Record, convergence: Convergence) -> None:
    """Add ``steps_to_target``, ``time_to_target_s`` and ``goodput_images_per_s`` to every point of ``predict_points``.

    Its summary gets the target, the fit, and sentences on the recommended number of devices. Both change in place.
    """
    best = summary["best"]
    fit = StepsFit(min_steps=convergence.min_steps, noise_batch=convergence.noise_batch)
    for point in (*points, *best):
        batch = point["global_batch"]
        point["steps_to_target"] = fit.steps(batch)
        point["time_to_target_s"] = fit.time_s(batch, point["predicted_step_s"])
        point["goodput_images_per_s"] = fit.goodput(batch, point["images_per_s"])
    summary |= {
        "target_loss": convergence.target_loss,
        "min_steps": convergence.min_steps,
        "noise_batch": convergence.noise_batch,
        "time_to_target": list(_sentences(best, fit, convergence, strong=summary["scaling"] == "strong")),
    }


def _sentences(best: Sequence[Record], fit: StepsFit, convergence: Convergence, *, strong: bool) -> Iterator[str]:
    """Yield the recommended devices of each rule, algorithm and, under strong scaling, batch; then how far to trust it.

    Under weak scaling the batch grows with the devices, so that points of one local batch belong together.
    """
    target = f"Training loss {convergence.target_loss:g} ({convergence.name})"
    groups: dict[tuple[Any, ...], list[Record]] = {}
    for point in best:
        batch = point["global_batch"] if strong else point["local_batch"]
        groups.setdefault((point["fusion_rule"], point["algorithm"], batch), []).append(point)
    for rows in groups.values():
        fastest: dict[int, Record] = {}
        for point in rows:
            kept = fastest.setdefault(point["devices"], point)
            if point["time_to_target_s"] < kept["time_to_target_s"]:
                fastest[point["devices"]] = point
        count = paying_devices({devices: point["time_to_target_s"] for devices, point in fastest.items()})
        point = fastest[count]
        more = (
            f"; more save less than {LEAST_GAIN:.0%} a doubling"
            if count < max(fastest)
            else ", the most that were given"
        )
        yield (
            f"{target}, {point['fusion_rule']}, {point['algorithm']}: {count} device{'s' * (count != 1)}{more}. "
            f"Batch {point['global_batch']}: {point['steps_to_target']:.0f} steps, "
            f"{format_duration(point['time_to_target_s'])}, efficiency {fit.efficiency(point['global_batch']):.0%}."
        )
    low, high = min(convergence.batches), max(convergence.batches)
    outside = sorted({p["global_batch"] for p in best if not low / 2 <= p["global_batch"] <= 2 * high})
    if outside:
        yield (
            f"Steps to the target were fitted at batches {low} to {high}: treat those at "
            f"{', '.join(map(str, outside))} as rough."
        )
