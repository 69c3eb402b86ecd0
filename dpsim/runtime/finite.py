"""Whether the gradients of a step may be used, which every rank must decide alike: before any parameter changes."""

from __future__ import annotations

import math
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import slots
from dpsim.runtime.arena import Arena


class FiniteCheck(Protocol):
    """Asked once a step, when the gradients have been added up. ``agrees``: the ranks send each other what they see."""

    agrees: bool

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        """Whether the gradients are finite, and with ``agrees`` the losses of all ranks.

        With ``agrees`` it is collective, and adds ``sums`` over the ranks, in place.
        """


class WholeGradients:
    """Every rank has the sum of all gradients, and sees the same.

    A loss that is not finite makes every gradient of the last layer so: its smallest tensor, the telltale, tells.
    """

    agrees = False

    def __init__(self, telltale: Array) -> None:
        self._telltale = telltale

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        return bool(np.isfinite(self._telltale).all())


class FetchedGradients:
    """The same of gradients in a device's memory: what the telltale says comes with the one fetch of the step."""

    agrees = False

    def __init__(self, telltale: Array) -> None:
        self._telltale = telltale
        self.finite = True
        """What was fetched in this step."""

    def ask(self) -> Any:
        """Whether all are finite, an array without axes in the device's memory (of NumPy's arrays a scalar)."""
        return np.isfinite(self._telltale).all()

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        return self.finite


class ShardedGradients:
    """The telltale is on some ranks alone: each sends to all others whether its part of it and its loss are finite.

    What the update must know of whole tensors travels in the same message.
    """

    agrees = True

    def __init__(self, arena: Arena, telltale: Array, transport: Transport) -> None:
        shards = [arena.gradients[shard.elements] for shard in arena.shards]
        first = (telltale.ctypes.data - arena.gradients.ctypes.data) // telltale.itemsize
        self._parts = []
        for shard, gradients in zip(arena.shards, shards, strict=True):
            low = max(first - shard.elements.start, 0)
            high = max(first + telltale.size - shard.elements.start, 0)
            self._parts.append(gradients[low:high])
        self._sum = ordered_sum(transport, slots(range(transport.size + 1)))

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        finite = math.isfinite(loss) and all(np.isfinite(part).all() for part in self._parts)
        total = self._sum([np.concatenate(([0.0 if finite else 1.0], sums))])
        sums[:] = total[1:]
        return float(total[0]) == 0.0


def finite_check(arena: Arena, telltale: Array, transport: Transport) -> FiniteCheck:
    """The check for an arena's gradients, of which ``telltale`` is a tensor."""
    if arena.memory.deferred:
        return FetchedGradients(telltale)
    return ShardedGradients(arena, telltale, transport) if arena.sharded else WholeGradients(telltale)
