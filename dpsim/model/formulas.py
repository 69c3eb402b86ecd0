"""Closed forms of the allreduce algorithms: their rounds, and their cost by alpha, beta and gamma of a link.

That prices, as an extrapolation, what no table covers.
"""

from __future__ import annotations

import itertools

import msgspec
import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS, Line, half_lines
from dpsim.collective import Collective, Layout
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.machine import Link, Machine

Floats = NDArray[np.float64]
_ONE_MIB = float(2**20)


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
