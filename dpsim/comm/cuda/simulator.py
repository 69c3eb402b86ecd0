"""numba's CUDA simulator as a device: its memory is host memory, its streams do everything at once.

It tests that code is right and tells nothing about speed: kernels run in Python, a system thread for each CUDA thread.
"""

from __future__ import annotations

import mmap
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
from numpy.typing import NDArray

from dpsim.comm.cuda.device import DeviceArray, PeerMapping, PeerMemory, Stream
from dpsim.comm.shared import shared_memory
from dpsim.kernels.allreduce.reference import from_bfloat16
from dpsim.memory import HostMark, Mark

if TYPE_CHECKING:
    from mpi4py import MPI

    from dpsim.comm.cuda.gemm import Gemm


class SimulatedStream:
    """A stream that does all work at once."""

    launch: Any = 0

    def use(self) -> None:
        pass

    def record(self) -> HostMark:
        return HostMark()

    def follow(self, event: Mark) -> None:
        pass

    def wait(self) -> None:
        pass


class SimulatedDevice:
    """``Device`` over NumPy. Ranks share host memory that all of them map."""

    name = "numba's CUDA simulator"
    identity = "simulator"
    simulated = True
    mappings: tuple[PeerMapping, ...] = ("simulated",)
    xp: Any = np
    libraries = f"NumPy {np.__version__}, numba-cuda {version('numba-cuda')}"

    def use(self) -> None:
        pass

    def settle(self) -> None:
        pass

    def stream(self) -> SimulatedStream:
        return SimulatedStream()

    def free_bytes(self) -> int:
        return int(psutil.virtual_memory().available)

    def memory(self, size_bytes: int) -> DeviceArray:
        return np.frombuffer(mmap.mmap(-1, max(size_bytes, 1)), np.uint8, size_bytes)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        return self.memory(size_bytes)  # type: ignore[no-any-return]

    def copy(self, stream: Stream, source: DeviceArray, target: DeviceArray) -> None:
        target[...] = source

    def upload(self, stream: Stream, host: NDArray[Any], array: DeviceArray) -> None:
        array[...] = host

    def download(self, stream: Stream, array: DeviceArray, host: NDArray[Any]) -> None:
        host[...] = array

    def multiply(self, gemm: Gemm, a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        """Multiply the same operands by NumPy, row by row: there A and B are exchanged."""
        left, right = from_bfloat16(b), from_bfloat16(a)
        left = left.reshape(gemm.k, gemm.n).T if gemm.transb else left.reshape(gemm.n, gemm.k)
        right = right.reshape(gemm.m, gemm.k).T if gemm.transa else right.reshape(gemm.k, gemm.m)
        np.matmul(left, right, out=c)

    def share(self, comm: MPI.Intracomm, size_bytes: int, mapping: PeerMapping) -> PeerMemory | None:
        extent = -(-size_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        memory = shared_memory(comm, extent * comm.size, "dpsim-simulated-device")
        if memory is None:
            return None
        mapped = np.frombuffer(memory, np.uint8)
        ranks = tuple(mapped[rank * extent : rank * extent + size_bytes] for rank in range(comm.size))
        return PeerMemory(ranks=ranks, mapping=mapping, close=comm.Barrier)
