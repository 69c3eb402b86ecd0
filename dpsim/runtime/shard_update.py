"""The optimizer's update of what a rank updates: all parameters, or its shards of them."""

from __future__ import annotations

from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels import update as on_host
from dpsim.memory import Memory
from dpsim.nn.optimizer import LarsUpdate, Part, UpdateKernels, update
from dpsim.optimizer import AdamW, Lars, Optimizer, Sgd
from dpsim.replica import Array
from dpsim.runtime.arena import Arena

_NOTHING = np.empty(0)


class ShardUpdate(Protocol):
    """An update of the shards of an arena, with optimizer state for them alone; one shard may be everything."""

    def measure(self) -> Array:
        """Return what the update needs of whole tensors: sums over this rank's shards, to be added over the ranks.

        In the memory of the arena: on a device they are fetched with all else that the host must know.
        """

    def __call__(self, sums: NDArray[np.float64], learning_rate: float, scale: float, step: int) -> None:
        """Do one step of the optimizer, with the host's sum over the ranks with shards of what ``measure`` returned."""

    def warm_up(self) -> None:
        """Compile the update, and change nothing."""


class ElementUpdate:
    """The update by an optimizer that treats every element alike; it needs to know nothing of whole tensors."""

    def __init__(self, arena: Arena, optimizer: Sgd | AdamW) -> None:
        self._arena, self._optimizer, self._kernels = arena, optimizer, _kernels(arena.memory)
        self._parts = arena.updated_parts()

    def measure(self) -> NDArray[np.float64]:
        return _NOTHING

    def __call__(self, sums: NDArray[np.float64], learning_rate: float, scale: float, step: int) -> None:
        for parameters, gradients, state in self._parts:
            update(parameters, gradients, state, self._optimizer, learning_rate, scale, step, self._kernels)

    def warm_up(self) -> None:
        arena = self._arena
        nothing = arena.parameters[:0]
        state = {slot: own[:0] for slot, own in arena.optimizer_state.items()}
        update(nothing, nothing, state, self._optimizer, 0.0, 1.0, 1, self._kernels)


class TensorUpdate:
    """The update by LARS, which needs the norms of whole tensors."""

    def __init__(self, arena: Arena, optimizer: Lars) -> None:
        names = {name: number for number, name in enumerate(arena.matrices)}
        matrices, of_tensors = len(names), arena.tensor_parts()
        parts = [
            Part(names.get(part.name), part.parameters, part.gradients, part.elements, part.state)
            for part in of_tensors
        ]
        (velocity,) = arena.optimizer_state.values()
        w, g = arena.kept_parameters, arena.kept_gradients
        self._update = LarsUpdate(w, g, velocity, parts, matrices, optimizer, arena.memory)
        empty = [Part(None, 0, 0, 0, 0), Part(0, 0, 0, 0, 0)]
        self._of_nothing = LarsUpdate(w[:0], g[:0], velocity[:0], empty, 1, optimizer, arena.memory)
        self._memory = arena.memory

    def measure(self) -> Array:
        return self._update.measure()

    def __call__(self, sums: NDArray[np.float64], learning_rate: float, scale: float, step: int) -> None:
        self._update.apply(sums, learning_rate, scale)

    def warm_up(self) -> None:
        (sums,) = self._memory.fetch([self._of_nothing.measure()])
        self._of_nothing.apply(sums, 0.0, 1.0)


def shard_update(arena: Arena, optimizer: Optimizer) -> ShardUpdate:
    """Return the update of an arena's shards by an optimizer."""
    return TensorUpdate(arena, optimizer) if isinstance(optimizer, Lars) else ElementUpdate(arena, optimizer)


def _kernels(memory: Memory) -> UpdateKernels:
    """Return the kernels for arrays of a memory; the bits are the same."""
    if not memory.deferred:
        return on_host
    from dpsim.kernels.update_cuda import OnStream  # loads CUDA

    return OnStream(memory.stream.launch)
