"""Sums over ranks in the fixed order of addition, for arrays that are needed at once on every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np

from dpsim.comm.allreduce import prepare
from dpsim.comm.transport import Array, PersistentAllreduce, SummationOrder, Transport, wait
from dpsim.kernels.allreduce.tree import PartialSums, fold
from dpsim.replica import OrderedSum


def ordered_sum(t: Transport, sums: PartialSums) -> OrderedSum:
    """A blocking function that adds the partial sums of all ranks along their tree; the same bits on every rank.

    It is for small arrays: every rank sends its partial sums (of one dtype and shape) to every other rank in one
    message, and adds for itself: one round of n - 1 messages. On one rank nothing is sent.
    """
    local = sums.of(t.rank)
    others = [(rank, sums.of(rank)) for rank in range(t.size) if rank != t.rank]

    def add(arrays: Sequence[Array]) -> Array:
        held: dict[int, Array] = dict(zip(local, arrays, strict=True))
        if others:
            own = np.stack(arrays)
            coming = [np.empty((len(numbers), *own.shape[1:]), own.dtype) for _, numbers in others]
            pending = [t.receive(data, rank) for data, (rank, _) in zip(coming, others, strict=True)]
            wait(t, pending + [t.send(own, rank) for rank, _ in others])
            for data, (_, numbers) in zip(coming, others, strict=True):
                held |= dict(zip(numbers, data, strict=True))
        total: Array = fold(sums.tree, held.__getitem__, operator.add)
        return total

    return add


def kept_sum(t: Transport, sums: PartialSums, algorithm: str) -> OrderedSum:
    """As ``ordered_sum``, for large arrays: an allreduce by ``algorithm``, in memory that is kept for each size.

    That memory is allocated at the first sum of a size, which is collective as every sum is.
    """
    slots = max(map(sums.owners.count, sums.owners))
    kept: dict[tuple[int, np.dtype[Any]], tuple[list[Array], PersistentAllreduce]] = {}

    def add(arrays: Sequence[Array]) -> Array:
        size = arrays[0].size, arrays[0].dtype
        if size not in kept:
            memory = [
                t.allocate(max(arrays[0].nbytes, 1)).view(arrays[0].dtype)[: arrays[0].size] for _ in range(slots)
            ]
            kept[size] = memory, prepare(t, memory[0], algorithm, order=SummationOrder(sums, tuple(memory[1:])))
        memory, allreduce = kept[size]
        for target, array in zip(memory, arrays, strict=False):
            target[...] = array.reshape(-1)
        allreduce.run()
        return memory[0].reshape(arrays[0].shape)

    return add
