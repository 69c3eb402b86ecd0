"""Checks whether the gradients of a step may be used: all ranks decide alike, before any parameter changes."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import slots
from dpsim.runtime.arena import Arena
from dpsim.runtime.device_step import FetchedGradients


class FiniteCheck(Protocol):
    """A check once a step, of gradients that are added up. ``agrees``: the ranks send each other what they see."""

    agrees: bool

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        """Return whether the gradients are finite, and with ``agrees`` the losses of all ranks.

        With ``agrees`` it is collective, and adds ``sums`` over the ranks, in place.
        """


class WholeGradients:
    """The check where every rank has the sum of all gradients, and sees the same.

    A non-finite loss makes all gradients of the last layer non-finite, so checking its smallest tensor (``probe``) is
    enough.
    """

    agrees = False

    def __init__(self, probe: Array) -> None:
        self._probe = probe

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        return bool(np.isfinite(self._probe).all())


class ShardedGradients:
    """The check where the probe is on some ranks alone: each sends all others whether its part and its loss are finite.

    What the update must know of whole tensors travels in the same message.
    """

    agrees = True

    def __init__(self, arena: Arena, probe: Array, transport: Transport) -> None:
        shards = [arena.gradients[shard.elements] for shard in arena.shards]
        first = (probe.ctypes.data - arena.gradients.ctypes.data) // probe.itemsize
        self._parts = []
        for shard, gradients in zip(arena.shards, shards, strict=True):
            low = max(first - shard.elements.start, 0)
            high = max(first + probe.size - shard.elements.start, 0)
            self._parts.append(gradients[low:high])
        self._sum = ordered_sum(transport, slots(range(transport.size + 1)))

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        finite = math.isfinite(loss) and all(np.isfinite(part).all() for part in self._parts)
        total = self._sum([np.concatenate(([0.0 if finite else 1.0], sums))])
        sums[:] = total[1:]
        return float(total[0]) == 0.0


def finite_check(arena: Arena, probe: Array, transport: Transport) -> FiniteCheck:
    """Return the check for an arena's gradients, of which ``probe`` is a tensor."""
    if arena.memory.deferred:
        return FetchedGradients(probe)
    return ShardedGradients(arena, probe, transport) if arena.sharded else WholeGradients(probe)
