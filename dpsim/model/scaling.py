"""Prices on devices without a table: the nearest tables, scaled by the rounds and bytes that the algorithm counts."""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import Collective, Layout, Level
from dpsim.machine import AllreduceCost, Machine
from dpsim.model.formulas import lines_of, message_s
from dpsim.uncertainty import ASSUMED_LINK, ASSUMED_TABLE

Floats = NDArray[np.float64]
SCALED_STEP = 0.10
"""The standard error of a scaled table for each doubling of the devices away from it, beside the table's own.

Each table of seven published sets, scaled to the other device counts of its set, missed them by errors whose 90 %
quantile, over 1.645, was 0.03 to 0.15 at one doubling (0.11 in the median) and 0.10 to 0.21 at two.
"""
UNMEASURED_LAYOUT = 0.7
"""The standard error where tables of another kind of layout stand in: a factor of three either way at 90 %.

Links inside a node are from twice to a hundred times as fast as those between nodes, so nothing narrower is honest.
"""
_DEVIATIONS_90 = NormalDist().inv_cdf(0.95)
_STANDS_IN: dict[Level, tuple[Level, ...]] = {
    "inside": ("inside", "unknown"),
    "across": ("across", "unknown"),
    "unknown": ("unknown", "across", "inside"),
}


class Nearest(NamedTuple):
    """The table nearest in devices, or the two on either side (fewer devices first), and the error of scaling them."""

    tables: tuple[AllreduceCost, ...]
    error: float


class Counts(NamedTuple):
    """The fewest rounds, and the fewest bytes for each byte reduced, that any of an algorithm's lines has."""

    rounds: float
    bytes: float


def level(machine: Machine, layout: Layout) -> Level:
    """Say whether devices of a machine are inside one node or across several: ``dpsim.collective.Layout.level``."""
    return layout.level(emulated_network=machine.emulated_network, cores=machine.cores)


def level_of(machine: Machine, collective: Collective) -> Level:
    """Say at which level a collective's devices are.

    Flat devices of which nothing is known fill nodes one after the other: where the machine has tables of several
    nodes, as many as one of these nodes holds are inside a node.
    """
    own_level = level(machine, collective.layout)
    return "inside" if own_level == "unknown" and collective.devices <= machine.devices_a_node else own_level


def nearest_tables(machine: Machine, tables: Sequence[AllreduceCost], collective: Collective) -> Nearest | None:
    """Choose the tables that stand for a collective without its own; ``None`` where no table of its level is known.

    They are of the same kind, algorithm and level (inside a node, or across nodes), and of the same devices of a node
    and wire dtype as far as there are such. Their error is the table's own, ``SCALED_STEP`` for each doubling of the
    devices, ``UNMEASURED_LAYOUT`` where their level is not known, and what a node's share of the network leaves open
    (``_sharing``).
    """
    own_level = level_of(machine, collective)
    alike = [t for t in tables if t.devices > 1 and (t.kind, t.algorithm) == (collective.kind, collective.algorithm)]
    levels = {level(machine, t.layout) for t in alike}
    taken = next((each for each in _STANDS_IN[own_level] if each in levels), None)
    if taken is None:
        return None
    alike = [t for t in alike if level(machine, t.layout) == taken]
    if taken != "inside":
        aways = [abs(math.log2(t.layout.of_a_node / collective.layout.of_a_node)) for t in alike]
        alike = [t for t, away in zip(alike, aways, strict=True) if away == min(aways)]
    alike = [t for t in alike if t.wire_dtype == collective.wire_dtype] or alike
    below = max((t for t in alike if t.devices <= collective.devices), key=lambda t: t.devices, default=None)
    above = min((t for t in alike if t.devices >= collective.devices), key=lambda t: t.devices, default=None)
    sides = [t for t in (below, above) if t is not None]
    chosen = tuple(sides if sides[0].devices != sides[-1].devices else sides[:1])
    errors = [math.hypot(_stated(t), SCALED_STEP * math.log2(t.devices / collective.devices)) for t in chosen]
    open_share = _sharing(machine, chosen[0].layout, collective)[1]
    others = _racks(machine, chosen[0].collective, collective) != (1.0, 1.0)
    return Nearest(chosen, math.hypot(min(errors), layout_error(own_level, levels), open_share, ASSUMED_LINK * others))


def layout_error(asked: Level, known: Set[Level]) -> float:
    """The standard error of pricing one level by measurements of others; 0 where they tell of it.

    Of devices inside a node only measurements inside a node tell. Flat devices may be either, which matters where both
    are known.
    """
    measured = "inside" in known if asked == "inside" else asked == "across" or not {"inside", "across"} <= known
    return 0.0 if measured else UNMEASURED_LAYOUT


