"""Pipeline: stages of neighbouring layers, each on devices of its own, through which the micro-batches of a step flow.

Sources: Huang et al., "GPipe: Efficient Training of Giant Neural Networks using Pipeline Parallelism" (2019); for 1f1b
Narayanan et al., "PipeDream: Generalized Pipeline Parallelism for DNN Training" (2019), with a flush at each update as
in "Efficient Large-Scale Language Model Training on GPU Clusters Using Megatron-LM" (2021).
"""

from __future__ import annotations

import itertools
from collections import deque
from typing import cast

import numpy as np
from numpy.typing import NDArray

from dpsim.lowering import data_parallel, zero1
from dpsim.lowering.buckets import Costs, fused
from dpsim.lowering.builder import Builder
from dpsim.lowering.computation import inputs_of, leaf_statistics_bytes, output_bytes, readers_of
from dpsim.lowering.fusion import Buckets
from dpsim.lowering.stages import stage_bounds, stash
from dpsim.plan import Plan
from dpsim.schedule import (
    BACKWARD_EVENT,
    FORWARD_EVENT,
    LOSS_EVENT,
    OVERHEAD_EVENT,
    RECEIVE_EVENT,
    RECOMPUTE_EVENT,
    SEND_EVENT,
    Schedule,
)
from dpsim.strategy import Pipeline
from dpsim.workload import Workload


def lower(
    workload: Workload,
    plan: Plan,
    ready_s: NDArray[np.float64] | None = None,
    alpha_s: float | None = None,
    beta_s_per_byte: float | None = None,
) -> Schedule:
    """The operations of one step (see ``dpsim.lowering.lower``), in the order of the arrays:

    the overhead of each stage; forwards and backwards of the micro-batches, each stage's in the order of the strategy
    (``stage_order``), a receive before and a send after them where stages meet; then for each stage the allreduces of
    its buckets over the devices that have the same layers (with ``shard``, reduce-scatters), the sum of batch norm's
    leaf statistics, the agreement of all ranks that all numbers are finite, the update, and with ``shard`` all-gathers.

    With ``recompute`` all stages but the last compute a micro-batch's forward again before its backward, while the
    gradient of their output travels. Each stage has buckets of its own, those of the last stage first.

    With one stage it is the schedule of data parallelism, or of ``dpsim.lowering.zero1``. Raises ``ConfigError`` as
    ``stage_bounds`` does, and for layers whose output has an unknown size.
    """
    costs, strategy = Costs(ready_s, alpha_s, beta_s_per_byte), cast(Pipeline, plan.parallelism)
    if strategy.stages == 1:
        lowering = zero1.lower if strategy.sharded else data_parallel.lower
        return lowering(workload, plan, *costs)
    bounds = stage_bounds(workload, plan)
    steps = _Stages(workload, plan, bounds)
    waiting = [deque(stage_order(plan, stage)) for stage in range(strategy.stages)]
    while any(waiting):
        for stage, queue in enumerate(waiting):
            if queue and steps.can_begin(stage, *queue[0]):
                steps.append(stage, *queue.popleft())
    starts, classes = _buckets(workload, plan, costs, bounds)
    buckets = Buckets.at(workload, starts)
    for stage in range(strategy.stages):
        steps.end(stage, buckets, [bucket for bucket, owner in enumerate(classes) if owner == stage])
    stashes = tuple(stash(plan, stage) for stage in range(strategy.stages))
    return steps.builder.schedule(workload, plan, buckets, bucket_class=classes, stashes=stashes)


def stage_order(plan: Plan, stage: int) -> list[tuple[int, int]]:
    """(``FORWARD_EVENT`` or ``BACKWARD_EVENT``, micro-batch) in the order in which a stage computes them.

    ``gpipe``: all forwards, then all backwards. ``1f1b``: as many forwards as the stage may have in flight, less one;
    then one forward and one backward in turns; then the other backwards.
    """
    ahead = stash(plan, stage) - 1
    forwards = [(FORWARD_EVENT, number) for number in range(plan.accumulate)]
    backwards = [(BACKWARD_EVENT, number) for number in range(plan.accumulate)]
    turns = itertools.chain(*zip(forwards[ahead:], backwards, strict=False))
    return [*forwards[:ahead], *turns, *backwards[plan.accumulate - ahead :]]


def _buckets(
    workload: Workload, plan: Plan, costs: Costs, bounds: tuple[int, ...]
) -> tuple[NDArray[np.int64], list[int]]:
    """Where the buckets of all stages begin in ready order, and the stage of each."""
    layer = workload.ready_order.layer
    starts, classes = [np.zeros(1, np.int64)], list[int]()
    for stage in reversed(range(len(bounds) - 1)):
        first, stop = np.searchsorted(-layer, [-bounds[stage + 1], -bounds[stage]], side="right").tolist()
        of_stage = fused(workload, plan, costs, slice(first, stop))
        starts.append(first + of_stage[1:])
        classes += [stage] * (len(of_stage) - 1)
    return np.concatenate(starts), classes


