"""``Reducer``: adds gradients over ranks in the memory of their devices; and what its implementations share."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, NamedTuple, Protocol

import numpy as np
from mpi4py import MPI

from dpsim.comm.compression import Compression
from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.mpi import MpiRequest
from dpsim.comm.transport import CollectiveSteps, Request
from dpsim.errors import ConfigError, DpsimError
from dpsim.kernels.allreduce.tree import PartialSums

if TYPE_CHECKING:
    from numpy.typing import NDArray

MOST_RECENT = 256
"""Bound tasks that a reducer keeps besides those prepared at first: a rule that packs buckets while running makes ever
new ones, and each may have tables in device memory."""

_FAILED = -1


class Kernel(NamedTuple):
    """The settings that decide which code runs. ``compression`` holds the dtype and the scale of the 16-bit codes.

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
    dtype: np.dtype[np.generic], version: str, compression: Compression | None, sums: PartialSums, *, in_leaves: bool
) -> Kernel:
    """Return the kernel of a version for arrays of ``dtype``; in leaves 16 bits round every sum of two."""
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
        """Return what adds arrays of this size for an algorithm of a plan; the same on every rank."""

    def allocate(self, size_bytes: int) -> int:
        """Return the number of a new block of as many bytes on every rank's device. Collective."""

    def own(self, number: int) -> DeviceArray:
        """Return this rank's memory of a block, in bytes."""

    def compile(self, task: Task) -> None:
        """Compile what a task needs on this rank. A mistake is kept for ``agree``."""

    def agree(self, task: Task) -> CollectiveSteps:
        """Raise ``ConfigError`` on all ranks if one could not compile the task; before it is reduced. Collective."""

    def reduce(self, task: Task, stream: Stream) -> CollectiveSteps:
        """Reduce it in place, with the results in each rank's first slot; ``agree`` goes before. Collective."""

    def check(self) -> None:
        """Raise ``CommunicationError`` if an allreduce has failed."""

    def close(self) -> None:
        """Give back all memory. Nothing may be running. Collective."""


class OwnBlocks:
    """Blocks of this rank's memory that no other rank reaches: the memory of a ``Reducer`` whose data is sent."""

    def __init__(self, comm: MPI.Intracomm, device: Device) -> None:
        self._comm, self._device = comm, device
        self._blocks: list[DeviceArray] = []

    def allocate(self, size_bytes: int) -> int:
        self._blocks.append(self._device.memory(size_bytes))
        return len(self._blocks) - 1

    def own(self, number: int) -> DeviceArray:
        return self._blocks[number]

    def close(self) -> None:
        self._comm.Barrier()
        self._blocks.clear()


def own_slots(reducer: Reducer, task: Task, rank: int) -> Sequence[DeviceArray]:
    """Return the part of this rank's memory that a task is about: an array for each partial sum that it holds."""
    held = task.blocks[: len(task.kernel.sums.of(rank))]
    return [reducer.own(number)[task.first : task.stop].view(np.dtype(task.kernel.dtype)) for number in held]


def agreement(
    comm: MPI.Intracomm, device: Device, error: DpsimError | None, value: int = 0
) -> Generator[Sequence[Request], None, int]:
    """Exchange a value >= 0 by rounds of messages and return the smallest one of all ranks. Collective.

    Raises ``ConfigError`` on all ranks if one has an ``error``.
    """
    own, every = np.array([_FAILED if error is not None else value], np.int64), np.empty(comm.size, np.int64)
    yield [MpiRequest([comm.Iallgather(own, every)])]
    device.use()
    least: NDArray[np.int64] = every.min()
    if least == _FAILED:
        raise_on_all(comm, error)
    return int(least)


def raise_on_all(comm: MPI.Intracomm, error: DpsimError | None) -> None:
    """Raise ``ConfigError`` on every rank if one has an ``error``; it names the first such rank. Collective."""
    own = None if error is None else (error.given, error.allowed, error.remedy)
    for rank, met in enumerate(comm.allgather(own)):
        if met is not None:
            message, allowed, remedy = met
            raise ConfigError(f"rank {rank}: {message}", allowed=allowed, remedy=remedy) from error
