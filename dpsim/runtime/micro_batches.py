"""How a device goes over its samples in a step: which leaves it computes at once, and how their sums are added.

With the fixed order of addition (``dpsim.kernels.allreduce.tree``) a device's leaves form slots, whole subtrees. They
are computed in one pass, or in several where that is wanted: the passes are then smaller subtrees, whose gradients are
added along the tree as they come. Gradient accumulation is that, over a tree of the device's own micro-batches.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from dpsim.data.sharding import device_leaves, leaf_bounds, shard
from dpsim.kernels.allreduce.tree import PartialSums, left_part, slots, subtrees
from dpsim.plan import Plan

T = TypeVar("T")


@dataclass(frozen=True)
class MicroBatch:
    """Leaves ``first`` to ``stop - 1`` of a device's, computed together.

    ``edges``: the first leaf of each of their slots, counted in the pass; several slots are all there are of the step.
    ``slot`` is where the (first) sum belongs, ``depth`` how many unfinished sums of that slot it must not overwrite;
    afterwards the last sum is added to the one before it ``merges`` times.
    """

    first: int
    stop: int
    edges: tuple[int, ...] = (0,)
    slot: int = 0
    depth: int = 0
    merges: int = 0


def plan_partial_sums(plan: Plan) -> PartialSums:
    """Return the slots of all devices: of their leaves, or one a device."""
    if plan.leaves:
        return slots(device_leaves(plan.leaves, plan.data_devices))
    return slots(range(plan.data_devices + 1))


def own_leaves(plan: Plan, rank: int, samples: int, micro_batches: int = 1) -> tuple[int, ...]:
    """Return the boundaries of device ``rank``'s leaves of the samples; without leaves, of its micro-batches."""
    if plan.leaves:
        first, stop = device_leaves(plan.leaves, plan.data_devices)[rank : rank + 2]
        return leaf_bounds(samples, plan.leaves)[first : stop + 1]
    low, high = shard(samples, plan.data_devices, rank)
    return tuple(low + edge for edge in leaf_bounds(high - low, micro_batches))


def batch_sizes(plan: Plan, rank: int, training_samples: int, test_samples: int) -> tuple[set[int], int]:
    """Return how many samples device ``rank`` computes at once in training, and how many test samples are its own."""
    last = training_samples % plan.global_batch or plan.global_batch
    training = {
        stop - start
        for batch in (min(plan.global_batch, training_samples), last)
        for start, stop in itertools.pairwise(own_leaves(plan, rank, batch, plan.accumulate))
    }
    low, *_, high = own_leaves(plan, rank, test_samples)
    return training, high - low


def own_slots(plan: Plan, rank: int) -> list[tuple[int, int]]:
    """Return the slots of device ``rank`` as ranges of its leaves, counted from its first; without leaves one."""
    if not plan.leaves:
        return [(0, 1)]
    first, stop = device_leaves(plan.leaves, plan.data_devices)[rank : rank + 2]
    return [(low - first, high - first) for low, high in subtrees(plan.leaves, first, stop)]


def plan_micro_batches(plan: Plan, rank: int, *, takes_leaves: bool) -> tuple[MicroBatch, ...]:
    """Return the passes of device ``rank``, in the order of their leaves.

    Micro-batches (``plan.accumulate``) are subtrees of so few leaves that there are as many passes or more; without
    leaves they are leaves of the device's own. A replica that does not take leaves gets one a pass.
    """
    blocks, most = own_slots(plan, rank), 1
    if plan.leaves and takes_leaves:
        if plan.accumulate == 1:
            return (MicroBatch(0, blocks[-1][1], tuple(low for low, _ in blocks)),)
        most = plan.leaves // (plan.data_devices * plan.accumulate)
    elif not plan.leaves:
        blocks = [(0, plan.accumulate)]
    passes: list[MicroBatch] = []
    for slot, (low, high) in enumerate(blocks):
        passes += _split(low, high, most, slot, depth=0)
    return tuple(passes)


def _split(low: int, high: int, most: int, slot: int, depth: int) -> list[MicroBatch]:
    if high - low <= most:
        return [MicroBatch(low, high, slot=slot, depth=depth)]
    middle = low + left_part(high - low)
    *before, last = _split(low, middle, most, slot, depth) + _split(middle, high, most, slot, depth + 1)
    return [*before, MicroBatch(last.first, last.stop, slot=slot, depth=last.depth, merges=last.merges + 1)]


def slot_sums(micro_batches: Sequence[MicroBatch], values: Sequence[Sequence[T]], add: Callable[[T, T], T]) -> list[T]:
    """Return the sum of each slot, from the values of each micro-batch (one for each slot that it has leaves of)."""
    sums: list[T] = []
    for micro_batch, parts in zip(micro_batches, values, strict=True):
        sums += parts
        for _ in range(micro_batch.merges):
            last = sums.pop()
            sums[-1] = add(sums[-1], last)
    return sums
