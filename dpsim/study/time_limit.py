"""How long a measurement may take: rounds are cut before settings, and settings that are left out are named."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

from dpsim.grouping import grouped
from dpsim.setting import Setting

FEWEST_ROUNDS = 3
"""Rounds that are measured where the usual ones do not fit into the time."""
_GRACE_S = 30.0
FIRST_ROUNDS_GRACE_S = 10.0
"""What the first rounds of profiles and calibrations may take beyond twice their time."""
FEWEST_SETTINGS = 2


def limit_s(budget_s: float) -> float:
    """Return the most seconds of measuring with a budget: 30 s more than it."""
    return budget_s + _GRACE_S


def first_rounds_text(seconds: float, times: int = 1) -> str:
    """Say how long profiling and calibrating takes that is done ``times``, for ``seconds`` in all."""
    return f"{seconds:.2g} to {2 * seconds:.2g} s, {2 * seconds + times * FIRST_ROUNDS_GRACE_S:.3g} s at most"


@dataclass(frozen=True, kw_only=True)
class Cut:
    """What is done of a round from now on, so that the measurement ends in time.

    ``rounds``: fewer rounds than usual fit. ``beside``: what is visited beside the settings is visited once a round.
    ``settings`` has the indices of the settings that are left out.
    """

    rounds: bool = False
    beside: bool = False
    settings: tuple[int, ...] = ()


def cut(
    settings_s: Sequence[float],
    leaving: Sequence[int],
    beside_s: tuple[float, float],
    left_s: float,
    *,
    usual_rounds: int,
    fewest_rounds: int,
    warm_up: int = 0,
) -> Cut:
    """Return what to leave out so that the usual rounds end in ``left_s``, or else the fewest.

    ``settings_s`` are the seconds of each setting in a round, ``leaving`` the order in which to leave them out, and
    ``beside_s`` what the rest takes as often as usual, and visited once. Rounds are cut first, then what is visited
    several times, and then settings, of which two stay in any case.
    """
    whole_s, (usual_s, once_s) = sum(settings_s), beside_s
    if warm_up * whole_s + usual_rounds * (whole_s + usual_s) <= left_s:
        return Cut()
    if fewest_rounds * (whole_s + usual_s) <= left_s:
        return Cut(rounds=True)
    left_out: list[int] = []
    for index in leaving[: max(0, len(settings_s) - FEWEST_SETTINGS)]:
        if fewest_rounds * (whole_s + once_s) <= left_s:
            break
        left_out.append(index)
        whole_s -= settings_s[index]
    return Cut(rounds=True, beside=True, settings=tuple(sorted(left_out)))


def order_of_leaving(settings: Sequence[Setting]) -> list[int]:
    """Return the indices of settings, the first to leave out first: what is kept longest spreads over each place.

    The first setting of a place stays longest, then one device, the last setting, the middle, and so on by halves; the
    second run of a pair leaves just before the first one.
    """
    ranks: dict[int, tuple[float, int]] = {}
    for members in grouped([*enumerate(settings)], lambda item: item[1].where).values():
        firsts = [item for item in members if item[1].repeat == 0]
        order = {setting: rank for rank, (_, setting) in zip(_by_halves(len(firsts)), firsts, strict=True)}
        for index, setting in members:
            rank = order.get(setting.first_run, len(members))
            alone = setting.plan.devices == 1 and rank > 0
            ranks[index] = (0.5 if alone else rank + 0.25 * setting.repeat, index)
    return sorted(ranks, key=lambda index: ranks[index], reverse=True)


def _by_halves(count: int) -> list[int]:
    """Return the rank of each of so many places: the first, the last, the middle, the quarters, and so on."""
    order, gaps = list(dict.fromkeys([0, count - 1]))[:count], [(0, count - 1)]
    while gaps:
        first, last = gaps.pop(0)
        middle = (first + last) // 2
        if first < middle < last:
            order.append(middle)
            gaps += itertools.pairwise((first, middle, last))
    return [order.index(place) for place in range(count)]
