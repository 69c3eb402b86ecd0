"""What a rank's micro-batches of a step came to: their sums, and on a device the one fetch that brings them."""

from __future__ import annotations

import operator
from collections.abc import Sequence

from dpsim.memory import Memory
from dpsim.replica import Array, BatchSums, DeferredSums
from dpsim.runtime.finite import FetchedGradients
from dpsim.runtime.micro_batches import MicroBatch, slot_sums

Sums = BatchSums | DeferredSums


def step_sums(micro_batches: Sequence[MicroBatch], of_each: Sequence[BatchSums], samples: int) -> BatchSums:
    """The sums of a step from those of each micro-batch: losses along the tree of their slots."""
    losses = slot_sums(micro_batches, [sums.slot_losses or (sums.loss,) for sums in of_each], operator.add)
    return BatchSums(
        loss=sum(losses),
        correct=sum(sums.correct for sums in of_each),
        samples=samples,
        slot_losses=tuple(losses),
    )


def fetch_step(
    memory: Memory, of_each: Sequence[Sums], check: FetchedGradients, measured: Array
) -> tuple[list[BatchSums], Array]:
    """The sums of each micro-batch, for ``check`` what it asks, and what was ``measured``, in one fetch."""
    deferred = [sums for sums in of_each if isinstance(sums, DeferredSums)]
    finite, on_host, *fetched = memory.fetch([check.ask(), measured, *(sums.values for sums in deferred)])
    check.finite = bool(finite)
    values = iter(fetched)
    return [each.of(next(values)) if isinstance(each, DeferredSums) else each for each in of_each], on_host
