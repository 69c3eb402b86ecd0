"""The search for a system's best setting, by one choice after another."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec

from dpsim.codec import Noun
from dpsim.experiments.peers.setting import Change, Setting
from dpsim.harness.measurement.loop import StopRule, rounds

_SCREENING_ROUNDS, _SEARCH_ROUNDS = 2, 3
_BEHIND = 1.1
"""A setting whose step takes longer than the best one's by this factor after the screening rounds leaves the search."""


class TriedSetting(Noun, frozen=True):
    """A setting, and the least median step of its visits, made in turn with those of the same ``choice``."""

    setting: Setting
    step_s: float
    choice: int


def least_times_s(
    settings: list[Setting], visit: Callable[[Setting], float], *, seed: int = 0, turn: int = 0
) -> list[float]:
    """The least step time of each setting, all visited in turn; those clearly behind are visited no more.

    Of a few visits the least counts, because what disturbs them only adds time.
    """
    least_s: dict[Setting, float] = dict.fromkeys(settings, math.inf)
    remaining = list(settings)
    stop = StopRule(least_rounds=_SCREENING_ROUNDS, most_rounds=_SEARCH_ROUNDS)
    for current in rounds(stop, suffice=lambda: len(remaining) == 1, seed=seed):
        for setting in current.order(remaining, turn):
            least_s[setting] = min(least_s[setting], visit(setting))
        if current.number + 1 >= _SCREENING_ROUNDS:
            limit_s = _BEHIND * min(least_s.values())
            remaining[:] = [setting for setting in remaining if least_s[setting] <= limit_s]
    return list(least_s.values())


def search(
    first: Setting,
    dimensions: list[list[Change]],
    measure_in_turn: Callable[[list[Setting]], list[float]],
    drop: Callable[[Setting], None],
) -> tuple[Setting, list[TriedSetting]]:
    """The best setting, by one choice after another: in each, the best so far against each change of it.

    ``measure_in_turn`` returns the step times of some settings; ``drop`` is called with those that lost.
    """
    best, tried = first, []
    for number, changes in enumerate(dimensions):
        candidates = list(dict.fromkeys([best, *(msgspec.structs.replace(best, **change) for change in changes)]))
        times_s = measure_in_turn(candidates)
        tried += [TriedSetting(setting=s, step_s=t, choice=number) for s, t in zip(candidates, times_s, strict=True)]
        best = candidates[times_s.index(min(times_s))]
        for setting in candidates:
            if setting != best:
                drop(setting)
    return best, tried
