"""Closed forms of the allreduce algorithms: their rounds, their cost by alpha, beta and gamma of a link, and the link
that a machine's own tables imply. It prices, as an extrapolation, what no table covers.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS, Line, half_lines
from dpsim.collective import Collective, Layout
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.machine import AllreduceCost, Link, Machine

Floats = NDArray[np.float64]
_ONE_MIB = float(2**20)
_MOST_ROUNDS = 20


def wire_share(wire_dtype: str) -> float:
    """Bytes on the wire for a byte of gradients: a half where float32 travels as 16 bits."""
    return 0.5 if wire_dtype in SIXTEEN_BITS else 1.0


def on_the_wire(link: Link, wire_dtype: str) -> Link:
    """The link for gradients that travel as ``wire_dtype``: M bytes of gradients cost what they are on the wire."""
    share = wire_share(wire_dtype)
    return msgspec.structs.replace(link, bandwidth_bytes_per_s=link.bandwidth_bytes_per_s / share)


def lines_of(collective: Collective, nodes: int, of_a_node: int) -> tuple[Line, ...]:
    """The lines of a collective by its algorithm: those of an allreduce, or of a half of one (``half_lines``)."""
    algorithm = ALGORITHMS.find(collective.algorithm)
    half = collective.kind in ("reduce-scatter", "all-gather")
    return half_lines(algorithm, nodes, of_a_node) if half else algorithm.lines(nodes, of_a_node)


def link_points(machine: Machine, link: Link, collective: Collective) -> Floats:
    """Points (bytes; seconds) of a collective's cost by the machine's ``link``: the lowest of its lines at each size.

    In a layout of one node it is the link inside the node, where the machine has one; in one of several racks the
    slower of the links between nodes and between racks.
    """
    nodes, of_a_node = collective.counts
    in_node = machine.link_in_node or link
    across = in_node if nodes == 1 else machine.link_between(nodes) or link
    lines = [
        _seconds(line, on_the_wire(across, collective.wire_dtype), in_node, shared=not machine.emulated_network)
        for line in lines_of(collective, nodes, of_a_node)
    ]
    return _lowest(lines)


def send_points(machine: Machine, link: Link, layout: Layout) -> Floats:
    """Points (bytes; seconds) of one message, alpha + M beta, by the machine's ``link`` (see ``link_points``)."""
    across = layout.counts(2)[0] > 1
    of_level = (machine.link_between(2) or link) if across else (machine.link_in_node or link)
    return line_points(message_s(of_level), 1 / of_level.bandwidth_bytes_per_s)


def line_points(alpha_s: float, beta: float) -> Floats:
    """Points (bytes; seconds) of alpha + M beta."""
    return _lowest([(alpha_s, beta)])


def _seconds(line: Line, link: Link, in_node: Link, *, shared: bool) -> tuple[float, float]:
    """(seconds, seconds per byte) of a line; ``shared`` says that the devices of a node share one link."""
    senders = line.senders if shared else 1
    base = line.alpha * message_s(link) + line.alpha_in_node * message_s(in_node)
    base += link.bucket_overhead_s if line.alpha else in_node.bucket_overhead_s
    slope = line.beta * senders / link.bandwidth_bytes_per_s + line.gamma * link.reduce_s_per_byte
    slope += line.beta_in_node / in_node.bandwidth_bytes_per_s + line.gamma_in_node * in_node.reduce_s_per_byte
    return base, slope


def message_s(link: Link) -> float:
    """What a message costs whatever its size: on the wire, and on the host."""
    return link.latency_s + link.message_overhead_s


def _lowest(lines: list[tuple[float, float]]) -> Floats:
    """The lower envelope of lines (value at 0, slope), as points; the last two lie on its last line."""
    crossings = {0.0}
    for (base, slope), (other_base, other_slope) in itertools.combinations(lines, 2):
        if slope != other_slope:
            crossing = (other_base - base) / (slope - other_slope)
            crossings |= {crossing} if crossing >= 1.0 else set()
    sizes = np.array([*sorted(crossings), 2 * max(max(crossings), _ONE_MIB)])
    return np.array([sizes, np.min([base + slope * sizes for base, slope in lines], axis=0)])


def rounds(collective: Collective) -> int:
    """Rounds of messages that follow one another, each of which ends when a rank polls; 1 on one device.

    A reduce-scatter or an all-gather has half as many as the allreduce.
    """
    if collective.devices == 1:
        return 1
    count = ALGORITHMS.find(collective.algorithm).rounds(*collective.counts)
    return count if collective.kind == "allreduce" else -(-count // 2)


def fitted_links(
    tables: Sequence[AllreduceCost], *, emulated: bool = False, wire_latency_s: float | None = None, cores: int = 0
) -> tuple[Link | None, Link | None]:
    """(link, link inside a node) nearest to tables: each level is fitted to the rows of its own layouts.

    The second is ``None`` where all tables are of one level. Where the level of flat tables is unknown
    (``dpsim.collective.level``), every device counts as a node.
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
        known = np.append(solution, 1.0)
        costs = ([np.dot(_row(line, size, emulated, in_node), known) for line in lines] for lines, size, _ in points)
        lowest = [int(np.argmin(of_point)) for of_point in costs]
        if lowest == choices:
            break
        choices = lowest
    residuals = np.abs(rows @ known / times - 1)
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


ROUNDING = 1e-12


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
