"""The reduction of an allreduce in shared memory: one pass over the arrays of all ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import Element, Kernel

Array = NDArray[Any]


def sum_everywhere(arrays: Sequence[Array]) -> None:
    """Every array = arrays[0] + arrays[1] + ..., added in this order. Reads and writes each array once."""
    _sum(arrays[0].dtype.name, len(arrays))(*arrays, arrays[0].size)


@compiled
def _sum(dtype: str, count: int) -> Kernel:
    names = tuple(f"array{number}" for number in range(count))
    kernel = Kernel(dtype, names, ("size",))

    def body(e: Element) -> None:
        total = e[names[0]]
        for name in names[1:]:
            total = total + e[name]
        for name in names:
            e[name] = total

    kernel.elementwise(kernel["size"], body)
    return kernel
