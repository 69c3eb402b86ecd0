"""The NVIDIA driver of this machine, asked through its own library: it needs no package and creates no CUDA context.

``python -I dpsim/comm/cuda/driver.py`` prints the extra of dpsim that fits the driver (``cuda12`` or ``cuda13``), and
ends with exit code 2 where no GPU can be used. This module therefore imports the standard library alone.
"""

from __future__ import annotations

import ctypes
import itertools
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

LIBRARY = "libcuda.so.1"
OLDEST_CUDA, NEWEST_CUDA = 12, 13
"""The major versions of CUDA for which dpsim has an extra. A newer driver also runs what was built for the newest."""

_NAME_BYTES = 256
_COMPUTE_MODE, _CAPABILITY_MAJOR, _CAPABILITY_MINOR = 20, 75, 76  # of CUdevice_attribute
_PROHIBITED, _EXCLUSIVE_PROCESS = 2, 3  # of CUcomputemode


@dataclass(frozen=True, kw_only=True)
class DriverGpu:
    """A GPU as the driver describes it. ``exclusive``: only one process at a time can use it."""

    name: str
    capability: tuple[int, int]
    exclusive: bool = False


@dataclass(frozen=True, kw_only=True)
class Driver:
    """Facts that the driver tells.

    ``cuda_version`` is the newest CUDA that it runs, as 1000 major + 10 minor, and 0 without a driver. ``peer_access``:
    whether every GPU reaches the memory of every other one. ``problem``: why no GPU can be used; empty if one can.
    """

    cuda_version: int = 0
    gpus: tuple[DriverGpu, ...] = ()
    peer_access: bool = True
    problem: str = ""

    @property
    def cuda(self) -> str:
        """13.1 of 13010."""
        return f"{self.cuda_version // 1000}.{self.cuda_version % 1000 // 10}"

    @property
    def _major(self) -> int:
        """The CUDA to install; the newest one without a driver, since nothing speaks against it."""
        return min(self.cuda_version // 1000 or NEWEST_CUDA, NEWEST_CUDA)

    @property
    def extra(self) -> str:
        """The extra of dpsim for this driver."""
        return f"cuda{self._major}"

    @property
    def cupy_package(self) -> str:
        """The package of CuPy for this driver."""
        return f"cupy-cuda{self._major}x"

    @property
    def nccl_package(self) -> str:
        """The package of NCCL for this driver."""
        return f"nvidia-nccl-cu{self._major}"

    @property
    def description(self) -> str:
        """The driver's CUDA and its GPUs, and what keeps processes from sharing them."""
        names = {f"{gpu.name} (sm_{gpu.capability[0]}{gpu.capability[1]})" for gpu in self.gpus}
        text = f"CUDA {self.cuda}; {len(self.gpus)} x {', '.join(sorted(names))}"
        text += "; compute mode EXCLUSIVE_PROCESS" if self.exclusive else ""
        return text + ("" if self.peer_access else "; no peer access between the GPUs")

    @property
    def exclusive(self) -> bool:
        """Whether only one process at a time can use some GPU."""
        return any(gpu.exclusive for gpu in self.gpus)


def _load() -> Any:
    return ctypes.CDLL(LIBRARY)


def ask(load: Callable[[], Any] = _load) -> Driver:
    """Return the facts of this machine's driver and its GPUs. ``load`` opens the driver's library."""
    try:
        library = load()
    except OSError:
        return Driver(problem=f"no NVIDIA driver ({LIBRARY})")
    version = _number(library, "cuDriverGetVersion")
    if version < 1000 * OLDEST_CUDA:
        driver = Driver(cuda_version=version)
        return Driver(
            cuda_version=version, problem=f"the driver is for CUDA {driver.cuda}; CUDA {OLDEST_CUDA} is needed"
        )
    if status := library.cuInit(0):
        return Driver(cuda_version=version, problem=f"the driver answers {_error_name(library, status)}")
    gpus = tuple(_gpu(library, number) for number in range(_number(library, "cuDeviceGetCount")))
    problem = "" if gpus else "the driver sees no GPU"
    modes = [_attribute(library, number, _COMPUTE_MODE) for number in range(len(gpus))]
    if gpus and all(mode == _PROHIBITED for mode in modes):
        problem = "every GPU is in the compute mode PROHIBITED (nvidia-smi -c DEFAULT changes it)"
    return Driver(cuda_version=version, gpus=gpus, peer_access=_peer_access(library, len(gpus)), problem=problem)


def _gpu(library: Any, number: int) -> DriverGpu:
    name = ctypes.create_string_buffer(_NAME_BYTES)
    library.cuDeviceGetName(name, _NAME_BYTES, _handle(library, number))
    capability = _attribute(library, number, _CAPABILITY_MAJOR), _attribute(library, number, _CAPABILITY_MINOR)
    exclusive = _attribute(library, number, _COMPUTE_MODE) == _EXCLUSIVE_PROCESS
    return DriverGpu(name=name.value.decode(errors="replace"), capability=capability, exclusive=exclusive)


def _peer_access(library: Any, count: int) -> bool:
    pairs = itertools.permutations(range(count), 2)
    return all(_number(library, "cuDeviceCanAccessPeer", *(_handle(library, n) for n in pair)) for pair in pairs)


def _handle(library: Any, number: int) -> int:
    return _number(library, "cuDeviceGet", number)


def _attribute(library: Any, number: int, attribute: int) -> int:
    return _number(library, "cuDeviceGetAttribute", attribute, _handle(library, number))


def _number(library: Any, function: str, *arguments: int) -> int:
    """Return the integer that a function of the driver writes through its first argument; 0 where it fails."""
    number = ctypes.c_int(0)
    status = getattr(library, function)(ctypes.byref(number), *arguments)
    return 0 if status else number.value


def _error_name(library: Any, status: int) -> str:
    name = ctypes.c_char_p()
    library.cuGetErrorName(status, ctypes.byref(name))
    return name.value.decode() if name.value else f"error {status}"


def main() -> int:
    """Print the extra that fits the driver; the exit code."""
    driver = ask()
    if driver.problem:
        print(f"gpu-check: there is no GPU to check here: {driver.problem}", file=sys.stderr)
        return 2
    print(driver.extra)
    return 0


if __name__ == "__main__":
    sys.exit(main())
