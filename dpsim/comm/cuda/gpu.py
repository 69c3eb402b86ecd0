"""An NVIDIA GPU: arrays, streams and events of CuPy, kernels of numba-cuda."""

from __future__ import annotations

import ctypes
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

import cupy
import numpy as np
from cuda.bindings import driver
from numba import cuda
from numpy.typing import NDArray

from dpsim.comm.cuda import ipc
from dpsim.comm.cuda.device import DeviceArray, PeerMapping, PeerMemory
from dpsim.errors import ConfigError
from dpsim.units import format_size

if TYPE_CHECKING:
    from mpi4py import MPI

    from dpsim.comm.cuda.gemm import Gemm

_GRANULARITY_BYTES = 1 << 21
"""CUDA cuts small allocations from blocks of this size, which IPC would share as a whole; so each takes whole ones."""

_SUCCESS, _NOT_READY = 0, 600  # cudaError_t of driver_types.h
_CUDA_R_32F, _CUDA_R_16BF = 0, 14  # cudaDataType of CUDA's library_types.h
_CUBLAS_COMPUTE_32F, _CUBLAS_GEMM_DEFAULT = 68, -1  # cublasComputeType_t and cublasGemmAlgo_t of cublas_api.h
_ONE, _ZERO = np.ones(1, np.float32), np.zeros(1, np.float32)


def _dotted(number: int) -> str:
    """Return 12.8 for 12080."""
    return f"{number // 1000}.{number % 1000 // 10}"


class GpuEvent:
    """A CUDA event, a ``spare`` one of its stream where there is any: to make one takes as long as to record it."""

    def __init__(self, stream: Any, spare: list[Any]) -> None:
        self._spare = spare
        self.event = spare.pop() if spare else cupy.cuda.Event()
        self.event.record(stream)

    def __del__(self) -> None:
        self._spare.append(self.event)

    def done(self) -> bool:
        """Ask CuPy's ``done``, which takes a GPU's fault for an event that is not complete yet; waiting raises it."""
        status = cupy.cuda.runtime.eventQuery(self.event.ptr)
        if status not in (_SUCCESS, _NOT_READY):
            self.wait()
        return bool(status == _SUCCESS)

    def due_s(self) -> float | None:
        return None

    def wait(self) -> None:
        self.event.synchronize()

    def seconds_since(self, earlier: Any) -> float:
        return float(cupy.cuda.get_elapsed_time(earlier.event, self.event)) * 1e-3


class GpuStream:
    """A CUDA stream, of CuPy and of numba at once."""

    def __init__(self) -> None:
        self.cupy = cupy.cuda.Stream(non_blocking=True)
        self.launch: Any = cuda.external_stream(self.cupy.ptr)
        self._spare_events: list[Any] = []

    def use(self) -> None:
        self.cupy.use()

    def record(self) -> GpuEvent:
        return GpuEvent(self.cupy, self._spare_events)

    def follow(self, event: Any) -> None:
        self.cupy.wait_event(event.event)

    def wait(self) -> None:
        self.cupy.synchronize()


class Gpu:
    """``Device`` over CuPy. Memory comes from cudaMalloc itself: that of pools cannot be shared one by one."""

    simulated = False
    mappings: tuple[PeerMapping, ...] = ("ipc", "mapped")
    xp: Any = cupy

    def __init__(self, number: int) -> None:
        self.number = number % cupy.cuda.runtime.getDeviceCount()
        self.use()
        self.name: str = cupy.cuda.runtime.getDeviceProperties(self.number)["name"].decode()
        runtime, cublas = cupy.cuda.runtime, cupy.cuda.cublas.getVersion(cupy.cuda.device.get_cublas_handle())
        self.libraries = (
            f"driver for CUDA {_dotted(runtime.driverGetVersion())}, CUDA {_dotted(runtime.runtimeGetVersion())}, "
            f"cuBLAS {cublas}, CuPy {cupy.__version__}, numba-cuda {version('numba-cuda')}"
        )
        self.identity = bytes(ipc.checked(driver.cuDeviceGetUuid(self.number)).bytes).hex()

    def use(self) -> None:
        cupy.cuda.Device(self.number).use()

    def settle(self) -> None:
        cupy.cuda.runtime.deviceSynchronize()

    def stream(self) -> GpuStream:
        return GpuStream()

    def free_bytes(self) -> int:
        return int(cupy.cuda.runtime.memGetInfo()[0])

    def memory(self, size_bytes: int) -> DeviceArray:
        allocated_bytes = -(-max(size_bytes, 1) // _GRANULARITY_BYTES) * _GRANULARITY_BYTES
        try:
            pointer = cupy.cuda.MemoryPointer(cupy.cuda.Memory(allocated_bytes), 0)
        except cupy.cuda.runtime.CUDARuntimeError as error:
            raise ConfigError(
                f"{format_size(allocated_bytes)} in the memory of {self.name}: {error}",
                allowed=f"{format_size(self.free_bytes())} are free",
                remedy="use a smaller model, or end what else uses the GPU (nvidia-smi)",
            ) from error
        pointer.memset(0, allocated_bytes)
        self.settle()
        return cupy.ndarray((size_bytes,), cupy.uint8, pointer)

    def host_memory(self, size_bytes: int) -> NDArray[np.uint8]:
        """Return page-locked memory; CUDA aligns it to more than 64 bytes."""
        memory = np.frombuffer(cupy.cuda.alloc_pinned_memory(max(size_bytes, 1)), np.uint8, size_bytes)
        memory[...] = 0
        return memory

    def copy(self, stream: Any, source: DeviceArray, target: DeviceArray) -> None:
        target.data.copy_from_device_async(source.data, source.nbytes, stream.cupy)

    def upload(self, stream: Any, host: NDArray[Any], array: DeviceArray) -> None:
        array.data.copy_from_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, stream.cupy)

    def download(self, stream: Any, array: DeviceArray, host: NDArray[Any]) -> None:
        array.data.copy_to_host_async(ctypes.c_void_p(host.ctypes.data), host.nbytes, stream.cupy)

    def multiply(self, gemm: Gemm, a: DeviceArray, b: DeviceArray, c: DeviceArray) -> None:
        cupy.cuda.cublas.gemmEx(
            cupy.cuda.device.get_cublas_handle(),
            int(gemm.transa),
            int(gemm.transb),
            gemm.m,
            gemm.n,
            gemm.k,
            _ONE.ctypes.data,
            a.data.ptr,
            _CUDA_R_16BF,
            gemm.lda,
            b.data.ptr,
            _CUDA_R_16BF,
            gemm.ldb,
            _ZERO.ctypes.data,
            c.data.ptr,
            _CUDA_R_32F,
            gemm.ldc,
            _CUBLAS_COMPUTE_32F,
            _CUBLAS_GEMM_DEFAULT,
        )

    def share(self, comm: MPI.Intracomm, size_bytes: int, mapping: PeerMapping) -> PeerMemory | None:
        self.use()
        if mapping == "ipc":
            return ipc.share_device_memory(comm, self.memory(size_bytes), self.number)
        return ipc.share_mapped_memory(comm, size_bytes, self.number)
