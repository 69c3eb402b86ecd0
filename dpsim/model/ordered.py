"""What the fixed order of addition costs an allreduce: tables and formulas tell the time of one in an order of its own.

Where a rank's part of the tree is no whole subtree, it has several partial sums, each of which is sent or read.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import Collective
from dpsim.comm.message_steps import BY_DIRECT_EXCHANGE, transmission
from dpsim.kernels.allreduce.tree import slots
from dpsim.machine import Machine

_MOST_SIMULATED = 8
"""Devices up to which messages that are not those of the direct exchange are followed one by one."""


def along_the_tree(
    machine: Machine, collective: Collective, bounds: Sequence[int], points: NDArray[np.float64]
) -> NDArray[np.float64]:
    """A curve of a collective (rows bytes, seconds, ...) that adds along the tree of ``slots(bounds)``.

    What grows with the bytes takes as many times as long as the collective's messages take longer, or as it moves more
    bytes in shared memory; its latency stays.
    """
    where = collective.layout.level(emulated_network=machine.emulated_network, cores=machine.cores)
    factor = _factor(collective, tuple(bounds), inside=where == "inside")
    if factor == 1:
        return points
    times = points[1:]
    return np.vstack([points[0], times[:, :1] + factor * (times - times[:, :1])])


@functools.lru_cache(maxsize=1024)
def _factor(collective: Collective, bounds: tuple[int, ...], *, inside: bool) -> float:
    algorithm, n, order = ALGORITHMS.find(collective.algorithm), collective.devices, slots(bounds)
    if algorithm.place == "elsewhere":
        return 1.0
    held = [order.owners.count(rank) for rank in range(n)]
    if algorithm.place == "shared memory" and inside:
        return (sum(held) + n) / (2 * n)  # each slice of all partial sums is read once, and its sum written to all
    listed = algorithm.place == "messages" and algorithm.steps is None and algorithm.name not in BY_DIRECT_EXCHANGE
    if listed and n <= _MOST_SIMULATED:
        group = n, collective.layout.of_a_node, collective.kind
        return transmission(algorithm.name, order, *group) / transmission(algorithm.name, None, *group)
    busiest = max(max(own * (n - 1), sum(held) - own) for own in held)
    return (busiest + n - 1) / (2 * (n - 1)) if collective.kind == "allreduce" else busiest / (n - 1)
