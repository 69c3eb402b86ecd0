"""Sums over ranks in the fixed order of addition, for small arrays that are needed at once on every rank."""

from __future__ import annotations

import operator
from collections.abc import Sequence

import numpy as np

from dpsim.comm.transport import Array, Transport, wait
from dpsim.kernels.allreduce.tree import PartialSums, fold
from dpsim.replica import OrderedSum


def ordered_sum(t: Transport, sums: PartialSums) -> OrderedSum:
    """A blocking function that adds the partial sums of all ranks along their tree; the same bits on every rank.

    Every rank sends its partial sums (of one dtype and shape) to every other rank in one message, and adds for itself:
    one round of n - 1 messages. On one rank nothing is sent.
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
