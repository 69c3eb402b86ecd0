"""numba's CUDA simulator without its polling: the threads of a block run one after another, up to each barrier."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np


@contextlib.contextmanager
def short_turns() -> Iterator[None]:
    """While it is open, all threads of a block get the same shared array; numba's own may give each another."""
    from numba.cuda.simulator import kernel  # ``numba_cuda.numba`` has another, which nothing uses
    from numba.cuda.simulator.kernelapi import FakeCUDAShared

    def array(self: Any, shape: int, dtype: Any) -> Any:
        asking = sys._getframe(1)
        place = (asking.f_code.co_filename, asking.f_lineno)
        return self._allocations.setdefault(place, np.empty(shape, dtype))

    with (
        mock.patch.object(FakeCUDAShared, "array", array),
        mock.patch.object(kernel.BlockManager, "run", _run_block),
        mock.patch.object(kernel.BlockThread, "run", _run_thread),
        mock.patch.object(kernel.BlockThread, "syncthreads", _wait_at_barrier),
    ):
        yield


def _run_block(manager: Any, grid_point: tuple[int, ...], *args: Any) -> None:
    """Run a block's threads in turns: from barrier to barrier, in the other order after each."""
    from numba.cuda.simulator.kernel import BlockThread

    manager.back = threading.Semaphore(0)
    points = np.ndindex(*manager._block_dim)
    waiting = [BlockThread(lambda: manager._f(*args), manager, grid_point, point, manager._debug) for point in points]
    begin = BlockThread.start
    while waiting:
        for thread in waiting:
            begin(thread) if thread.ident is None else thread.syncthreads_event.set()
            manager.back.acquire()
            if thread.exception:
                for other in waiting:
                    other.abort = True
                    other.syncthreads_event.set()
                raise thread.exception[0].with_traceback(thread.exception[1])
        waiting = [thread for thread in waiting if thread.syncthreads_blocked][::-1]


def _run_thread(thread: Any) -> None:
    try:
        threading.Thread.run(thread)
    except Exception as error:
        where = f"tid={list(thread.threadIdx)} ctaid={list(thread.blockIdx)}"
        thread.exception = (type(error)(f"{where}: {error}"), error.__traceback__)
    thread._manager.back.release()


def _wait_at_barrier(thread: Any) -> None:
    if thread.abort:
        raise RuntimeError("another thread of the block has failed")
    thread.syncthreads_blocked = True
    thread._manager.back.release()
    thread.syncthreads_event.wait()
    thread.syncthreads_event.clear()
    thread.syncthreads_blocked = False
    if thread.abort:
        raise RuntimeError("another thread of the block has failed")
