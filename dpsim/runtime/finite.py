"""Checks whether the gradients of a step may be used: all ranks decide alike, before any parameter changes."""

from __future__ import annotations

import math
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.ordered_sum import ordered_sum
from dpsim.comm.transport import Array, Transport
from dpsim.kernels.allreduce.tree import slots
from dpsim.replica import OrderedSum
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


class PartialGradients:
    """The check where ranks have different gradients: each sends all others whether its part and its loss are finite.

    A rank's part is what it updates of the tensor ``probe``. Where ``shards`` are updated, what the update must know of
    whole tensors travels in the same message of the devices that share them (``transport``), from one replica of
    several; where there are several rank classes, ``world`` tells all of them, and alone where the update need know
    nothing.
    """

    agrees = True

    def __init__(self, arena: Arena, probe: str, transport: Transport, world: Transport | None) -> None:
        gradients = arena.kept_gradients
        parts = [part for part in arena.tensor_parts() if part.name == probe]
        self._parts = [gradients[part.gradients : part.gradients + part.elements] for part in parts]
        self._sum, self._of_first_replica = _sum_over(transport) if arena.sharded else None, arena.of_first_replica
        self._of_all = None if world is None else _sum_over(world)

    def __call__(self, loss: float, sums: NDArray[np.float64]) -> bool:
        finite = math.isfinite(loss) and all(np.isfinite(part).all() for part in self._parts)
        total = np.array([0.0 if finite else 1.0])
        if self._sum is not None and (len(sums) or self._of_all is None):
            own = sums if self._of_first_replica else np.zeros_like(sums)
            summed = self._sum([np.concatenate((total, own))])
            total, sums[:] = summed[:1].copy(), summed[1:]
        if self._of_all is not None:
            total = self._of_all([total])
        return float(total[0]) == 0.0


def _sum_over(transport: Transport) -> OrderedSum:
    return ordered_sum(transport, slots(range(transport.size + 1)))


def finite_check(arena: Arena, probe: str, transport: Transport, world: Transport | None) -> FiniteCheck:
    """Return the check for an arena's gradients, of which ``probe`` is a tensor of this rank's.

    ``world`` is a transport of all ranks, where these are of several classes.
    """
    if arena.sums_everything and world is None:
        gradient = arena.gradient_views(arena.gradients)[probe]
        return FetchedGradients(gradient) if arena.memory.deferred else WholeGradients(gradient)
    return PartialGradients(arena, probe, transport, world)
