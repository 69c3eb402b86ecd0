"""How ``explain`` says where a step's time goes: the cause in one sentence, the parts, the remedies."""

from __future__ import annotations

from typing import Any

from dpsim.model.explanation import Explanation, Part, Remedy
from dpsim.report.table import Column
from dpsim.units import format_duration

_TITLES = {
    "computation": "computation",
    "small batch": "computation that no batch changes",
    "input": "waiting for input",
    "contention": "contention",
    "slowest rank": "waiting for the slowest rank",
    "small buckets": "many small buckets",
    "communication": "exposed communication",
    "other collectives": "other collectives than DDP's",
    "unexplained": "unexplained",
}
_CAUSES = {
    "small batch": "the batch is small",
    "input": "the loader is slow",
    "contention": "ranks do not have their cores to themselves",
    "slowest rank": "ranks wait for the slowest",
    "small buckets": "what is sent at once is small",
    "communication": "the network is slow for this model",
    "other collectives": "other collectives than DDP's allreduces take time",
    "unexplained": "nothing here explains part of the step",
}
_LEAST_GAIN = 0.01


def cause(explained: Explanation) -> str:
    """Return the first line: the cause of slowness and its size, and the other causes; or that the job is healthy."""
    step = format_duration(explained.step_s)
    if not explained.causes:
        return f"A healthy job: no cause takes a tenth of its step of {step}."
    first, *others = explained.causes
    sentence = f"{_CAUSES[first.kind].capitalize()}: {_share(first, explained)} go to {first.text}"
    if others:
        also = "; ".join(f"{_CAUSES[each.kind]} ({format_duration(each.seconds)}: {each.text})" for each in others)
        sentence += f". Also: {also}"
    return f"{sentence}."


def _share(part: Part, explained: Explanation) -> str:
    return (
        f"{format_duration(part.seconds)} of a step of {format_duration(explained.step_s)}"
        f" ({part.seconds / explained.step_s:.0%})"
    )


def columns(explained: Explanation) -> tuple[Column[Part], ...]:
    """Return the columns of the table of parts."""
    return (
        Column(head="part", cell=lambda part: _TITLES[part.kind]),
        Column(head="time", cell=lambda part: _signed(part.seconds)),
        Column(head="share", cell=lambda part: f"{part.seconds / explained.step_s:.0%}"),
        Column(head="90 % interval", cell=lambda part: f"{_signed(part.low_s)} to {_signed(part.high_s)}"),
    )


def details(explained: Explanation) -> list[str]:
    """Return a line for each part that says more than its name, with its details."""
    lines = []
    for part in explained.parts:
        if part.kind != "unexplained" and part.seconds > 0:
            lines.append(f"{_TITLES[part.kind]}: {part.text}")
            lines += [f"  {each}" for each in part.details]
    return lines


def remedies(explained: Explanation) -> list[str]:
    """Return a line for each remedy that gains a hundredth of the step or more, and one for the others."""
    gains = [each for each in explained.remedies if each.gain_s >= _LEAST_GAIN * explained.step_s]
    others = [each for each in explained.remedies if each not in gains]
    lines = [f"  {each.text}: {_gain(each, explained)}" for each in gains]
    if lines:
        lines.insert(0, "What would help, as predicted for the same samples:")
    if others:
        lines.append(f"No gain is predicted from: {'; '.join(each.text for each in others)}.")
    return lines


def _gain(remedy: Remedy, explained: Explanation) -> str:
    low, high = (_signed(each) for each in (remedy.low_s, remedy.high_s))
    return f"{_signed(remedy.gain_s)} less, {remedy.gain_s / explained.step_s:.0%} (90 %: {low} to {high})"


def _signed(seconds: float) -> str:
    seconds = round(seconds, 7)  # what rounding leaves of a difference is no time
    return format_duration(seconds) if seconds >= 0 else f"-{format_duration(-seconds)}"


def summary(explained: Explanation) -> dict[str, Any]:
    """Return what ``--json`` says beside the parts."""
    return {
        "cause": cause(explained),
        "causes": [each.kind for each in explained.causes],
        "step_s": explained.step_s,
        "devices": explained.devices,
        "method": explained.method,
        "remedies": list(explained.remedies),
        "notes": list(explained.notes),
    }
