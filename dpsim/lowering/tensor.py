"""Tensor parallelism: devices own column blocks of layers, and add up what the blocks of a pair of layers compute.

Source: Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language Models Using Model Parallelism" (2019),
section 3. Layers that are not cut are computed by every device of a group.
"""

from __future__ import annotations

from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.builder import Builder
from dpsim.lowering.computation import block_sums, inputs_of, leaf_statistics_bytes, output_bytes, readers_of
from dpsim.lowering.fusion import Buckets, Ints
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD_EVENT,
    EVERY_CLASS,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    SYNCHRONISE_EVENT,
    Schedule,
)
from dpsim.strategy import Tensor, own_blocks
from dpsim.workload import Workload


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step (see ``dpsim.lowering.lower``): those of each part one after another.

    A part's are, for each micro-batch, the forwards of its blocks and of all whole layers, the loss, and their
    backwards reversed. Where blocks are added up, in forward before the layer that reads their sum and in backward
    before the layer that they read, stands a synchronisation of all parts. The buckets of a part's own blocks, and of
    the layers that every part has, are then added up over the devices of the part, with ``shard`` by reduce-scatters;
    the agreement of all ranks that all numbers are finite, the update, and with ``shard`` the all-gathers follow.

    With one part it is the schedule of data parallelism, or of ``dpsim.lowering.zero1``.
    Raises ``ConfigError`` for a workload with fewer column blocks than parts.
    """
    costs, strategy = Costs(ready_s, alpha_s, beta_s_per_byte), cast(Tensor, plan.parallelism)
    if strategy.parts == 1:
        lowering = zero1.lower if strategy.sharded else data_parallel.lower
        return lowering(workload, plan, *costs)
    blocks = 1 + max(layer.column_block for layer in workload.layers)
    if blocks < strategy.parts:
        raise ConfigError(
            f"strategy {plan.strategy} for workload {workload.name!r}, which has {blocks or 'no'} column blocks",
            allowed=f"workloads with {strategy.parts} column blocks or more",
            remedy=f"choose them in the model, like mlp:64x4,column_blocks={strategy.parts}; layers with few columns"
            " and the last layer stay whole",
        )
    owner = np.array([_owner(layer.column_block, blocks, strategy.parts) for layer in workload.layers])
    buckets, order, classes = _buckets(workload, plan, costs, owner)
    builder = Builder()
    for part in range(strategy.parts):
        own = np.flatnonzero((owner == part) | (owner == EVERY_CLASS)).tolist()
        gradients = _compute(builder, workload, plan, part, own)
        held = np.flatnonzero((classes == part) | (classes == EVERY_CLASS)).tolist()
        _end(builder, workload, plan, part, gradients, buckets, order, held)
    stashes = (1,) * strategy.parts
    tensors = workload.ready_order.tensor[order]
    return builder.schedule(
        workload, plan, buckets, bucket_class=classes.tolist(), stashes=stashes, tensor_order=tensors
    )


def _owner(block: int, blocks: int, parts: int) -> int:
    return EVERY_CLASS if block < 0 else next(part for part in range(parts) if block in own_blocks(blocks, part, parts))


def _compute(builder: Builder, workload: Workload, plan: Plan, part: int, own: list[int]) -> dict[int, int]:
    """Append what a part computes; the last backward of each of its layers."""
    inputs, readers, (joins, splits) = inputs_of(workload), readers_of(workload), block_sums(workload)

    def meet(after: list[int], layer: int, of: int, micro_batch: int) -> int:
        """Append the sum over blocks that ``layer`` waits for, of as many bytes as layer ``of`` hands on."""
        return builder.add(
            SYNCHRONISE_EVENT,
            after,
            layer=layer,
            micro_batch=micro_batch,
            size_bytes=output_bytes(workload, plan, of),
            rank_class=part,
            together=True,
        )

    begin = builder.add(OVERHEAD_EVENT, rank_class=part)
    gradients: dict[int, int] = {}
    for micro_batch in range(plan.accumulate):
        outputs: dict[int, int] = {}
        for layer in own:
            after = [outputs[source] for source in inputs[layer] if source in outputs] or [begin]
            if layer in joins:
                after = [meet(after, layer, layer, micro_batch)]
            outputs[layer] = builder.add(FORWARD_EVENT, after, layer=layer, micro_batch=micro_batch, rank_class=part)
        ends = [outputs[layer] for layer in own if not readers[layer]]
        begin = builder.add(LOSS_EVENT, ends, micro_batch=micro_batch, rank_class=part)
        gradients = {}
        for layer in reversed(own):
            read_by = [reader for reader in readers[layer] if reader in gradients]
            after = [gradients[reader] for reader in read_by] or [begin]
            if layer in splits:
                first_block = min(reader for reader in read_by if workload.layers[reader].column_block >= 0)
                after = [meet(after, first_block, layer, micro_batch)]
            gradients[layer] = builder.add(BACKWARD_EVENT, after, layer=layer, micro_batch=micro_batch, rank_class=part)
        begin = gradients[own[0]]
    return gradients


def _buckets(workload: Workload, plan: Plan, costs: Costs, owner: Ints) -> tuple[Buckets, Ints, Ints]:
    """The buckets of what every part has, then of each part; the ready order so divided; the class of each bucket."""
    ready = workload.ready_order
    of_tensor = owner[ready.layer]
    order, starts, classes = list[Ints](), [np.zeros(1, np.int64)], list[int]()
    for rank_class in np.unique(of_tensor).tolist():
        tensors = np.flatnonzero(of_tensor == rank_class)
        edges = fused(workload, plan, costs, tensors)
        starts.append(starts[-1][-1] + edges[1:])
        order.append(tensors)
        classes += [rank_class] * (len(edges) - 1)
    positions, start = np.concatenate(order), np.concatenate(starts)
    ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(ready.size_bytes[positions])])[start]
    return Buckets(start, ends[1:] - ends[:-1]), positions, np.array(classes)


def _end(
    builder: Builder,
    workload: Workload,
    plan: Plan,
    part: int,
    gradients: dict[int, int],
    buckets: Buckets,
    order: Ints,
    held: list[int],
) -> None:
    """Append a part's collectives, in the order in which their gradients are final, and its update."""
    several, sharded = plan.data_devices > 1, plan.parallelism.sharded and plan.data_devices > 1
    layer_of = workload.ready_order.layer[order]
    waits = {
        bucket: [gradients[layer] for layer in layer_of[slice(*buckets.start[bucket : bucket + 2])].tolist()]
        for bucket in held
    }
    in_order = sorted(held, key=lambda bucket: max(waits[bucket]))
    summed = [builder.sum_bucket(buckets, bucket, waits[bucket], plan, part) for bucket in in_order if several]
    statistics = leaf_statistics_bytes(workload.layers[layer] for layer in gradients)
    update = builder.update(
        summed or [min(gradients.items())[1]],
        plan,
        statistics=statistics if several and plan.batch_norm == "leaf" else 0,
        agreement=zero1.agreement_bytes(workload, plan.optimizer) if sharded else zero1.FINITE_BYTES,
        together=True,
        rank_class=part,
    )
    for bucket in in_order if sharded else ():
        builder.gather(buckets, bucket, update, plan.accumulate - 1, part)
