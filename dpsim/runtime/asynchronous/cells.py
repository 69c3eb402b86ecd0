"""The parameters that the workers of an asynchronous training update: one copy in shards, or a copy for each worker.

Nothing here waits or locks: ``SharedUpdates`` updates cells that workers share, and a replay cells of its own.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from dpsim.nn.optimizer import update
from dpsim.optimizer import AdamW, Sgd
from dpsim.replica import Array
from dpsim.runtime.asynchronous.update_order import UpdateOrder

_BLOCK = 1 << 14
"""Elements that are averaged at once, so that they stay in a core's cache."""


class Cells:
    """Cells in ``values`` [copies, 1 + slots, 2, elements]: parameters and optimizer state, each in two rows.

    With one copy the cells are as many shards of it, else one copy each. Version v of a cell's parameters is in row
    v % 2, and its optimizer state after u gradients in row u % 2: the last ones stay whole while the next are written.
    """

    def __init__(self, values: Array, number: int, optimizer: Sgd | AdamW) -> None:
        self._values, self._optimizer = values, optimizer
        shards, elements = number // len(values), values.shape[-1]
        edges = [shard * elements // shards for shard in range(shards + 1)]
        self._parts = [slice(*edge) for edge in itertools.pairwise(edges)] * len(values)
        self._cells = [values[cell // shards][..., part] for cell, part in enumerate(self._parts)]

    def initialise(self, parameters: Array) -> None:
        """Set version 0 of every cell, from these flat parameters."""
        self._values[:, 0, 0] = parameters

    def pull(self, cell: int, version: int, parameters: Array) -> None:
        """Copy a version of a cell to its part of flat parameters."""
        parameters[self._parts[cell]] = self._cells[cell][0, version % 2]

    def push(
        self,
        group: Sequence[int],
        versions: Sequence[int],
        made: int,
        gradients: Array,
        rate: float,
        scale: float,
    ) -> float:
        """Write the next versions of the cells of a group, and return how far apart the cells were (``average``).

        The first one makes a step at ``rate`` along ``scale`` * ``gradients``, after ``made`` steps before, and then
        all get their mean.
        """
        old, new = [version % 2 for version in versions], [(version + 1) % 2 for version in versions]
        first, gradient = self._cells[group[0]], gradients[self._parts[group[0]]]
        first[0, new[0]], first[1:, (made + 1) % 2] = first[0, old[0]], first[1:, made % 2]
        state = dict(zip(self._optimizer.slots, first[1:, (made + 1) % 2], strict=True))
        update(first[0, new[0]], gradient, state, self._optimizer, rate, scale, made + 1)
        rows = [self._cells[cell][0] for cell in group]
        sources = [first[0, new[0]], *(row[at] for row, at in zip(rows[1:], old[1:], strict=True))]
        return average(sources, [row[at] for row, at in zip(rows, new, strict=True)])

    def newest(self, order: UpdateOrder) -> list[Array]:
        """Return the parameters and optimizer state [1 + slots, elements] of each copy at the end of an order.

        A copy whose worker is gone is left out, since nobody has trained it to the end.
        """
        cells = [
            np.concatenate([cell[:1, len(tickets) % 2], cell[1:, made % 2]])
            for cell, tickets, made in zip(self._cells, order.orders, order.made, strict=True)
        ]
        if len(self._values) == 1:
            return [np.concatenate(cells, axis=1)]
        return [cell for number, cell in enumerate(cells) if number not in order.gone]


def average(sources: Sequence[Array], targets: Sequence[Array]) -> float:
    """Write the mean of flat arrays into each of ``targets``, which may be among them.

    Returns how far apart they were: sqrt(mean of |x - mean|^2) / |mean|, and 0 for one array.
    """
    if len(sources) == 1:
        return 0.0
    apart = size = 0.0
    for start in range(0, len(sources[0]), _BLOCK):
        part = slice(start, start + _BLOCK)
        values = np.array([source[part] for source in sources])
        mean = values.mean(axis=0)
        values -= mean
        apart, size = apart + float(np.vdot(values, values)), size + float(np.vdot(mean, mean))
        for target in targets:
            target[part] = mean
    return float(np.sqrt(apart / len(sources) / size)) if size else 0.0
