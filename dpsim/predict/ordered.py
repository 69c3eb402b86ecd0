"""What the fixed order of addition costs an allreduce: tables and formulas tell the time of one in an order of its own.

Where a rank's part of the tree is no whole subtree, it has several partial sums, each of which is sent or read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import Collective, level, node_counts
from dpsim.comm.message_steps import transmission
from dpsim.kernels.allreduce.tree import PartialSums, slots
from dpsim.machine import Machine

_OWN_PATTERNS = ("halving-doubling", "hierarchical")
"""Algorithms whose messages along a tree are their own; all others go by the direct exchange there."""
_MOST_SIMULATED = 8
"""Devices up to which these messages are followed one by one."""


def along_the_tree(
    machine: Machine, collective: Collective, bounds: Sequence[int], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A curve of a collective (rows bytes, seconds, ...) that adds along the tree of ``slots(bounds)``.

    What grows with the bytes takes as many times as long as the collective's messages take longer, or as it moves more
    bytes in shared memory; its latency stays.
    """
    factor = _factor(machine, collective, slots(bounds))
    if factor == 1:
        return points
    times = points[1:]
    return np.vstack([points[0], times[:, :1] + factor * (times - times[:, :1])])


def _factor(machine: Machine, collective: Collective, order: PartialSums) -> float:
    algorithm, n = ALGORITHMS.find(collective.algorithm), collective.devices
    if algorithm.place == "elsewhere":
        return 1.0
    held = [order.owners.count(rank) for rank in range(n)]
    if algorithm.place == "shared memory" and _inside(machine, collective):
        return (sum(held) + n) / (2 * n)  # each slice of all partial sums is read once, and its sum written to all
    if algorithm.name in _OWN_PATTERNS and n <= _MOST_SIMULATED:
        group = n, node_counts(collective.layout, n)[1], collective.kind
        return transmission(algorithm.name, order, *group) / transmission(algorithm.name, None, *group)
    busiest = max(max(own * (n - 1), sum(held) - own) for own in held)
    return (busiest + n - 1) / (2 * (n - 1)) if collective.kind == "allreduce" else busiest / (n - 1)


def _inside(machine: Machine, collective: Collective) -> bool:
    return level(collective.layout, emulated_network=machine.emulated_network, cores=machine.cores) == "inside"
