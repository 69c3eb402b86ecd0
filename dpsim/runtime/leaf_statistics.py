"""The statistics that batch norm takes from leaves: added over the leaves of a global batch, once a step."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from dpsim.replica import Array, BatchNormReplica, OrderedSum
from dpsim.runtime.micro_batches import MicroBatch, slot_sums


class LeafStatistics:
    """Takes them from a replica after each pass of a step, and gives it their sum over all ranks. Collective."""

    def __init__(self, replica: BatchNormReplica, micro_batches: Sequence[MicroBatch], add: OrderedSum) -> None:
        self._replica, self._micro_batches, self._add = replica, micro_batches, add
        self._of_each: list[list[Array]] = []
        self._total: Array | None = None

    def take(self) -> None:
        """Keep those of the pass that the replica has just computed."""
        self._of_each.append(self._replica.leaf_statistics())

    def add_up(self) -> None:
        """Add those of all passes over the ranks; on a device it is only asked to."""
        self._total = self._add(slot_sums(self._micro_batches, self._of_each, operator.add))
        self._of_each = []

    def update(self) -> None:
        """Update the replica's running statistics."""
        if self._total is None:
            self.add_up()
        assert self._total is not None
        self._replica.update_statistics(self._total)
        self._total = None
