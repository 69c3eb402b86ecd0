"""Work memory of kernels, kept between calls: each thread has its own."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE_BYTES = 64


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.parts: dict[str, NDArray[np.uint8]] = {}


_scratch = _Scratch()


def aligned(size_bytes: int) -> NDArray[np.uint8]:
    """Return zeroed memory that begins at a cache line, so that no vector lies across two."""
    memory = np.zeros(size_bytes + LINE_BYTES, np.uint8)
    first = -memory.ctypes.data % LINE_BYTES
    return memory[first : first + size_bytes]


def scratch(name: str, elements: int, dtype: DTypeLike) -> NDArray[Any]:
    """Return [elements] of this thread's memory of that name; what lies in it is whatever the last call left there."""
    size_bytes = elements * np.dtype(dtype).itemsize
    part = _scratch.parts.get(name)
    if part is None or len(part) < size_bytes:
        part = _scratch.parts[name] = aligned(size_bytes)
    return part[:size_bytes].view(dtype)
