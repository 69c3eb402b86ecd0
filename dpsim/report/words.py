"""The words of a report: how numbers and networks are written, and the answer in a sentence."""

from __future__ import annotations

from dpsim.report.comparison import ComparedPoint, Comparison, Group
from dpsim.units import format_size

EMULATED_COMPUTE = " (emulated computation)"


def milliseconds(seconds: float) -> str:
    """``12.34`` (the unit stands in the column's head or follows)."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.3g}" if value else "0"


def milliseconds_beside(seconds: float, beside: float) -> str:
    """Milliseconds with as many decimals as ``beside``, the largest of the column, needs for four digits."""
    decimals = next((d for d, top in ((0, 1000), (1, 100), (2, 10)) if beside * 1e3 >= top), 3)
    return f"{seconds * 1e3:.{decimals}f}"


def percent(share: float, *, sign: bool = False) -> str:
    """``1.2%`` or ``+1.2%``."""
    decimals = 0 if abs(share) >= 0.995 else 1
    return f"{share * 100:{'+' if sign else ''}.{decimals}f}%"


def network_name(network: str, emulated: bool) -> str:
    """The network's token, marked when it is emulated."""
    return f"{network} (emulated)" if emulated else network


def devices_name(devices: int) -> str:
    """``1 device``, ``2 devices``."""
    return f"{devices} device{'' if devices == 1 else 's'}"


def group_name(group: Group) -> str:
    """``node, 2 devices``; of a sweep over the number of devices ``node``."""
    where = network_name(group.network, group.emulated_network)
    return f"{where}, {devices_name(group.devices)}" if group.devices else where


def threshold_name(size_bytes: float) -> str:
    """``64 KiB``; 0 and inf say what they mean."""
    meaning = {0.0: " (one allreduce a tensor)", float("inf"): " (one allreduce a step)"}
    return format_size(size_bytes) + meaning.get(size_bytes, "")


def skill_text(skill: float | None) -> str:
    """``0.82``; ``none`` says that the best null made no error."""
    return "none" if skill is None else f"{skill:.2f}"


def best_measured(comparison: Comparison, group: Group) -> ComparedPoint:
    """The group's fastest measured point."""
    return next(p for p in comparison.members(group) if p.is_best_measured)


def best_predicted(comparison: Comparison, group: Group) -> ComparedPoint:
    """The group's point that was predicted to be fastest."""
    return next(p for p in comparison.members(group) if p.is_best_predicted)


def gain(comparison: Comparison, group: Group) -> tuple[float, str] | None:
    """How many times faster the best setting is than one allreduce a tensor, or else than one a step."""
    best = best_measured(comparison, group)
    for extreme, name in ((0.0, "one allreduce a tensor"), (float("inf"), "one allreduce a step")):
        other = next((p for p in comparison.members(group) if p.fusion_threshold_bytes == extreme), None)
        if other is not None and other is not best:
            return other.measured_step_s / best.measured_step_s, name
    return None


def answer(comparison: Comparison, group: Group) -> str:
    """What was found on one network and device count, in one or two sentences."""
    best, predicted = best_measured(comparison, group), best_predicted(comparison, group)
    where = f"On {network_name(group.network, group.emulated_network)}, {devices_name(group.devices)}"
    where += EMULATED_COMPUTE if best.emulated_compute else ""
    model = f"median error {percent(group.step.median_abs_error)}, skill {skill_text(group.step.skill)}"
    if group.below_noise:
        return (
            f"{where}, no best threshold can be told: from worst to best they change a step of "
            f"{milliseconds(best.measured_step_s)} ms by {percent(group.effect)}, within the noise of "
            f"{percent(group.noise_floor)}. The model: {model}."
        )
    text = f"{where}, the best threshold is {threshold_name(best.fusion_threshold_bytes)}: "
    text += f"{milliseconds(best.measured_step_s)} ms a step"
    faster = gain(comparison, group)
    if faster is not None:
        text += f", {faster[0]:.2f}x as fast as {faster[1]}"
    near = [p for p in comparison.members(group) if p is not best and _within(p, best, group.noise_floor)]
    if near:
        text += f" ({len(near)} other{'s are' if len(near) > 1 else ' is'} within the noise of it)"
    if predicted is best:
        text += ". The model predicted the same"
    else:
        text += (
            f". The model predicted {threshold_name(predicted.fusion_threshold_bytes)}, which took "
            f"{milliseconds(predicted.measured_step_s)} ms (regret {percent(max(0.0, group.regret))})"
        )
    return f"{text}; {model}."


def _within(point: ComparedPoint, best: ComparedPoint, noise: float) -> bool:
    return point.measured_step_s <= best.measured_step_s * (1 + noise)


def answers(comparison: Comparison) -> tuple[str, ...]:
    """``answer`` of every group; or one sentence when nothing ran on more than one device."""
    found = tuple(answer(comparison, group) for group in comparison.groups)
    return found or ("Only one device was run: there is no threshold to choose.",)
