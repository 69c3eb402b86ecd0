"""A step whose layers are divided among rank classes: into stages of neighbours, and stages into parts.

Every part of a stage computes the stage's whole layers, and its share of the column blocks of the others.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from dpsim.errors import ConfigError
from dpsim.lowering import zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.builder import Builder
from dpsim.lowering.computation import block_sums, inputs_of, leaf_statistics_bytes, output_bytes, readers_of
from dpsim.lowering.fusion import Buckets, Ints
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    SEND_EVENT,
    SYNCHRONISE_EVENT,
    Schedule,
)
from dpsim.strategy import own_blocks
from dpsim.workload import Workload


class Stage(NamedTuple):
    """Layers ``first`` to ``stop - 1``, and (``FORWARD_EVENT`` or ``BACKWARD_EVENT``, micro-batch) in their order.

    ``stash``: how many micro-batches it keeps activations of at once. With ``recompute`` it computes a micro-batch's
    forward again before its backward.
    """

    first: int
    stop: int
    order: Sequence[tuple[int, int]]
    stash: int
    recompute: bool = False


def divided(workload: Workload, plan: Plan, costs: Costs, stages: Sequence[Stage]) -> Schedule:
    """Return the schedule of some stages; part p of stage s is rank class s ``parts`` + p. In the order of the arrays:

    the overhead of each class; forwards and backwards of the micro-batches, each stage's in its order, a receive before
    and a send after them where stages meet, and before what needs a sum over column blocks a synchronisation of the
    parts of the stage; then for each class the allreduces of its buckets over the devices that have the same layers and
    blocks (reduce-scatters where the strategy shards), in the order in which their gradients are final, the sum of
    batch norm's leaf statistics, the agreement of all ranks that all numbers are finite, the update, and all-gathers
    where it shards.

    Each class has buckets of its own blocks; those of whole layers are of every part of their stage.
    Raises ``ConfigError`` for fewer column blocks than parts, and for layers whose output has an unknown size.
    """
    steps = _Classes(workload, plan, stages)
    waiting = [deque(stage.order) for stage in stages]
    while any(waiting):
        for stage, queue in enumerate(waiting):
            if queue and steps.can_begin(stage, *queue[0]):
                steps.append(stage, *queue.popleft())
    return steps.end(costs)


class _Classes:
    """Appends what classes compute to a ``Builder``."""

    def __init__(self, workload: Workload, plan: Plan, stages: Sequence[Stage]) -> None:
        self._builder, self._workload, self._plan, self._stages = Builder(), workload, plan, stages
        self._parts, self._several = plan.parallelism.parts, plan.data_devices > 1
        self._inputs, self._readers = inputs_of(workload), readers_of(workload)
        self._joins, self._splits = block_sums(workload) if self._parts > 1 else (frozenset(), frozenset())
        self._owner = _owners(workload, plan)
        self._layers = [
            [layer for layer in range(stage.first, stage.stop) if self._owner[layer] in (-1, part)]
            for stage in stages
            for part in range(self._parts)
        ]
        self._sizes = [output_bytes(workload, plan, stage.first - 1) for stage in stages[1:]]
        self._overhead = [self._builder.add(OVERHEAD_EVENT, rank_class=own) for own in range(len(self._layers))]
        self._sent: dict[tuple[int, int, int], int] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self._outputs: dict[tuple[int, int], dict[int, int]] = {}
        self._gradients: list[dict[int, int]] = [{} for _ in self._layers]

    def can_begin(self, stage: int, kind: int, micro_batch: int) -> bool:
        """Return whether what a stage needs for a forward or a backward has been sent."""
        first = 0 if kind == FORWARD_EVENT else len(self._stages) - 1
        return stage == first or (kind, stage * self._parts, micro_batch) in self._sent

    def append(self, stage: int, kind: int, micro_batch: int) -> None:
        """Append a forward or a backward of each part of a stage, with its messages."""
        for own in range(stage * self._parts, (stage + 1) * self._parts):
            (self._forward if kind == FORWARD_EVENT else self._backward)(stage, own, micro_batch)

    def _forward(self, stage: int, own: int, micro_batch: int) -> None:
        first, outputs = self._stages[stage].first, dict[int, int]()
        if stage:
            outputs[first - 1] = self._receive(FORWARD_EVENT, own, micro_batch)
        self._compute_forward(FORWARD_EVENT, own, micro_batch, outputs, self._overhead[own])
        self._outputs[own, micro_batch] = outputs
        if stage < len(self._stages) - 1:
            self._send(FORWARD_EVENT, stage, own, micro_batch, [outputs[self._stages[stage].stop - 1]])
            return
        ends = [number for layer, number in outputs.items() if not self._readers[layer]]
        self._begun[own, micro_batch] = self._compute(LOSS_EVENT, own, micro_batch, -1, ends)

    def _compute_forward(self, kind: int, own: int, micro_batch: int, outputs: dict[int, int], begin: int) -> None:
        """Append all layers of a class, each behind the ``outputs`` that it reads, or behind ``begin``."""
        for layer in self._layers[own]:
            after = [outputs[source] for source in self._inputs[layer] if source in outputs] or [begin]
            if layer in self._joins:
                after = [self._join(kind, own, micro_batch, layer, layer, after)]
            outputs[layer] = self._compute(kind, own, micro_batch, layer, after)

    def _backward(self, stage: int, own: int, micro_batch: int) -> None:
        first, outputs, again = self._stages[stage].first, self._outputs[own, micro_batch], dict[int, int]()
        if self._stages[stage].recompute:
            again = {first - 1: outputs[first - 1]} if stage else {}
            self._compute_forward(RECOMPUTE_EVENT, own, micro_batch, again, outputs[self._layers[own][0]])
        if stage < len(self._stages) - 1:
            begin = self._receive(BACKWARD_EVENT, own, micro_batch)
        else:
            begin = self._begun[own, micro_batch]
        gradients = self._gradients[own] = {}
        for layer in reversed(self._layers[own]):
            after = self._gradient_sources(own, micro_batch, layer) or [begin]
            after += [again[layer]] if layer in again else []
            gradients[layer] = self._compute(BACKWARD_EVENT, own, micro_batch, layer, after)
        if stage:
            self._send(BACKWARD_EVENT, stage, own, micro_batch, self._gradient_sources(own, micro_batch, first - 1))

    def _gradient_sources(self, own: int, micro_batch: int, layer: int) -> list[int]:
        """Return the sources of a layer's output gradient: the class's backwards that read it, or their sum."""
        gradients = self._gradients[own]
        readers = [reader for reader in self._readers[layer] if reader in gradients]
        blocks = [reader for reader in readers if self._owner[reader] >= 0]
        after = [gradients[reader] for reader in readers]
        if layer in self._splits and blocks:
            return [self._join(BACKWARD_EVENT, own, micro_batch, min(blocks), layer, after)]
        return after

    def _join(self, kind: int, own: int, micro_batch: int, layer: int, of: int, after: list[int]) -> int:
        """Append the sum over blocks of what layer ``of`` hands on, which is ``layer``'s."""
        return self._builder.add(
            SYNCHRONISE_EVENT,
            after,
            layer=layer,
            micro_batch=micro_batch,
            size_bytes=output_bytes(self._workload, self._plan, of),
            rank_class=own,
            meeting=self._builder.meeting(kind, own // self._parts, micro_batch, of),
        )

    def end(self, costs: Costs) -> Schedule:
        """Append the collectives and the update of each class: its last backwards make the gradients final."""
        buckets, order, classes, copies = self._buckets(costs)
        layer_of, builder = self._workload.ready_order.layer[order], self._builder
        for own, layers in enumerate(self._layers):
            gradients = self._gradients[own]
            finals = {
                bucket: [gradients[layer] for layer in layer_of[slice(*buckets.start[bucket : bucket + 2])].tolist()]
                for bucket in range(len(classes))
                if classes[bucket] <= own < classes[bucket] + copies[bucket]
            }
            held = sorted(finals, key=lambda bucket: max(finals[bucket])) if self._several else []
            summed = [builder.sum_bucket(buckets, bucket, finals[bucket], self._plan, own) for bucket in held]
            sharded = self._plan.parallelism.sharded and self._several
            statistics = leaf_statistics_bytes(self._workload.layers[layer] for layer in layers)
            update = builder.update(
                summed or [gradients[layers[0]]],
                self._plan,
                statistics=statistics if self._several and self._plan.batch_norm == "leaf" else 0,
                agreement=zero1.agreement_bytes(self._workload, self._plan.optimizer)
                if sharded
                else zero1.FINITE_BYTES,
                meeting=builder.meeting("agreement"),
                rank_class=own,
            )
            for bucket in held if sharded else ():
                builder.gather(buckets, bucket, update, self._plan.accumulate - 1, own)
        return builder.schedule(
            self._workload,
            self._plan,
            buckets,
            bucket_class=classes,
            bucket_copies=copies,
            stashes=tuple(stage.stash for stage in self._stages for _ in range(self._parts)),
            tensor_order=self._workload.ready_order.tensor[order],
        )

    def _buckets(self, costs: Costs) -> tuple[Buckets, Ints, list[int], list[int]]:
        """Return buckets, the last stage's first; the ready order so divided; each one's first class, and how many."""
        ready, parts = self._workload.ready_order, self._parts
        order, starts, classes, copies = list[Ints](), [np.zeros(1, np.int64)], list[int](), list[int]()
        for number in reversed(range(len(self._stages))):
            first, stop = self._stages[number][:2]
            for owner in (-1, *range(parts)):
                tensors = np.flatnonzero(
                    (ready.layer >= first) & (ready.layer < stop) & (self._owner[ready.layer] == owner)
                )
                if not len(tensors):
                    continue
                edges = fused(self._workload, self._plan, costs, tensors)
                order.append(tensors)
                starts.append(starts[-1][-1] + edges[1:])
                classes += [number * parts + max(owner, 0)] * (len(edges) - 1)
                copies += [parts if owner < 0 else 1] * (len(edges) - 1)
        positions, start = np.concatenate(order), np.concatenate(starts)
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(ready.size_bytes[positions])])[start]
        return Buckets(start, ends[1:] - ends[:-1]), positions, classes, copies

    def _compute(self, kind: int, own: int, micro_batch: int, layer: int, after: list[int]) -> int:
        return self._builder.add(kind, after, layer=layer, micro_batch=micro_batch, rank_class=own)

    def _send(self, kind: int, stage: int, own: int, micro_batch: int, after: list[int]) -> None:
        """Send the output of a stage to the next one, or the gradient of what it was entered with to the one before."""
        forward = kind == FORWARD_EVENT
        cut = stage + 1 if forward else stage
        target = own + self._parts if forward else own - self._parts
        self._sent[kind, target, micro_batch] = self._builder.add(
            SEND_EVENT,
            after,
            layer=self._stages[cut].first - 1,
            micro_batch=micro_batch,
            size_bytes=self._sizes[cut - 1],
            rank_class=own,
        )

    def _receive(self, kind: int, own: int, micro_batch: int) -> int:
        return self._builder.receive(RECEIVE_EVENT, self._sent[kind, own, micro_batch], own)


def _owners(workload: Workload, plan: Plan) -> Ints:
    """Return the part that owns each layer, -1: each of them. Raises ``ConfigError`` for fewer blocks than parts."""
    parts, blocks = plan.parallelism.parts, workload.column_blocks
    if parts == 1:
        return np.full(len(workload.layers), -1)
    if blocks < parts:
        has = f"{blocks} column blocks" if blocks > 1 else "no column blocks"
        raise ConfigError(
            f"strategy {plan.strategy} for workload {workload.name!r}, which has {has}",
            allowed=f"workloads with {parts} column blocks or more",
            remedy=f"choose them in the model, like mlp:64x4,column_blocks={parts}; layers with few columns and the"
            " last layer stay whole",
        )
    owner = {block: part for part in range(parts) for block in own_blocks(blocks, part, parts)}
    return np.array([owner.get(layer.column_block, -1) for layer in workload.layers], np.int64)
