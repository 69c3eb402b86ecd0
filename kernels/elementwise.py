"""The rectifier and its backward pass, and scaling: each array read or written once."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from numpy.typing import NDArray

from dpsim.kernels.cache import compiled
from dpsim.kernels.vector import Element, Kernel

Array = NDArray[Any]


def relu(x: Array, out: Array, mask: Array) -> None:
    """out = max(x, 0), mask = x > 0 (a byte an element); NaN stays NaN."""
    _relu(x.dtype.name)(x, out, mask, x.size)


def keep_where(x: Array, mask: Array) -> None:
    """x = x where mask else 0, in place."""
    _keep_where(x.dtype.name)(x, mask, x.size)


@compiled
def _relu(dtype: str) -> Kernel:
    kernel = Kernel(dtype, ("x", "out", "mask"), ("size",))

    def body(e: Element) -> None:
        x = e["x"]
        e["out"] = (x <= 0.0).choose(0.0, x)
        e.set_mask("mask", x > 0.0)

    kernel.elementwise(kernel["size"], body)
    return kernel


@compiled
def _keep_where(dtype: str) -> Kernel:
    kernel = Kernel(dtype, ("x", "mask"), ("size",))

    def body(e: Element) -> None:
        x = e["x"]
        e["x"] = e.mask("mask").choose(x, 0.0)

    kernel.elementwise(kernel["size"], body)
    return kernel


def scaling(x: Array, factor: float) -> Callable[[], object]:
    """x = x * factor in place, ready to be called: one read and one write of memory, and next to no arithmetic."""
    function, address, size = _scaling(x.dtype.name), x.ctypes.data, x.size

    def run(_alive: Array = x) -> None:
        function(address, size, factor)

    return run


@compiled
def _scaling(dtype: str) -> Kernel:
    kernel = Kernel(dtype, ("x",), ("size",), ("factor",), returns_index=True)

    def body(e: Element) -> None:
        e["x"] = e["x"] * e.number("factor")

    kernel.elementwise(kernel["size"], body)
    kernel.builder.ret(kernel["size"].ir)
    return kernel
