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
    """Return a blocking function that adds the partial sums of all ranks along their tree; the same bits on every rank.

    It is for small arrays: every rank sends its partial sums (of one dtype and shape) to every other rank in one
    message, and adds for itself: one round of n - 1 messages. On one rank nothing is sent.
    """
    numbers = {rank: sums.of(rank) for rank in range(t.size)}
    others = [rank for rank in range(t.size) if rank != t.rank]
    memories: dict[tuple[tuple[int, ...], str], tuple[dict[int, Array], list[Array]]] = {}

    def memory(like: Array) -> tuple[dict[int, Array], list[Array]]:
        """Return the arrays that each rank's partial sums lie in, and each partial sum: allocated once for a shape."""
        key = like.shape, like.dtype.str
        if key not in memories:
            of_rank = {rank: np.empty((len(each), *like.shape), like.dtype) for rank, each in numbers.items()}
            held = {
                number: data for rank, each in numbers.items() for number, data in zip(each, of_rank[rank], strict=True)
            }
            memories[key] = of_rank, [held[number] for number in range(len(held))]
        return memories[key]

    def add(arrays: Sequence[Array]) -> Array:
        of_rank, held = memory(arrays[0])
        for target, array in zip(of_rank[t.rank], arrays, strict=True):
            target[...] = array
        pending = [t.receive(of_rank[rank], rank) for rank in others]
        wait(t, pending + [t.send(of_rank[t.rank], rank) for rank in others])
        total: Array = fold(sums.tree, held.__getitem__, operator.add)
        return total if len(held) > 1 else total.copy()

    return add


def kept_sum(t: Transport, sums: PartialSums, algorithm: str) -> OrderedSum:
    """Return an ``ordered_sum`` for large arrays: an allreduce by ``algorithm``, in memory kept for each size.

    That memory is allocated at the first sum of a size, which is collective as every sum is.
    """
    slots = max(map(sums.owners.count, sums.owners))
    prepared: dict[tuple[int, np.dtype[Any]], tuple[list[Array], PersistentAllreduce]] = {}

    def add(arrays: Sequence[Array]) -> Array:
        size = arrays[0].size, arrays[0].dtype
        if size not in prepared:
            memory = [
                t.allocate(max(arrays[0].nbytes, 1)).view(arrays[0].dtype)[: arrays[0].size] for _ in range(slots)
            ]
            prepared[size] = memory, prepare(t, memory[0], algorithm, order=SummationOrder(sums, tuple(memory[1:])))
        memory, allreduce = prepared[size]
        for target, array in zip(memory, arrays, strict=False):
            target[...] = array.reshape(-1)
        allreduce.run()
        return memory[0].reshape(arrays[0].shape)

    return add
