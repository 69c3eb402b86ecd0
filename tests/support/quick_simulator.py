"""numba's CUDA simulator with threads that take short turns: it polls them, which costs a turn of each."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

from numba_cuda.numba.cuda.simulator.kernelapi import FakeCUDAShared


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """While it is open, threads ask for a kernel's one shared array in turn: else two of them may get one each."""
    make, lock, interval_s = FakeCUDAShared.array, threading.Lock(), sys.getswitchinterval()

    def array(self: Any, *given: Any, **settings: Any) -> Any:
        with lock:
            return make(self, *given, **settings)

    sys.setswitchinterval(1e-5)
    try:
        with mock.patch.object(FakeCUDAShared, "array", array):
            yield
    finally:
        sys.setswitchinterval(interval_s)
