"""The optimizer's update of what a rank updates: all parameters, or its shards of them."""

from __future__ import annotations

from dpsim.nn.optimizer import update
from dpsim.optimizer import Optimizer
from dpsim.runtime.arena import Arena


class ShardUpdate:
    """Updates the shards of an arena, with optimizer state for them alone; one shard may be everything."""

    def __init__(self, arena: Arena, optimizer: Optimizer) -> None:
        self._arena, self._optimizer = arena, optimizer
        self._parts = [
            (
                arena.parameters[shard.elements],
                arena.gradients[shard.elements],
                {slot: state[shard.state] for slot, state in arena.optimizer_state.items()},
            )
            for shard in arena.shards
        ]

    def __call__(self, learning_rate: float, scale: float, step: int) -> None:
        """One step of the optimizer (``dpsim.nn.optimizer.update``)."""
        for parameters, gradients, state in self._parts:
            update(parameters, gradients, state, self._optimizer, learning_rate, scale, step)

    def warm_up(self) -> None:
        """Compile the update, and change nothing."""
        arena = self._arena
        nothing = arena.parameters[:0]
        state = {slot: own[:0] for slot, own in arena.optimizer_state.items()}
        update(nothing, nothing, state, self._optimizer, 0.0, 1.0, 1)
