"""``Explanation``: where the time of a training step goes, which of it is a cause of slowness, what remedies gain."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Literal

from dpsim.codec import Noun

Kind = Literal[
    "computation",
    "small batch",
    "input",
    "contention",
    "slowest rank",
    "small buckets",
    "communication",
    "other collectives",
    "unexplained",
]
LEAST_SHARE = {
    "small batch": 0.5,
    "input": 0.1,
    "contention": 0.1,
    "slowest rank": 0.1,
    "small buckets": 0.1,
    "communication": 0.1,
    "other collectives": 0.1,
    "unexplained": 0.1,
}
"""The share of a step from which a part of that kind is a cause of slowness.

A small batch is one where half of the step does not depend on the batch: every step has some of that. What is left is
below the differences that two runs of one job show on a shared machine.
"""


class Part(Noun, frozen=True):
    """Seconds of a step with the ends of their 90 % interval; ``text`` says what they are, ``details`` more of it."""

    kind: Kind
    seconds: float
    low_s: float
    high_s: float
    text: str
    details: tuple[str, ...] = ()


class Remedy(Noun, frozen=True):
    """What a change would take off a step: seconds with the ends of their 90 % interval."""

    text: str
    gain_s: float
    low_s: float
    high_s: float


class Explanation(Noun, frozen=True):
    """A measured step as the sum of its parts, the longest first; the part that nothing explains closes the sum.

    ``method`` says how they were found, ``notes`` what the reader has to know beside them.
    """

    name: str
    devices: str
    step_s: float
    parts: tuple[Part, ...]
    method: str
    remedies: tuple[Remedy, ...] = ()
    notes: tuple[str, ...] = ()

    @property
    def causes(self) -> tuple[Part, ...]:
        """The parts that make the job slow, the longest first. A healthy job has none.

        A part is a cause where it is at least its ``LEAST_SHARE`` of the step, and its interval does not reach 0. What
        nothing explains comes last: it is no cause by itself.
        """
        certain = [each for each in self.parts if each.low_s > 0 and each.kind in LEAST_SHARE]
        large = [each for each in certain if each.seconds >= LEAST_SHARE[each.kind] * self.step_s]
        return tuple(sorted(large, key=lambda each: each.kind == "unexplained"))


def summed(
    name: str,
    devices: str,
    step_s: float,
    parts: list[Part],
    method: str,
    *,
    remedies: tuple[Remedy, ...] = (),
    notes: tuple[str, ...] = (),
) -> Explanation:
    """Return the explanation with what is left of ``step_s`` as the unexplained part, and remedies by their gain."""
    left_s = step_s - math.fsum(part.seconds for part in parts)
    doubt_s = math.hypot(*((part.high_s - part.low_s) / 2 for part in parts))
    rest = Part(
        kind="unexplained",
        seconds=left_s,
        low_s=left_s - doubt_s,
        high_s=left_s + doubt_s,
        text="what nothing here explains" if left_s >= 0 else "less than the parts above add up to",
    )
    return Explanation(
        name=name,
        devices=devices,
        step_s=step_s,
        parts=tuple(sorted((*parts, rest), key=lambda part: -part.seconds)),
        method=method,
        remedies=tuple(sorted(remedies, key=lambda remedy: -remedy.gain_s)),
        notes=notes,
    )


_WITHOUT = {
    "slowest rank": "all ranks as fast as the typical one",
    "input": "a loader that always has the next batch (more num_workers)",
    "contention": "a core for each rank alone",
    "small buckets": "buckets of 25 MiB, or fully_shard on fewer and larger modules, as was observed",
}
"""What takes a part away altogether, by the kind of the part."""


def without_parts(parts: Iterable[Part]) -> list[Remedy]:
    """Return the remedies that take a whole part away."""
    return [
        Remedy(text=_WITHOUT[part.kind], gain_s=part.seconds, low_s=part.low_s, high_s=part.high_s)
        for part in parts
        if part.kind in _WITHOUT
    ]
