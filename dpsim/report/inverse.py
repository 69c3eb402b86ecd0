"""The sentences that answer inverse questions: what reaches a target and how sure that is, or what stays in its way."""

from __future__ import annotations

import math

from dpsim.machine import Link
from dpsim.model.formulas import message_s
from dpsim.model.inverse import Answer, Target
from dpsim.model.ranking import BestBucket
from dpsim.model.rows import Record
from dpsim.report.words import devices_name
from dpsim.units import format_bandwidth, format_duration, format_size

_LEAST_SHARE = 0.005
"""The part of a step below which a loss is not named."""
_LOSSES = {
    "predicted_exposed_communication_s": "exposed communication",
    "waiting_for_slowest_s": "waiting for the slowest device",
    "waiting_for_input_s": "waiting for input",
}


def sentence(answer: Answer, *, weak: bool) -> str:
    """Return what reaches the target, with its interval; or what comes nearest to it, and what is in its way."""
    target, goal = answer.target, _goal(answer.target)
    where = _where(answer.point, answer.quantity, weak=weak, link=answer.link)
    if answer.value is None:
        worse, predicted, better = (_amount(target, value) for value in target.of(answer.point))
        give = "give" if answer.quantity == "devices" else "gives"
        return (
            f"{where}no {_noun(answer)} reaches {goal}: even {_value(answer, answer.at)} {give} {predicted}"
            f" ({worse} to {better}). {_left(answer.point)}"
        ).strip()
    if answer.anything:
        return f"{where}any {_noun(answer)} reaches {goal}, even {_value(answer, answer.value)}."
    side = "more" if answer.least else "fewer" if answer.quantity == "devices" else "less"
    side += "" if answer.until is None else f", but not beyond {_value(answer, answer.until, named=False)}"
    return (
        f"{where}{goal} is reached with {_value(answer, answer.value)} or {side}"
        f" ({_interval(answer)}), where a step takes {format_duration(answer.point['predicted_step_s'])}."
    )


def of_tables(answer: Answer) -> str:
    """Return how the tables of a machine change with its link; empty where a link alone is asked for, or none."""
    link = answer.link
    if link is None or not answer.has_tables:
        return ""
    return (
        f"the machine's tables change with its link, {format_duration(message_s(link))} and"
        f" {format_bandwidth(link.bandwidth_bytes_per_s)} now: of each time the part that grows with the bytes as"
        " its bandwidth does, and the rest as its latency does"
    )


def bucket_sentence(best: BestBucket, target: Target | None = None, *, weak: bool) -> str:
    """Return the best fusion threshold, what it gains over none being named, and whether it reaches a target."""
    point, gain = best.row.record(), best.row.gain
    size, (first, last) = format_size(point["fusion_threshold_bytes"]), map(format_size, best.alike)
    alike = f" (any from {first} to {last} may be as fast)" if first != last else ""
    rule, where = point["fusion_rule"], _where(point, "bucket", weak=weak)
    step, default = format_duration(best.row.step_s), format_duration(best.default.step_s)
    certain = ", no certain difference" if gain.low <= 1 <= gain.high else ""
    ratio = f"{gain.value:.2f} times as fast ({gain.low:.2f} to {gain.high:.2f}){certain}"
    if gain.value < 1:
        text = f"{where}no bucket size beats {rule} without one, {default} per step; the best, {size}, takes {step},"
        text += f" {ratio}."
    else:
        text = f"{where}the best bucket of {rule} is {size}{alike}: {step} per step instead of {default}, {ratio}."
    if target is None:
        return text
    worse, predicted, better = target.of(point)
    amounts = f"{_amount(target, predicted)} ({_amount(target, worse)} to {_amount(target, better)})"
    return f"{text} It {'reaches' if target.reached(predicted) else 'misses'} {_goal(target)}, with {amounts}."


def _where(point: Record, quantity: str, *, weak: bool, link: Link | None = None) -> str:
    """Return what a point was predicted with, without what is asked for: devices, batch, buckets, algorithm, link."""
    layout = "" if point["layout"] == str(point["devices"]) else f" ({point['layout']})"
    devices = "" if quantity == "devices" else f"{devices_name(point['devices'])}{layout}"
    batch = f"local batch {point['local_batch']:g}" if weak else f"global batch {point['global_batch']}"
    batch = "" if quantity == "local-batch" else batch
    size, algorithm = point["fusion_threshold_bytes"], point["algorithm"] if point["devices"] > 1 else ""
    threshold = "" if size is None else f" with threshold {format_size(size)}"
    rule = f"{point['fusion_rule']}{threshold}" if algorithm and quantity != "bucket" else ""
    of_link = ""
    if link is not None and quantity == "bandwidth":
        of_link = f"a latency of {format_duration(message_s(link))}"
    elif link is not None:
        of_link = f"a bandwidth of {format_bandwidth(link.bandwidth_bytes_per_s)}"
    return ", ".join(filter(None, (devices, batch, rule, algorithm, of_link))) + ": "


def _amount(target: Target, value: float) -> str:
    """Return a value of the target's goal."""
    match target.goal:
        case "step-time":
            return format_duration(value)
        case "efficiency":
            return f"{value:.1%}"
        case "hours":
            return f"{value:.3g} hours"
    return f"{value:.3g}"


def _goal(target: Target) -> str:
    match target.goal:
        case "efficiency":
            return f"{target.value * 100:.4g}% scaling efficiency"
        case "step-time":
            return f"a step of {format_duration(target.value)}"
        case "hours":
            return f"a training of {target.value:g} hours"
    return f"a {target.goal} of {target.value:g}"


def _noun(answer: Answer) -> str:
    return "number of devices" if answer.quantity == "devices" else answer.quantity.replace("-", " ")


def _value(answer: Answer, value: float, *, named: bool = True) -> str:
    """Return a value of what is asked for, ``named`` as in ``a latency of 20 us``."""
    match answer.quantity:
        case "devices":
            return devices_name(int(value))
        case "bandwidth":
            if math.isinf(value):
                return "an infinite bandwidth"
            text = format_bandwidth(value)
        case "latency":
            text = format_duration(value)
        case _:
            text = f"{value:.0f}"
    return f"a {_noun(answer)} of {text}" if named else text


def _interval(answer: Answer) -> str:
    """Return the values at which the ends of the prediction's interval reach the target."""
    low, high = (None if end is None else _value(answer, end, named=False) for end in (answer.low, answer.high))
    if low is not None and high is not None:
        return f"interval: {low} to {high}"
    possible = f"from {low} on" if answer.least else f"up to {high}"
    return f"{possible} it may be reached, but no {_noun(answer)} makes it certain"


def _left(point: Record) -> str:
    """Return what keeps a step from being as long as one device's share of it, the largest part first."""
    step_s = point["predicted_step_s"]
    losses = {name: point[key] for key, name in _LOSSES.items()}
    ideal_s = step_s * point["predicted_speedup"] / point["devices"]
    losses["computation beyond one device's share"] = step_s - ideal_s - sum(losses.values())
    largest = sorted(
        ((loss_s, name) for name, loss_s in losses.items() if loss_s > _LEAST_SHARE * step_s), reverse=True
    )
    parts = " and ".join(f"{format_duration(loss_s)} are {name}" for loss_s, name in largest)
    return f"Of its {format_duration(step_s)} per step, {parts}." if parts else ""
