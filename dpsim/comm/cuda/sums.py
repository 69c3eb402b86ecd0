"""Sums over ranks between the layers of a step, in the memory of devices: the host copies nothing, and waits for none.

They have kernels, flags and messages of their own. Threads of a rank ask for them and for the allreduces of gradients
in an order that may differ between ranks, and kernels that wait for each other at the same flags must not.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence

import numpy as np
from mpi4py import MPI

from dpsim.comm.cuda.device import Device, DeviceArray, Stream
from dpsim.comm.cuda.paths import Path, open_reducer
from dpsim.comm.cuda.reducer import Kernel, Reducer, Task, kernel_of, own_slots
from dpsim.comm.transport import CollectiveSteps, Transport, wait
from dpsim.kernels.allreduce.tree import PartialSums, fold
from dpsim.replica import OrderedSum

MOST_BLOCKS = 1
"""Blocks of a rank's kernel: the sums are small, and a kernel of gradients may wait on the same GPU meanwhile."""


class DeviceSums:
    """Sums of flat arrays, one a partial sum, along the tree, in the stream that computes.

    Kernels that wait for other ranks inside are only asked for. Where they cannot wait, the host does between them, and
    where they do not reach each other's memory it moves the sums: two communicators of NCCL at once could wait for each
    other. The sum is valid until the next one.
    """

    def __init__(
        self, t: Transport, comm: MPI.Intracomm, device: Device, path: Path, stream: Stream, wait_limit_s: float
    ) -> None:
        self._transport, self._comm, self._stream = t, comm.Dup(), stream
        if path.access is None:
            path = Path(name="host")
        self._reducer: Reducer = open_reducer(
            self._comm, device, path, most_blocks=MOST_BLOCKS, wait_limit_s=wait_limit_s
        )
        self._agreed: set[Kernel] = set()
        self._versions: dict[np.dtype[np.generic], str] = {}
        self._blocks: tuple[int, ...] = ()
        self._size_bytes = 0

    def adder(self, sums: PartialSums, most_elements: Mapping[str, int]) -> OrderedSum:
        """Return what adds; kernels are compiled for the dtypes and so many elements of each. Collective."""
        for dtype, elements in most_elements.items():
            self._prepare(sums, np.dtype(dtype), elements)

        def add(arrays: Sequence[DeviceArray]) -> DeviceArray:
            task = self._prepare(sums, np.dtype(arrays[0].dtype), len(arrays[0]))
            self._reducer.check()
            held = own_slots(self._reducer, task, self._transport.rank)
            for target, array in zip(held, arrays, strict=True):
                target[...] = array
            self._run(self._reducer.reduce(task, self._stream))
            return held[0]

        return add

    def close(self) -> None:
        """Give back all memory, when the device has done all work. Collective."""
        self._reducer.close()
        self._comm.Free()

    def _prepare(self, sums: PartialSums, dtype: np.dtype[np.generic], elements: int) -> Task:
        """Prepare the sum of ``length`` elements in the first bytes of the memory. Collective when memory must grow."""
        size_bytes = elements * dtype.itemsize
        slots = max(map(sums.owners.count, sums.owners))
        if size_bytes > self._size_bytes or slots > len(self._blocks):
            self._size_bytes = max(size_bytes, self._size_bytes)
            self._blocks = tuple(self._reducer.allocate(self._size_bytes) for _ in range(slots))
        if dtype not in self._versions:  # that of the most elements holds for all, so nothing is compiled in a step
            self._versions[dtype] = self._reducer.version("auto", size_bytes, sixteen_bits=False)
        kernel = kernel_of(dtype, self._versions[dtype], None, sums, in_leaves=False)
        task = Task(kernel, self._blocks[:slots], 0, size_bytes)
        if kernel not in self._agreed:
            self._reducer.compile(task)
            self._run(self._reducer.agree(task))
            self._agreed.add(kernel)
        return task

    def _run(self, steps: CollectiveSteps) -> None:
        for pending in steps:
            wait(self._transport, pending)


def sums_of_one_rank(sums: PartialSums) -> OrderedSum:
    """Return the function that adds the partial sums of the only rank there is."""

    def add(arrays: Sequence[DeviceArray]) -> DeviceArray:
        total: DeviceArray = fold(sums.tree, arrays.__getitem__, operator.add)
        return total

    return add
