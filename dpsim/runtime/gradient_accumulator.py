"""Where the passes of a step write their gradients, and how these are added up."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from dpsim.kernels.rounding import round_array, round_sum
from dpsim.replica import Array, LeafReplica, Replica, Rounding, Slot
from dpsim.runtime.arena import Arena
from dpsim.runtime.micro_batches import MicroBatch


class GradientAccumulator:
    """The gradients of this rank's slots, and of those passes whose sums are not complete.

    ``held`` of the arena's slots are this rank's. A replica that does not take leaves is given one a pass.
    ``rounding``: of every leaf's gradients, and of every sum of two.
    """

    def __init__(
        self, replica: Replica, arena: Arena, held: int, micro_batches: Sequence[MicroBatch], rounding: Rounding | None
    ) -> None:
        self._replica = replica
        self._leaf_replica = replica if isinstance(replica, LeafReplica) else None
        self._parameters = arena.views(arena.parameters)
        self._slots = [arena.views(slot) for slot in arena.slots[:held]]
        deepest = max(one.depth for one in micro_batches)
        self._partial = [arena.views(np.zeros_like(arena.gradients)) for _ in range(deepest)]
        self._rounding = rounding

    def bind(self, one: MicroBatch) -> None:
        """Give the replica the memory that a pass writes to."""
        first = self._memory(one.slot, one.depth)
        if self._leaf_replica is not None and len(one.edges) > 1:
            extra = zip(one.edges[1:], self._slots[1:], strict=True)
            self._leaf_replica.bind(self._parameters, first, [Slot(edge, gradients) for edge, gradients in extra])
        else:
            self._replica.bind(self._parameters, first)

    def add_up(self, one: MicroBatch, names: Sequence[str]) -> None:
        """Add the gradients of these tensors from a pass to those of the passes before it that it completes."""
        to = self._rounding
        if to is not None and self._leaf_replica is None:
            of_leaf = self._memory(one.slot, one.depth)
            for name in names:
                round_array(of_leaf[name], *to, of_leaf[name])
        for depth in range(one.depth, one.depth - one.merges, -1):
            target, last = self._memory(one.slot, depth - 1), self._memory(one.slot, depth)
            for name in names:
                if to is None:
                    target[name] += last[name]
                else:
                    round_sum(target[name], last[name], *to, target[name])

    def _memory(self, slot: int, depth: int) -> dict[str, Array]:
        return self._slots[slot] if depth == 0 else self._partial[depth - 1]
