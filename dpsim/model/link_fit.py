"""The latency and the bandwidth of a link that measured times imply."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS, Line
from dpsim.machine import AllreduceCost, Link
from dpsim.model.formulas import wire_share

Floats = NDArray[np.float64]
ROUNDING = 1e-12
_MOST_ROUNDS = 20


def fitted_links(
    tables: Sequence[AllreduceCost], *, emulated: bool = False, wire_latency_s: float | None = None, cores: int = 0
) -> tuple[Link | None, Link | None]:
    """(link, link inside a node) nearest to tables: each level is fitted to the rows of its own layouts.

    The second is ``None`` where all tables are of one level. Where the level of flat tables is unknown
    (``dpsim.collective.Layout.level``), every device counts as a node.
    """
    inside = [t for t in tables if t.layout.level(emulated_network=emulated, cores=cores) == "inside"]
    across = [t for t in tables if t not in inside]
    in_node = fitted_link(inside) if across else None
    link = fitted_link(across or inside, emulated=emulated, wire_latency_s=wire_latency_s, in_node=in_node)
    return link, in_node


def fitted_link(
    tables: Sequence[AllreduceCost],
    *,
    emulated: bool = False,
    wire_latency_s: float | None = None,
    in_node: Link | None = None,
) -> Link | None:
    """The latency and bandwidth nearest to all tables, by the formulas of their algorithms; ``None`` without a time.

    Non-negative least squares of the relative error over all points, where seconds = alpha latency + beta M / bandwidth
    (reducing is part of the bandwidth). Where an algorithm costs the lowest of several lines, each point belongs
    to the line that is lowest there; this is repeated until no point changes. ``emulated``: each device has a link.
    What a message takes beyond ``wire_latency_s``, where that is known (an emulated link), is overhead of the host.
    What an algorithm sends inside nodes costs what ``in_node`` says, if it is known.
    """
    points = [
        (ALGORITHMS.find(table.algorithm).lines(*table.collective.counts), sent_bytes, time_s)
        for table in tables
        if table.devices > 1
        for sent_bytes, time_s in zip(_sent(table), table.time_s, strict=True)
        if sent_bytes > 0 and time_s > 0
    ]
    if not points:
        return None
    times = np.array([time_s for _, _, time_s in points])
    choices = [0] * len(points)
    for _ in range(_MOST_ROUNDS):
        chosen = [(lines[i], size) for (lines, size, _), i in zip(points, choices, strict=True)]
        rows = np.array([_row(line, size, emulated, in_node) for line, size in chosen])
        solution = nonnegative(rows[:, :2], times, times - rows[:, 2])
        solved = np.append(solution, 1.0)
        costs = ([np.dot(_row(line, size, emulated, in_node), solved) for line in lines] for lines, size, _ in points)
        lowest = [int(np.argmin(of_point)) for of_point in costs]
        if lowest == choices:
            break
        choices = lowest
    residuals = np.abs(rows @ solved / times - 1)
    message_s, seconds_per_byte = solution.tolist()
    latency_s = message_s if wire_latency_s is None else min(wire_latency_s, message_s)
    return Link(
        latency_s=latency_s,
        message_overhead_s=message_s - latency_s,
        bandwidth_bytes_per_s=1 / seconds_per_byte if seconds_per_byte else float("inf"),
        fitted_to=", ".join(dict.fromkeys(f"{table.algorithm} on {table.layout or table.devices}" for table in tables)),
        median_residual=float(np.median(residuals)),
        largest_residual=float(np.max(residuals)),
    )


def _sent(table: AllreduceCost) -> list[float]:
    """A table's sizes in bytes on the wire."""
    share = wire_share(table.wire_dtype) if ALGORITHMS.find(table.algorithm).sixteen_bit_messages else 1.0
    return [share * size for size in table.sizes_bytes]


def _row(line: Line, size_bytes: float, emulated: bool, in_node: Link | None) -> tuple[float, float, float]:
    """The factors of latency and of seconds per byte, and the seconds inside nodes where ``in_node`` is known."""
    alpha, beta = line.alpha, line.beta * (1 if emulated else line.senders)
    if in_node is None:
        return alpha + line.alpha_in_node, (beta + line.beta_in_node) * size_bytes, 0.0
    inside_s = line.alpha_in_node * in_node.latency_s + line.beta_in_node * size_bytes / in_node.bandwidth_bytes_per_s
    return alpha, beta * size_bytes, inside_s


def nonnegative(rows: Floats, times: Floats, goal_s: Floats | None = None) -> Floats:
    """x >= 0 with ``rows @ x`` nearest to ``goal_s`` (``times``): least squares of the error relative to ``times``.

    What adds less than ``ROUNDING`` of the times is 0, as it would be without rounding.
    """
    from scipy.optimize import nnls

    weighted = rows / times[:, None]
    scale = np.max(weighted, axis=0)
    scale[scale == 0] = 1.0
    goal = np.ones(len(times)) if goal_s is None else goal_s / times
    solution: Floats = nnls(weighted / scale, goal)[0]
    solution[solution < ROUNDING] = 0.0
    unscaled: Floats = solution / scale
    return unscaled


def rate_of_time(seconds: Callable[[float], float], wanted_s: float, slowest: float, fastest: float) -> float | None:
    """Return the rate at which something takes ``wanted_s``; the slowest if that is as fast, ``None``: none is."""
    from scipy.optimize import brentq

    if seconds(fastest) > wanted_s:
        return None
    if seconds(slowest) <= wanted_s:
        return slowest
    return math.exp(brentq(lambda rate: seconds(math.exp(rate)) - wanted_s, math.log(slowest), math.log(fastest)))
