"""A stand-in for ``cupy.cuda.nccl`` in numba's simulator: the same calls on addresses in host memory, done by MPI.

What is put into a stream is done at once, as in the simulator; within a group only when the group ends. A late device
learns what it reads and writes in which stream.
"""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
from late_device import touched
from mpi4py import MPI
from numpy.typing import NDArray

NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = 1, 7, 8, 0
_KINDS: dict[int, Any] = {NCCL_UINT8: np.uint8, NCCL_FLOAT32: np.float32, NCCL_FLOAT64: np.float64}
_UNIQUE_ID = tuple(range(128))


def _array(address: int, count: int, kind: int) -> NDArray[Any]:
    dtype = np.dtype(_KINDS[kind])
    return np.frombuffer((ctypes.c_char * (count * dtype.itemsize)).from_address(address), dtype)


class NcclByMpi:
    """The module."""

    NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM = NCCL_UINT8, NCCL_FLOAT32, NCCL_FLOAT64, NCCL_SUM

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.calls: list[str] = []
        self.group: list[MPI.Request] | None = None

    def get_unique_id(self) -> tuple[int, ...]:
        return _UNIQUE_ID

    def groupStart(self) -> None:
        assert self.group is None
        self.calls.append("group")
        self.group = []

    def groupEnd(self) -> None:
        assert self.group is not None
        MPI.Request.Waitall(self.group)
        self.group = None

    def NcclCommunicator(self, ranks: int, identity: tuple[int, ...], rank: int) -> _Communicator:
        assert (ranks, identity, rank) == (self.comm.size, _UNIQUE_ID, self.comm.rank)
        return _Communicator(self)


class _Communicator:
    def __init__(self, module: NcclByMpi) -> None:
        self._module, self._comm = module, module.comm

    def send(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert self._module.group is not None and peer != self._comm.rank and count > 0
        touched(stream, _array(address, count, kind))
        self._module.group.append(self._comm.Isend(_array(address, count, kind), peer))

    def recv(self, address: int, count: int, kind: int, peer: int, stream: int) -> None:
        assert self._module.group is not None and peer != self._comm.rank and count > 0
        touched(stream, _array(address, 0, kind), _array(address, count, kind))
        self._module.group.append(self._comm.Irecv(_array(address, count, kind), peer))

    def allGather(self, own: int, first: int, count: int, kind: int, stream: int) -> None:
        sent = MPI.IN_PLACE if own == first + count * self._comm.rank else _array(own, count, kind)
        self._module.calls.append("all-gather")
        touched(stream, _array(own, count, kind), _array(first, count * self._comm.size, kind))
        self._comm.Allgather(sent, _array(first, count * self._comm.size, kind))

    def allReduce(self, source: int, target: int, count: int, kind: int, operation: int, stream: int) -> None:
        assert operation == NCCL_SUM
        self._module.calls.append("all-reduce")
        touched(stream, _array(source, count, kind), _array(target, count, kind))
        sent = MPI.IN_PLACE if source == target else _array(source, count, kind)
        self._comm.Allreduce(sent, _array(target, count, kind))

    def check_async_error(self) -> None:
        pass

    def destroy(self) -> None:
        self._module.calls.append("destroy")
