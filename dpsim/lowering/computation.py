"""What a step computes, whatever the strategy: its operations and dependencies, and when gradients become final."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.lowering.builder import Builder, Columns
from dpsim.memo import remember
from dpsim.plan import Plan
from dpsim.schedule import BACKWARD_EVENT, FORWARD_EVENT, LOSS_EVENT, OVERHEAD_EVENT, SYNCHRONISE_EVENT
from dpsim.units import ITEM_BYTES
from dpsim.workload import Layer, Workload


@dataclass(frozen=True, eq=False)
class Computation:
    """The operations of all micro-batches, which do not depend on the buckets, with their dependencies.

    ``statistics`` is the sum that batch norm's mode ``leaf`` needs after all buckets, in bytes (0: none).
    ``finals`` are the backward operations that make each tensor final, in ready order, of each micro-batch.
    """

    columns: Columns
    statistics: int
    finals: tuple[NDArray[np.int32], ...]

    @property
    def final(self) -> NDArray[np.int32]:
        """Those of the last micro-batch."""
        return self.finals[-1]


@remember
def ready_times(workload: Workload, local_batch: float) -> NDArray[np.float64]:
    """Return seconds from the start of a backward pass until each tensor is final, in ready order, at a local batch.

    r = (backward time of the layers after its own) + its layer's ``gradient_ready_s``, never before the tensor before.
    """
    times = workload.times(local_batch)
    backward = times.backward_s[::-1]
    start = (np.cumsum(backward) - backward)[::-1]
    ready = (start + times.gradient_ready_s)[workload.ready_order.layer]
    return np.maximum.accumulate(ready)


@remember
def computation_of(workload: Workload, accumulate: int, batch_norm: str, *, distributed: bool) -> Computation:
    """Return the operations of all micro-batches in order, each behind those whose results it reads.

    In a ``distributed`` step, of several devices, the allreduces that a script asks for itself follow the last loss:
    computation waits for each, wherever it stands in the step.
    """
    sums = [global_statistics_bytes(layer) if batch_norm == "global" else (0, 0) for layer in workload.layers]
    inputs, readers = inputs_of(workload), readers_of(workload)
    builder = Builder()
    builder.add(OVERHEAD_EVENT)

    def add(kind: int, layer: int, micro_batch: int, after: list[int], size_bytes: int = 0) -> int:
        """Append a computation, and the global sum behind it where it has one; the number of the last of them."""
        number = builder.add(kind, after, layer=layer, micro_batch=micro_batch)
        if size_bytes:
            number = builder.add(
                SYNCHRONISE_EVENT, [number], layer=layer, micro_batch=micro_batch, size_bytes=size_bytes
            )
        return number

    order = workload.ready_order.layer.tolist()
    finals = []
    begin = 0
    for micro_batch in range(accumulate):
        outputs: dict[int, int] = {}
        for number, layers in enumerate(inputs):
            after = [outputs[layer] for layer in layers] or [begin]
            outputs[number] = add(FORWARD_EVENT, number, micro_batch, after, sums[number][0])
        loss = add(
            LOSS_EVENT, -1, micro_batch, [outputs[number] for number, layers in enumerate(readers) if not layers]
        )
        for size_bytes in workload.own_allreduce_bytes if distributed and micro_batch == accumulate - 1 else ():
            loss = builder.add(SYNCHRONISE_EVENT, [loss], micro_batch=micro_batch, size_bytes=size_bytes)
        gradients: dict[int, int] = {}
        final: dict[int, int] = {}
        for number in reversed(range(len(workload.layers))):
            after = [gradients[layer] for layer in readers[number]] or [loss]
            final[number] = len(builder)
            gradients[number] = add(BACKWARD_EVENT, number, micro_batch, after, sums[number][1])
        finals.append(np.array([final[layer] for layer in order], np.int32))
        begin = len(builder) - 1
    return Computation(
        columns=builder.columns(),
        statistics=leaf_statistics_bytes(workload.layers) if batch_norm == "leaf" else 0,
        finals=tuple(finals),
    )


@remember
def readers_of(workload: Workload) -> list[list[int]]:
    """Return the layers that read each layer; the loss reads those that no layer reads."""
    readers: list[list[int]] = [[] for _ in workload.layers]
    for number, layers in enumerate(inputs_of(workload)):
        for layer in layers:
            readers[layer].append(number)
    return readers


@remember
def inputs_of(workload: Workload) -> list[list[int]]:
    """Return the layers that each layer reads: those that ``depends_on`` names, or the one before it."""
    number = {layer.name: index for index, layer in enumerate(workload.layers)}
    inputs = []
    for index, layer in enumerate(workload.layers):
        if layer.depends_on is None:
            inputs.append([index - 1] if index else [])
            continue
        named = sorted({number[name] for name in layer.depends_on})
        if named and named[-1] >= index:
            raise ConfigError(
                f"layer {layer.name!r} reads {workload.layers[named[-1]].name!r}, which does not stand before it",
                allowed="layers in forward order, each behind those that it depends on",
            )
        inputs.append(named)
    return inputs


@remember
def block_sums(workload: Workload) -> tuple[frozenset[int], frozenset[int]]:
    """Return the layers whose forward, and those whose backward, needs a sum over the column blocks of others.

    No sum is needed of the gradients of samples: before the first layer with tensors.
    """
    layers, inputs, readers = workload.layers, inputs_of(workload), readers_of(workload)
    trained = next((number for number, layer in enumerate(layers) if layer.tensors), len(layers))

    def join(others: list[list[int]], first: int) -> frozenset[int]:
        return frozenset(
            number
            for number, layer in enumerate(layers)
            if layer.column_block < 0
            and number >= first
            and any(layers[each].column_block >= 0 for each in others[number])
        )

    return join(inputs, 0), join(readers, trained)


def global_statistics_bytes(layer: Layer) -> tuple[int, int]:
    """Return what batch norm ``global`` sums over the devices in forward (float64) and in backward; else 0, 0."""
    channels = layer.batch_norm_channels
    if not channels:
        return 0, 0
    return 8 * (1 + 2 * channels), 2 * channels * ITEM_BYTES[layer.tensors[0].dtype]


def leaf_statistics_bytes(layers: Iterable[Layer]) -> int:
    """Return what batch norms with mode ``leaf`` in these layers sum over devices at a step's end (float64)."""
    return sum(8 * (1 + 2 * layer.batch_norm_channels) for layer in layers if layer.batch_norm_channels)


def output_bytes(workload: Workload, plan: Plan, layer: int) -> int:
    """Return what a layer hands on for a micro-batch. Raises ``ConfigError`` where the workload does not say it."""
    of_layer = workload.layers[layer]
    if not of_layer.output_bytes_per_sample:
        raise ConfigError(
            f"strategy {plan.strategy} for workload {workload.name!r}, which does not say how much layer"
            f" {of_layer.name!r} hands on to other devices",
            allowed="workloads whose layers state output_bytes_per_sample",
            remedy="profile the model again with dpsim profile, or add it to the workload's file",
        )
    return math.ceil(math.ceil(plan.local_batch) * of_layer.output_bytes_per_sample)
