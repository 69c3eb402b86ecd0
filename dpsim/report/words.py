"""The words of a report: how numbers and networks are written, and the answer in a sentence."""

from __future__ import annotations

import unicodedata

from dpsim.records.comparison import ComparedPoint, Comparison, Group
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
    return counted(devices, "device")


def counted(number: int, noun: str) -> str:
    """``1 point``, ``2 points``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def group_name(group: Group) -> str:
    """``node, 2 devices``; of a sweep over the number of devices ``node``."""
    where = network_name(group.network, group.emulated_network)
    return f"{where}, {devices_name(group.devices)}" if group.devices else where


def threshold_name(size_bytes: float) -> str:
    """``64 KiB``; 0 and inf say what they mean."""
    meaning = {0.0: " (one allreduce per tensor)", float("inf"): " (one allreduce per step)"}
    return format_size(size_bytes) + meaning.get(size_bytes, "")


def skill_text(skill: float | None) -> str:
    """``0.82``; ``none`` says that the best null made no error, and far below 0 no figure means anything."""
    if skill is None:
        return "none"
    return "below -10" if skill < -10 else f"{skill:.2f}".replace("-0.00", "0.00")


def best_measured(comparison: Comparison, group: Group) -> ComparedPoint:
    """The group's fastest measured point."""
    return next(p for p in comparison.members(group) if p.is_best_measured)


def best_predicted(comparison: Comparison, group: Group) -> ComparedPoint:
    """The group's point that was predicted to be fastest."""
    return next(p for p in comparison.members(group) if p.is_best_predicted)


def gain(comparison: Comparison, group: Group) -> tuple[float, str] | None:
    """How many times faster the best setting is than one allreduce per tensor, or else than one per step."""
    best = best_measured(comparison, group)
    for extreme in (0.0, float("inf")):
        other = next((p for p in comparison.members(group) if p.fusion_threshold_bytes == extreme), None)
        if other is not None and other is not best:
            return other.measured_step_s / best.measured_step_s, f"threshold {threshold_name(extreme)}"
    return None


_PLAIN_EFFECT = 0.1
"""An effect of this size is no small one, even where it is below the uncertainty."""


def answer(comparison: Comparison, group: Group) -> str:
    """What was found on one network and device count: a verdict first, then the figures behind it."""
    best = best_measured(comparison, group)
    verdicts = [text for text in (_slower_than_one(group, best), _choice(comparison, group)) if text]
    if not group.below_noise:
        verdicts.append(_model(comparison, group))
    step = group.step
    return (
        " ".join(verdicts)
        + f" The model's median error was {percent(step.median_abs_error)}, the best baseline's "
        + f"{percent(step.null_median_abs_error)} (skill {skill_text(step.skill)})."
    )


def _slower_than_one(group: Group, best: ComparedPoint) -> str:
    speedup = best.measured_speedup
    if speedup is None or 1 / speedup - 1 <= group.noise_floor:
        return ""
    return (
        f"Do not use {devices_name(group.devices)} on {network_name(group.network, group.emulated_network)}: at the "
        f"best threshold they are slower than one device (speedup {speedup:.2f})."
    )


def _choice(comparison: Comparison, group: Group) -> str:
    """Which threshold to take, or that it does not matter."""
    best = best_measured(comparison, group)
    where = f"On {network_name(group.network, group.emulated_network)}, {devices_name(group.devices)}"
    where += EMULATED_COMPUTE if best.emulated_compute else ""
    ms = milliseconds(best.measured_step_s)
    if group.below_noise:
        verdict = "the threshold does not matter here"
        if group.effect > _PLAIN_EFFECT:
            verdict = "the measurement is too uncertain to tell which threshold is best"
        return (
            f"{where}, {verdict}: from best to worst a step of {ms} ms changes by {percent(group.effect)}, and the "
            f"uncertainty of these medians is {percent(group.noise_floor)}."
        )
    text = f"{where}, the best threshold is {threshold_name(best.fusion_threshold_bytes)}: {ms} ms per step"
    faster = gain(comparison, group)
    if faster is not None:
        text += f", {faster[0]:.2f}x as fast as {faster[1]}"
    near = [p for p in comparison.members(group) if p is not best and _within(p, best, group.noise_floor)]
    if near:
        text += f"; {counted(len(near), 'other threshold')} cannot be told apart from it"
    return f"{text}."


def _model(comparison: Comparison, group: Group) -> str:
    """What the model chose, and what following it costs."""
    best, predicted = best_measured(comparison, group), best_predicted(comparison, group)
    if predicted is best:
        return "The model chose the same."
    return (
        f"The model chose {threshold_name(predicted.fusion_threshold_bytes)}, which took "
        f"{milliseconds(predicted.measured_step_s)} ms (regret {percent(group.regret, sign=True)})."
    )


def _within(point: ComparedPoint, best: ComparedPoint, noise: float) -> bool:
    return point.measured_step_s <= best.measured_step_s * (1 + noise)


def answers(comparison: Comparison) -> tuple[str, ...]:
    """``answer`` of every group; or one sentence when nothing ran on more than one device."""
    found = tuple(answer(comparison, group) for group in comparison.groups)
    return found or ("Only one device was run: there is no threshold to choose.",)


def printable(text: str) -> str:
    """``text`` without control characters, of which a terminal would obey some."""
    return "".join(letter for letter in text if letter in "\n\t" or unicodedata.category(letter) not in ("Cc", "Cs"))