def scaled_points(machine: Machine, near: Nearest, curves: Sequence[Floats], collective: Collective) -> Floats:
    """Scale the points (bytes; seconds) of the nearest tables to the devices of a collective.

    T(M) = alpha r/r0 + (T0(M) - alpha) b/b0, where r and b are the rounds and bytes that the algorithm counts here, r0
    and b0 on the table's devices, and alpha the table's cost at no bytes. Between two tables it is the mean of both in
    logarithms, weighted by the logarithm of the devices; where both counts lie between those of the two tables, so does
    the price. It never falls with size.
    """
    layouts = (collective.layout, *(table.layout for table in near.tables))
    inside = "inside" in {level(machine, layout) for layout in layouts}
    here = counts(machine, collective, inside=inside)
    there = [counts(machine, t.collective, inside=inside) for t in near.tables]
    sizes = np.unique(np.concatenate([points[0] for points in curves]))
    tables = [_along(points, sizes) for points in curves]
    scaled = []
    for table, of_table, times in zip(near.tables, there, tables, strict=True):
        share = _sharing(machine, table.layout, collective)[0]
        alpha = np.minimum(times[0], times)
        of_message, of_byte = _racks(machine, table.collective, collective)
        ratios = of_message * here.rounds / of_table.rounds, of_byte * share * here.bytes / of_table.bytes
        scaled.append(alpha * ratios[0] + (times - alpha) * ratios[1])
    times = scaled[0]
    if len(scaled) > 1:
        few, many = (math.log2(t.devices) for t in near.tables)
        weight = (math.log2(collective.devices) - few) / (many - few)
        times = scaled[0] ** (1 - weight) * scaled[1] ** weight
        if all(min(ends) <= count <= max(ends) for count, *ends in zip(here, *there, strict=True)):
            times = np.clip(times, np.minimum(*tables), np.maximum(*tables))
    return np.array([sizes, np.maximum.accumulate(times)])


def counts(machine: Machine, collective: Collective, *, inside: bool) -> Counts:
    """Count the rounds and bytes of a collective on its slowest link: between nodes where there are several.

    A reduce-scatter and an all-gather have n - 1 rounds of a ring, and (n - 1) / n bytes. ``inside`` counts all devices
    as of one node. Both sides of a ratio must be counted alike, as rounds of one link.
    """
    nodes, of_a_node = (1, collective.devices) if inside else collective.counts
    lines = lines_of(collective, nodes, of_a_node)
    if nodes == 1:
        return Counts(
            min(line.alpha + line.alpha_in_node for line in lines), min(line.beta + line.beta_in_node for line in lines)
        )
    senders = [1 if machine.emulated_network else line.senders for line in lines]
    shared = [line.beta * count for line, count in zip(lines, senders, strict=True)]
    return Counts(min(line.alpha for line in lines), min(shared))


def _sharing(machine: Machine, layout: Layout, collective: Collective) -> tuple[float, float]:
    """(factor on the bytes' time for k devices of a node in place of the table's k0, standard error of it).

    A library sends over as many network adapters as a node has: with a of them k devices share min(a, k). Where nothing
    states them the factor is 1 with one for all devices, and k0 / k with one for each. The middle of both in logarithms
    is taken, and 90 % reach from one to the other. Inside a node whose devices are joined in pairs (a mesh) each has
    links to k - 1 others. Algorithms of messages send as they count, and emulated links are each device's own.
    """
    of_a_library = ALGORITHMS.find(collective.algorithm).place in ("library", "elsewhere")
    if machine.emulated_network or not of_a_library:
        return 1.0, 0.0
    before, after = layout.of_a_node, collective.layout.of_a_node
    of_level = level_of(machine, collective)
    if of_level == "inside":
        return ((before - 1) / (after - 1) if machine.wiring == "mesh" and min(before, after) > 1 else 1.0), 0.0
    if of_level != "across":
        return 1.0, 0.0
    adapters = machine.network_adapters
    if adapters is not None:
        return min(adapters, before) / min(adapters, after), 0.0
    ratio = before / after
    return math.sqrt(ratio), abs(math.log(ratio)) / 2 / _DEVIATIONS_90


def _racks(machine: Machine, before: Collective, after: Collective) -> tuple[float, float]:
    """(factor on a message's time, on a byte's) between the links that two collectives cross: (1, 1) if it is the same.

    Where the machine has several racks, those of a table within one are slower beyond it by as much as the links.
    """
    first, second = (machine.link_between(each.counts[0]) for each in (before, after))
    if first is None or second is None or first is second:
        return 1.0, 1.0
    of_message = message_s(second) / message_s(first) if message_s(first) > 0 else 1.0
    return of_message, first.bandwidth_bytes_per_s / second.bandwidth_bytes_per_s


def _along(points: Floats, sizes: Floats) -> Floats:
    """Seconds at sizes along points (bytes; seconds), which go on beyond the last as between the last two."""
    (before, last), (earlier_s, last_s) = points[0, -2:], points[1, -2:]
    beyond = last_s + (last_s - earlier_s) / (last - before) * (sizes - last)
    seconds: Floats = np.where(sizes > last, beyond, np.interp(sizes, points[0], points[1]))
    return seconds


def _stated(table: AllreduceCost) -> float:
    return ASSUMED_TABLE if table.relative_uncertainty is None else table.relative_uncertainty
