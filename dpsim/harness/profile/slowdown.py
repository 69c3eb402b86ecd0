"""The compute slowdown of several devices at once, from measurements at steps of several lengths."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from dpsim.machine import ComputeSlowdown


def joined_slowdown(measured: Sequence[tuple[float, ComputeSlowdown]]) -> ComputeSlowdown:
    """The slowdown f t + a of a step that takes t alone, from those measured at steps of several lengths t.

    The line through the shortest and the longest step. A slowdown that does not fall with the length is a factor alone:
    that of the longest step, whose uncertainty is stated.
    """
    (short_s, of_short), (long_s, of_long) = (choose(measured, key=lambda each: each[0]) for choose in (min, max))
    if of_short.factor <= of_long.factor or long_s <= short_s:
        return of_long
    factor = (of_long.factor * long_s - of_short.factor * short_s) / (long_s - short_s)
    factor = min(max(factor, min(1.0, of_long.factor)), of_long.factor)  # rounding may lift it above
    return msgspec.structs.replace(of_long, factor=factor, added_s=(of_long.factor - factor) * long_s)
