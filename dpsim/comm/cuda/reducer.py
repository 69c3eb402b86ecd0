"""``Reducer``: what adds gradients up over ranks in the memory of their devices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from dpsim.comm.compression import Compression
from dpsim.comm.cuda.device import DeviceArray, Stream
from dpsim.comm.transport import CollectiveSteps
from dpsim.kernels.allreduce.tree import PartialSums


class Kernel(NamedTuple):
    """What decides which code runs. ``compression`` holds the dtype and the scale of the 16-bit codes.

    ``sums`` are the partial sums that it adds, of all ranks. ``each_sum``: that of every two is rounded to 16 bits.
    """

    dtype: str
    version: str
    compression: tuple[str, float] | None
    sums: PartialSums
    each_sum: bool = False


class Task(NamedTuple):
    """An allreduce of bytes ``first`` to ``stop - 1`` of blocks of memory: one for each slot that a rank may hold."""

    kernel: Kernel
    blocks: tuple[int, ...]
    first: int
    stop: int


def kernel_of(
    dtype: np.dtype[np.generic],
    version: str,
    compression: Compression | None,
    sums: PartialSums,
    *,
    in_leaves: bool,
) -> Kernel:
    """The kernel of a version for arrays of ``dtype``; in leaves 16 bits round every sum of two."""
    if compression is None:
        return Kernel(str(dtype), version, None, sums)
    return Kernel(str(dtype), version, (compression.dtype, compression.scale), sums, each_sum=in_leaves)


class Reducer(Protocol):
    """Memory on this rank's device, and allreduces of parts of it, in a stream. All ranks do the same in one order.

    ``path`` is how pieces get from rank to rank, as records say it, and ``how`` the same for people. ``queued``: the
    work of an allreduce is put into the stream as a whole, so the next one may follow at once.
    """

    path: str
    how: str
    queued: bool

    def version(self, algorithm: str, size_bytes: int, *, sixteen_bits: bool) -> str:
        """What adds arrays of this size for an algorithm of a plan; the same on every rank."""

    def allocate(self, size_bytes: int) -> int:
        """The number of a new block of as many bytes on every rank's device. Collective."""

    def own(self, number: int) -> DeviceArray:
        """This rank's memory of a block, in bytes."""

    def compile(self, task: Task) -> None:
        """Compile what a task needs on this rank. A mistake is kept for ``agree``."""

    def agree(self, task: Task) -> CollectiveSteps:
        """Before a task is reduced: raise ``ConfigError`` on all ranks if one could not compile it. Collective."""

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        """Reduce it in place, with the results in each rank's first slot; ``agree`` goes before. Collective."""

    def check(self) -> None:
        """Raise ``CommunicationError`` if an allreduce has failed."""

    def close(self) -> None:
        """Give back all memory. Nothing may be running. Collective."""


def own_slots(reducer: Reducer, task: Task, rank: int) -> Sequence[DeviceArray]:
    """The part of this rank's memory that a task is about: an array for each partial sum that it holds."""
    held = task.blocks[: len(task.kernel.sums.of(rank))]
    return [reducer.own(number)[task.first : task.stop].view(np.dtype(task.kernel.dtype)) for number in held]
