"""A compiled kernel bound to its grid and arguments: launching it again is one call of the CUDA driver.

numba-cuda's own launch converts every argument and looks the function up each time. Here the function's handle, and the
arguments as the driver takes them, are made once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cuda.bindings import driver

from dpsim.errors import CommunicationError
from dpsim.kernels.allreduce.cuda.kernels import THREADS


class Packed:
    """The arguments of a kernel for ``cuLaunchKernel``: ``address`` is that of an array of the address of each.

    numba passes a tuple as its members and an int as an int64. Each number has 8 bytes of a buffer to itself.
    """

    def __init__(self, values: tuple[Any, ...]) -> None:
        numbers = [np.asarray(value) for value in _members(values)]
        self._buffer = np.zeros(len(numbers), np.int64)
        for index, number in enumerate(numbers):
            self._buffer[index : index + 1].view(number.dtype)[0] = number
        self._addresses = self._buffer.ctypes.data + 8 * np.arange(len(numbers), dtype=np.int64)
        self.address = int(self._addresses.ctypes.data)
        self.dtypes = tuple(number.dtype for number in numbers)


def bind(compiled: Any, grid: tuple[int, int], values: tuple[Any, ...], held: Any) -> Callable[[Any], None]:
    """Return what launches numba's ``compiled`` kernel on the stream that it is called with, one of numba's or 0.

    The calling thread's current CUDA context must be the one that was current here. What is ``held`` lives as long as
    the function. It raises ``CommunicationError`` where the driver refuses.
    """
    compiled.bind()  # loads the code into this context
    handle = compiled.library.get_cufunc().handle
    if isinstance(handle, driver.CUkernel):
        handle = _checked(driver.cuKernelGetFunction(handle), "to look a kernel up")[1]
    packed = Packed(values)
    shape = (handle, *grid, 1, THREADS, 1, 1, 0)
    launch = driver.cuLaunchCooperativeKernel if compiled.cooperative else driver.cuLaunchKernel
    parameters = (
        (packed.address,) if compiled.cooperative else (packed.address, 0)
    )  # the latter takes a second form too
    last: list[Any] = [None, None]

    def stage(stream: Any, alive: Any = (compiled, packed, held)) -> None:
        if last[0] is not stream:
            last[:] = stream, driver.CUstream(int(stream))
        _checked(launch(*shape, last[1], *parameters), "to launch a kernel")

    return stage


_DONE = driver.CUresult.CUDA_SUCCESS


def _checked(returned: tuple[Any, ...], what: str) -> tuple[Any, ...]:
    if returned[0] != _DONE:
        raise CommunicationError(
            f"the CUDA driver refuses {what}: {returned[0].name}", remedy="look at nvidia-smi and dmesg"
        )
    return returned


def _members(values: Any) -> Iterator[Any]:
    for value in values:
        if isinstance(value, tuple):
            yield from _members(value)
        else:
            yield value