class _Stages:
    """Appends what stages compute to ``builder``; ``bounds`` are their first layers."""

    def __init__(self, workload: Workload, plan: Plan, bounds: tuple[int, ...]) -> None:
        self.builder = Builder()
        self._workload, self._plan, self._bounds = workload, plan, bounds
        self._inputs, self._readers = inputs_of(workload), readers_of(workload)
        self._last_stage = len(bounds) - 2
        self._recompute = cast(Pipeline, plan.parallelism).recompute
        self._overhead = [self.builder.add(OVERHEAD_EVENT, rank_class=stage) for stage in range(self._last_stage + 1)]
        self._sizes = [output_bytes(workload, plan, cut - 1) for cut in bounds[1:-1]]
        self._sent: dict[tuple[int, int, int], int] = {}
        self._begun: dict[tuple[int, int], int] = {}
        self._outputs: dict[tuple[int, int], dict[int, int]] = {}
        self._gradients: list[dict[int, int]] = [{} for _ in bounds[1:]]

    def can_begin(self, stage: int, kind: int, micro_batch: int) -> bool:
        """Whether what a stage needs for a forward or a backward has been sent."""
        first = 0 if kind == FORWARD_EVENT else self._last_stage
        return stage == first or (kind, stage, micro_batch) in self._sent

    def append(self, stage: int, kind: int, micro_batch: int) -> None:
        """Append a forward or a backward of a stage, with its messages."""
        (self._forward if kind == FORWARD_EVENT else self._backward)(stage, micro_batch)

    def _forward(self, stage: int, micro_batch: int) -> None:
        first, stop = self._bounds[stage : stage + 2]
        outputs = {}
        if stage:
            outputs[first - 1] = self._receive(FORWARD_EVENT, stage, micro_batch)
        for layer in range(first, stop):
            after = [outputs[source] for source in self._inputs[layer]] or [self._overhead[stage]]
            outputs[layer] = self._compute(FORWARD_EVENT, stage, micro_batch, layer, after)
        self._outputs[stage, micro_batch] = outputs
        if stage < self._last_stage:
            self._send(FORWARD_EVENT, stage, micro_batch, [outputs[stop - 1]])
            return
        ends = [number for layer, number in outputs.items() if not self._readers[layer]]
        self._begun[stage, micro_batch] = self._compute(LOSS_EVENT, stage, micro_batch, -1, ends)

    def _backward(self, stage: int, micro_batch: int) -> None:
        first, stop = self._bounds[stage : stage + 2]
        outputs, again = self._outputs[stage, micro_batch], dict[int, int]()
        if stage < self._last_stage:
            for layer in range(first, stop) if self._recompute else ():
                after = [again.get(source, outputs[source]) for source in self._inputs[layer]] or [outputs[layer]]
                again[layer] = self._compute(RECOMPUTE_EVENT, stage, micro_batch, layer, after)
            begin = self._receive(BACKWARD_EVENT, stage, micro_batch)
        else:
            begin = self._begun[stage, micro_batch]
        gradients = self._gradients[stage] = {}
        for layer in reversed(range(first, stop)):
            after = [gradients[reader] for reader in self._readers[layer] if reader < stop] or [begin]
            after += [again[layer]] if layer in again else []
            gradients[layer] = self._compute(BACKWARD_EVENT, stage, micro_batch, layer, after)
        if stage:
            readers = self._readers[first - 1]
            self._send(BACKWARD_EVENT, stage, micro_batch, [gradients[reader] for reader in readers])

    def end(self, stage: int, buckets: Buckets, own: list[int]) -> None:
        """Append a stage's collectives and its update: its last backwards make the gradients final."""
        plan, workload, builder = self._plan, self._workload, self.builder
        several, gradients = plan.data_devices > 1, self._gradients[stage]
        summed = []
        for bucket in own if several else ():
            layers = workload.ready_order.layer[slice(*buckets.start[bucket : bucket + 2])].tolist()
            backwards = [gradients[layer] for layer in layers]
            summed.append(builder.sum_bucket(buckets, bucket, backwards, plan, stage))
        layers_of_stage = workload.layers[slice(*self._bounds[stage : stage + 2])]
        update = builder.update(
            summed or [gradients[self._bounds[stage]]],
            plan,
            statistics=leaf_statistics_bytes(layers_of_stage) if several and plan.batch_norm == "leaf" else 0,
            agreement=zero1.agreement_bytes(workload, plan.optimizer) if self._sharded else zero1.FINITE_BYTES,
            together=True,
            rank_class=stage,
        )
        for bucket in own if self._sharded else ():
            builder.gather(buckets, bucket, update, plan.accumulate - 1, stage)

    @property
    def _sharded(self) -> bool:
        return self._plan.parallelism.sharded and self._plan.data_devices > 1

    def _compute(self, kind: int, stage: int, micro_batch: int, layer: int, after: list[int]) -> int:
        return self.builder.add(kind, after, layer=layer, micro_batch=micro_batch, rank_class=stage)

    def _send(self, kind: int, stage: int, micro_batch: int, after: list[int]) -> None:
        """Send the output of a stage to the next one, or the gradient of what it was entered with to the one before."""
        cut, target = (stage, stage + 1) if kind == FORWARD_EVENT else (stage - 1, stage - 1)
        self._sent[kind, target, micro_batch] = self.builder.add(
            SEND_EVENT,
            after,
            layer=self._bounds[cut + 1] - 1,
            micro_batch=micro_batch,
            size_bytes=self._sizes[cut],
            rank_class=stage,
        )

    def _receive(self, kind: int, stage: int, micro_batch: int) -> int:
        return self.builder.receive(RECEIVE_EVENT, self._sent[kind, stage, micro_batch], stage)
