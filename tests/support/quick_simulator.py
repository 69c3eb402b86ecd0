"""numba's CUDA simulator with threads that take short turns: it polls them, which costs a turn of each."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """While it is open, all threads of a block get the same shared array; numba's own may give each another."""
    from numba.cuda.simulator.kernelapi import FakeCUDAShared  # ``numba_cuda.numba`` has another, which nothing uses

    def array(self: Any, shape: int, dtype: Any) -> Any:
        asking = sys._getframe(1)
        place = (asking.f_code.co_filename, asking.f_lineno)
        return self._allocations.setdefault(place, np.empty(shape, dtype))

    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with mock.patch.object(FakeCUDAShared, "array", array):
            yield
    finally:
        sys.setswitchinterval(interval_s)
