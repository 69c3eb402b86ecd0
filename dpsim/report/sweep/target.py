"""From steps to a target loss and the step: the time to the target at each setting of a sweep."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from dpsim.predict.critical_batch import StepsFit, paying_devices
from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.records.convergence import Convergence
from dpsim.report.sweep.tables import by_network
from dpsim.report.words import devices_name
from dpsim.units import format_duration

Seconds = Callable[[ComparedPoint], float]


def time_to_target(comparison: Comparison) -> Iterator[str]:
    """Yield, for each network, where training to the target loss is fastest, and how many devices pay."""
    if comparison.quality is None:
        return
    for convergence in comparison.quality.convergence.convergence:
        for network, points in by_network(comparison.scored).items():
            yield sentence(network, points, convergence)


def sentence(network: str, points: Sequence[ComparedPoint], convergence: Convergence) -> str:
    """Return where training to a target is fastest among these points, and how many devices pay."""
    fit = StepsFit(min_steps=convergence.min_steps, noise_batch=convergence.noise_batch)

    def measured_s(point: ComparedPoint) -> float:
        return fit.time_s(point.global_batch, point.measured_step_s)

    def predicted_s(point: ComparedPoint) -> float:
        return fit.time_s(point.global_batch, point.predicted_step_s)

    best, chosen = min(points, key=measured_s), min(points, key=predicted_s)
    images_per_s = best.global_batch / best.measured_step_s
    text = (
        f"On {network}, training to loss {convergence.target_loss:g} is fastest with {_name(best)}: "
        f"{fit.steps(best.global_batch):.0f} steps, {format_duration(measured_s(best))} (predicted "
        f"{format_duration(predicted_s(best))}), goodput {fit.goodput(best.global_batch, images_per_s):,.0f} of "
        f"{images_per_s:,.0f} samples/s"
    )
    if not min(convergence.batches) <= best.global_batch <= max(convergence.batches):
        text += f"; global batch {best.global_batch} is outside the batches at which steps were fitted"
    if chosen is best:
        text += ". The model chose the same"
    else:
        text += f". The model chose {_name(chosen)}, which takes {format_duration(measured_s(chosen))}"
    pay, expected = (paying_devices(_fastest(points, time_s)) for time_s in (measured_s, predicted_s))
    if pay < max(point.devices for point in points):
        return f"{text}. Beyond {devices_name(pay)} more do not pay (predicted: {expected})."
    return f"{text}. All {devices_name(pay)} pay (predicted: {expected})."


def _name(point: ComparedPoint) -> str:
    return f"local batch {point.local_batch:g} on {devices_name(point.devices)}"


def _fastest(points: Sequence[ComparedPoint], time_s: Seconds) -> dict[int, float]:
    """The shortest time to the target on each number of devices."""
    fastest: dict[int, float] = {}
    for point in points:
        fastest[point.devices] = min(time_s(point), fastest.get(point.devices, time_s(point)))
    return fastest
