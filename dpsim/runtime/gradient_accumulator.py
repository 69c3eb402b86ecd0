"""The memory to which micro-batches write their gradients, and the sum of these."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from dpsim.kernels.allreduce.reference import rounded
from dpsim.kernels.rounding import round_array, round_sum
from dpsim.replica import Array, LeafReplica, Replica, Rounding, Slot
from dpsim.runtime.arena import Arena
from dpsim.runtime.micro_batches import MicroBatch


class GradientAccumulator:
    """The gradients of this rank's slots, and those of the micro-batches whose sums are not complete.

    The first ``held`` slots of the arena belong to this rank. A replica that is no ``LeafReplica`` computes one leaf a
    micro-batch. ``rounding`` applies to every leaf's gradients and to every sum of two.
    """

    def __init__(
        self, replica: Replica, arena: Arena, held: int, micro_batches: Sequence[MicroBatch], rounding: Rounding | None
    ) -> None:
        self._replica = replica
        self._leaf_replica = replica if isinstance(replica, LeafReplica) else None
        self._parameters = arena.views(arena.parameters)
        self._slots = [arena.views(slot) for slot in arena.slots[:held]]
        deepest = max(micro_batch.depth for micro_batch in micro_batches)
        self._partial = [arena.views(arena.zeros()) for _ in range(deepest)]
        self._rounding = rounding
        self._xp = arena.memory.xp

    def bind(self, micro_batch: MicroBatch) -> None:
        """Give the replica the memory for the gradients of a micro-batch."""
        first = self._memory(micro_batch.slot, micro_batch.depth)
        if self._leaf_replica is not None and len(micro_batch.edges) > 1:
            extra = zip(micro_batch.edges[1:], self._slots[1:], strict=True)
            self._leaf_replica.bind(self._parameters, first, [Slot(edge, gradients) for edge, gradients in extra])
        else:
            self._replica.bind(self._parameters, first)

    def add_up(self, micro_batch: MicroBatch, names: Sequence[str]) -> None:
        """Add a micro-batch's gradients of these tensors to the partial sums that it completes."""
        to = self._rounding
        if to is not None and self._leaf_replica is None:
            gradients_of_leaf = self._memory(micro_batch.slot, micro_batch.depth)
            for name in names:
                round_in_place(gradients_of_leaf[name], to, self._xp)
        for depth in range(micro_batch.depth, micro_batch.depth - micro_batch.merges, -1):
            target, last = self._memory(micro_batch.slot, depth - 1), self._memory(micro_batch.slot, depth)
            for name in names:
                if to is None:
                    target[name] += last[name]
                else:
                    add_rounded(target[name], last[name], to, self._xp)

    def _memory(self, slot: int, depth: int) -> dict[str, Array]:
        return self._slots[slot] if depth == 0 else self._partial[depth - 1]


def round_in_place(gradients: Array, to: Rounding, xp: Any) -> None:
    """Round gradients; ``xp`` is the module of the arrays."""
    if xp is np:
        round_array(gradients, *to, gradients)
    else:
        gradients[...] = rounded(gradients, *to, xp)


def add_rounded(target: Array, last: Array, to: Rounding, xp: Any) -> None:
    """target += last, rounded; ``xp`` is the module of the arrays."""
    if xp is np:
        round_sum(target, last, *to, target)
    else:
        target[...] = rounded(target + last, *to, xp)
