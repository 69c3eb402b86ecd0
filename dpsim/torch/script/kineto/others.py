"""Collectives of a trace beside DDP's allreduces, such as those of experts or of FSDP: how many, and what they took."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from dpsim.torch.script.kineto.marks import Marks, OtherCollective, Span
from dpsim.units import format_duration

Interval = tuple[float, float]


@dataclass(frozen=True)
class Others:
    """The mean of the profiler's steps: how many collectives by their names, and their seconds.

    Of their time ``inside_s`` lies within forward, backward and update. ``on_device``: kernels of a device, which may
    run beside computation; on a host the training thread waits for them.
    """

    counts: dict[str, float]
    seconds: dict[str, float]
    taken_s: float = 0.0
    inside_s: float = 0.0
    on_device: bool = False

    @property
    def text(self) -> str:
        """Each by its name, how often in a step, and for how long."""
        return ", ".join(
            f"{self.counts[name]:.3g} {name} a step ({format_duration(seconds)})"
            for name, seconds in sorted(self.seconds.items(), key=lambda each: -each[1])
        )


def others_of(marks: Marks) -> Others:
    """Return what other collectives took in the steps of a trace, each by the best event that tells of its kind.

    That is a kernel of a device, what a backend did, or else the call, which may end before the collective does.
    """
    kept: dict[str, list[OtherCollective]] = {}
    for each in marks.others:
        if any(step.start_s <= each.start_s < step.end_s for step in marks.steps.values()):
            kept.setdefault(each.name, []).append(each)
    best = {name: _best(events) for name, events in kept.items()}
    steps = max(len(marks.steps), 1)
    taken = _joined(span for events in best.values() for span in events)
    own = _joined([*marks.forwards, *marks.functions, *marks.updates])
    return Others(
        counts={name: len(events) / steps for name, events in best.items()},
        seconds={name: _length(_joined(events)) / steps for name, events in best.items()},
        taken_s=_length(taken) / steps,
        inside_s=_shared(taken, own) / steps,
        on_device=any(each.by == "device" for events in best.values() for each in events),
    )


def _best(events: Sequence[OtherCollective]) -> list[OtherCollective]:
    for by in ("device", "backend"):
        if found := [each for each in events if each.by == by]:
            return found
    return list(events)


def _joined(spans: Iterable[Span]) -> list[Interval]:
    """The times in which any of the spans lasts, in their order."""
    joined: list[Interval] = []
    for start_s, end_s in sorted((span.start_s, span.end_s) for span in spans):
        if joined and start_s <= joined[-1][1]:
            joined[-1] = joined[-1][0], max(joined[-1][1], end_s)
        else:
            joined.append((start_s, end_s))
    return joined


def _length(intervals: Iterable[Interval]) -> float:
    return sum(end_s - start_s for start_s, end_s in intervals)


def _shared(one: Sequence[Interval], other: Sequence[Interval]) -> float:
    """Seconds that lie in both."""
    shared, at = 0.0, 0
    for start_s, end_s in one:
        while at < len(other) and other[at][1] <= start_s:
            at += 1
        place = at
        while place < len(other) and other[place][0] < end_s:
            shared += max(min(end_s, other[place][1]) - max(start_s, other[place][0]), 0.0)
            place += 1
    return shared
