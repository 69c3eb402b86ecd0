"""Which of CUDA's libraries work in this Python, each by using it: ``python -m ...gpu_check.libraries numba``.

Prints a line a step, its name and what it found, once the step is done. The first step that fails ends the process, and
the last line of stderr says why. A process of its own, because a library that does not fit may also crash or hang.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import Any

import numpy as np

from dpsim.comm.cuda.available import cupy_version, nccl_missing, open_device

NUMBA_STEPS = ("numba-cuda", "NVVM", "launch", "cudadevrt")
CUPY_STEPS = ("CuPy", "cuBLAS", "NCCL")
_THREADS = 32
_SUM_OF_SQUARES, _SUM_OF_PRODUCTS = 328_350, 486.0


def numba_steps() -> Iterator[str]:
    """Import numba-cuda; compile with NVVM; run a kernel; link with cudadevrt and run a cooperative kernel."""
    cuda: Any = importlib.import_module("numba.cuda")
    types: Any = importlib.import_module("numba.cuda.types")

    def one(array: Any) -> None:
        array[cuda.grid(1)] = 1

    def meet(array: Any) -> None:
        cuda.cg.this_grid().sync()  # what makes the launch cooperative
        array[cuda.grid(1)] = 1

    capability = cuda.get_current_device().compute_capability
    yield f"{metadata.version('numba-cuda')}, cuda-bindings {metadata.version('cuda-bindings')}"
    cuda.compile_ptx(one, (types.float32[::1],), cc=capability)
    yield f"compiles for sm_{capability[0]}{capability[1]}"
    for kernel in (one, meet):
        array = cuda.to_device(np.zeros(_THREADS, np.float32))
        cuda.jit("void(float32[::1])")(kernel)[1, _THREADS](array)
        if not (array.copy_to_host() == 1).all():
            raise SystemExit("the kernel ran and did not write what it should")
        yield "a kernel runs" if kernel is one else "a cooperative kernel runs"


def cupy_steps() -> Iterator[str]:
    """Import CuPy and let it compute; multiply with cuBLAS, which is loaded then; let NCCL move data on this GPU."""
    cupy: Any = importlib.import_module("cupy")
    if int((cupy.arange(100) ** 2).sum()) != _SUM_OF_SQUARES:
        raise SystemExit("CuPy computes a wrong sum")
    yield f"{cupy_version()}, runtime {_dotted(cupy.cuda.runtime.runtimeGetVersion())}"
    numbers = cupy.arange(9, dtype="float32").reshape(3, 3)
    if float((numbers @ numbers).sum()) != _SUM_OF_PRODUCTS:
        raise SystemExit("cuBLAS computes a wrong product")
    yield "multiplies in float32"
    if reason := nccl_missing():
        raise SystemExit(reason)
    from dpsim.comm.cuda import nccl

    alone: Any = _Alone()
    if wrong := nccl.wrong_calls(alone, open_device(0)):
        raise SystemExit(f"NCCL's {wrong} gives other data than it should")
    yield nccl.version(nccl.load())


class _Alone:
    """What ``Nccl`` needs of a communicator of one rank: MPI may be missing here."""

    size, rank = 1, 0

    def bcast(self, value: Any) -> Any:
        return value


GROUPS: dict[str, tuple[tuple[str, ...], Callable[[], Iterator[str]]]] = {
    "numba": (NUMBA_STEPS, numba_steps),
    "cupy": (CUPY_STEPS, cupy_steps),
}
"""Steps that run in one process, by the name of the process."""


def _dotted(number: int) -> str:
    """Return 13.1 of CUDA's 13010."""
    return f"{number // 1000}.{number % 1000 // 10}"


def main(group: str) -> None:
    """Take the steps of a group."""
    names, steps = GROUPS[group]
    for name, text in zip(names, steps(), strict=True):
        print(f"{name}\t{text}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
