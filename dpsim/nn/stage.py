"""``Stage``: a range of a network's layers, and the arrays of each micro-batch whose backward is still to come."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from dpsim.errors import ConfigError
from dpsim.nn.batch_norm import BatchNorm
from dpsim.nn.column_blocks import BlockStart, BlockSum
from dpsim.nn.layer import Buffers, Layer
from dpsim.nn.ops import Ops
from dpsim.nn.residual import Fork, Join
from dpsim.replica import Array, Batch, Slot, StepEvents, stage_ends


def open_branches(chain: Sequence[Layer]) -> list[int]:
    """Return for each layer how many branches are open behind it: with none, its output is all that crosses there."""

    def opened(layer: Layer) -> int:
        first_block = isinstance(layer, BlockStart) and layer.column_block == 0
        return isinstance(layer, Fork) + first_block - isinstance(layer, Join | BlockSum)

    return list(itertools.accumulate(map(opened, chain)))


def twins(layers: Sequence[Layer]) -> tuple[Layer, ...]:
    """Return copies of layers with arrays of their own for all that a pass keeps.

    Parameters, gradients and running statistics are the same arrays, and so is the branch of a residual: nothing waits
    in it between two passes.
    """
    copies = []
    for layer in layers:
        twin = copy.copy(layer)
        twin.buffers = Buffers(layer.ops, layer.dtype)
        copies.append(twin)
    return tuple(copies)


@dataclass(kw_only=True, eq=False)
class InFlight:
    """The slot of a micro-batch in flight: the layers that compute it, and what it keeps besides their arrays."""

    layers: tuple[Layer, ...]
    buffers: Buffers
    input: Array | None = None
    """What the stage before handed on; ``None`` in the first stage."""
    output: Array | None = None
    logits_gradient: Array | None = None

    def keep(self, name: str, values: Array) -> Array:
        """Return a copy that stays until the slot is used again."""
        copied = self.buffers.take(name, values.shape)
        copied[...] = values
        return copied


class Stage:
    """The layers ``own`` of a chain, neighbours but for column blocks of other devices, with ``in_flight`` slots.

    Every slot has copies of the layers, the first one the layers themselves; with ``recompute`` all slots share these,
    and a slot keeps no more than the stage's input and output. Outside the first stage all layers compute an input
    gradient, which the stage before waits for; in it those behind ``first_trained`` do.
    Raises ``ConfigError`` for a stage that begins or ends inside a residual, or that has no layer or no slot.
    """

    def __init__(
        self,
        chain: Sequence[Layer],
        buffers: Buffers,
        own: Sequence[int],
        in_flight: int = 1,
        *,
        recompute: bool = False,
    ) -> None:
        first, stop = stage_ends(chain, own)
        _check(chain, first, stop, in_flight)
        self.first, self.recompute = first, recompute
        self.numbers = tuple(own)
        self.layers = tuple(chain[number] for number in self.numbers)
        self.last = stop == len(chain)
        self.input_shape = self.layers[0].input_shape
        self.output_shape = self.layers[-1].output_shape
        self._ops: Ops = self.layers[0].ops
        first_trained = next((i for i, layer in enumerate(chain) if layer.tensors), len(chain))
        self._first_with_input_gradient = first if first else first_trained + 1
        copies = [self.layers if recompute or not slot else twins(self.layers) for slot in range(in_flight)]
        self.slots = [
            InFlight(layers=layers, buffers=Buffers(self._ops, chain[0].dtype) if slot else buffers)
            for slot, layers in enumerate(copies)
        ]
        self._recent = self.layers

    def hands_back(self, number: int, layer: Layer) -> bool:
        """Return whether a layer, or a copy of it, computes the gradient of its input."""
        return number >= self._first_with_input_gradient and not layer.reads_samples

    @property
    def copies(self) -> list[Layer]:
        """The copies of layers that slots behind the first one have."""
        return [layer for slot in self.slots if slot.layers is not self.layers for layer in slot.layers]

    @property
    def recent_norms(self) -> list[BatchNorm]:
        """The batch norms of the slot that computed a forward pass last."""
        return [layer for layer in self._recent if isinstance(layer, BatchNorm)]

    @property
    def size_bytes(self) -> int:
        """Bytes of the arrays of all slots but the first one's own."""
        slots = sum(slot.buffers.size_bytes for slot in self.slots[1:])
        return slots + sum(layer.buffers.size_bytes for layer in self.copies)

    def bind(self, parameters: Mapping[str, Array], gradients: Mapping[str, Array], extra: Sequence[Slot] = ()) -> None:
        for layer in self.layers:
            layer.bind(parameters, gradients, extra)
        for slot in self.slots:
            for layer, twin in zip(self.layers, slot.layers, strict=True):
                twin.parameters, twin.gradients, twin.extra_slots = layer.parameters, layer.gradients, layer.extra_slots

    def forward(self, slot: InFlight, x: Array, batch: Batch, done: Callable[[int], None]) -> Array:
        """Return the output of the last layer; ``done`` is called after every layer, with its number."""
        self._recent, leaves = slot.layers, batch.leaves
        if not leaves[-1]:
            return self._empty_forward(slot, batch, done)
        for layer in slot.layers:
            layer.begin(batch)
        for number, layer in zip(self.numbers, slot.layers, strict=True):
            x = layer.forward(x, leaves, training=True)
            done(number)
        return x

    def recompute_forward(self, slot: InFlight, x: Array, batch: Batch, done: Callable[[int], None]) -> None:
        """Compute forward again, with the same random numbers. Running statistics stay as they are."""
        norms = [layer for layer in slot.layers if isinstance(layer, BatchNorm)]
        for norm in norms:
            norm.recomputing = True
        try:
            self.forward(slot, x, batch, done)
        finally:
            for norm in norms:
                norm.recomputing = False

    def backward(self, slot: InFlight, grad: Array, batch: Batch, events: StepEvents) -> Array | None:
        """Return the gradient of the stage's input; None in the first stage.

        A layer's own gradients are computed before its input gradient, so that they can be sent meanwhile.
        """
        leaves = batch.leaves
        if not leaves[-1]:
            return self._empty_backward(slot, batch, events)
        for number, layer in zip(reversed(self.numbers), reversed(slot.layers), strict=True):
            if layer.tensors:
                layer.write_gradients(grad, leaves)
                events.gradients_ready(number)
            if self.hands_back(number, layer):
                grad = layer.input_gradient(grad, leaves)
            events.backward_done(number)
        return grad if self.first else None

    def _empty_forward(self, slot: InFlight, batch: Batch, done: Callable[[int], None]) -> Array:
        """Return a rank without samples: batch norms over several ranks take part all the same."""
        for number, layer in zip(self.numbers, slot.layers, strict=True):
            if _is_collective(layer):
                layer.forward(self._empty(layer), batch.leaves, training=True)
            done(number)
        return self._empty(self.layers[-1])

    def _empty_backward(self, slot: InFlight, batch: Batch, events: StepEvents) -> Array | None:
        """Write zeros."""
        for number, layer in zip(reversed(self.numbers), reversed(slot.layers), strict=True):
            if layer.tensors:
                for gradients in layer.slots:
                    for gradient in gradients.values():
                        gradient[...] = 0
                if _is_collective(layer):
                    layer.write_gradients(self._empty(layer), batch.leaves)
                events.gradients_ready(number)
                if _is_collective(layer) and self.hands_back(number, layer):
                    layer.input_gradient(self._empty(layer), batch.leaves)
            events.backward_done(number)
        return self._ops.zeros((0, *self.input_shape), self.layers[0].dtype) if self.first else None

    def _empty(self, layer: Layer) -> Array:
        return self._ops.zeros((0, *layer.output_shape), layer.dtype)


def _is_collective(layer: Layer) -> bool:
    return isinstance(layer, BatchNorm) and layer.mode != "local"


def _check(chain: Sequence[Layer], first: int, stop: int, in_flight: int) -> None:
    if not 0 <= first < stop <= len(chain):
        raise ConfigError(f"a stage of layers {first} to {stop - 1}", allowed=f"one or more of 0 to {len(chain) - 1}")
    if in_flight < 1:
        raise ConfigError(f"a stage with {in_flight} micro-batches in flight", allowed="1 or more")
    still_open = open_branches(chain)
    for edge in (first, stop):
        if edge and still_open[edge - 1]:
            closed = [number for number, branches in enumerate(still_open) if not branches]
            before = [number for number in closed if number < edge][-1:]
            nearest = [*before, *(number for number in closed if number >= edge)][: len(before) + 1]
            raise ConfigError(
                f"a stage that ends after layer {chain[edge - 1].name!r}, inside a branch",
                allowed=f"for instance stages that end after {' or '.join(chain[number].name for number in nearest)}",
                remedy="cut where the output of one layer is all that is handed on",
            )
