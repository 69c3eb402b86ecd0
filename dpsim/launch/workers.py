"""Processes that compute side by side for one command, and end with it however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.child_process import end_with_parent


@contextlib.contextmanager
def workers(count: int) -> Iterator[Executor | None]:
    """Hold an executor of so many processes; ``None`` for one, which is this process itself.

    The processes are started anew (``spawn``), since a fork would copy the threads of NumPy and numba in any state.
    They end with this process, also where it is killed; where it is interrupted, they are killed at once.
    Raises ``ConfigError`` for fewer than one, and ``DpsimError`` where a process ends before its work does.
    """
    if count < 1:
        raise ConfigError(f"--workers is {count}", allowed="1 or more", remedy="give the number of cores to use")
    if count == 1:
        yield None
        return
    executor = ProcessPoolExecutor(
        count, mp_context=multiprocessing.get_context("spawn"), initializer=_end_with, initargs=(os.getpid(),)
    )
    try:
        yield executor
    except BrokenProcessPool as error:
        raise DpsimError(
            f"one of {count} processes ended before its work",
            remedy="often there was too little memory: give fewer --workers",
        ) from error
    except BaseException:
        for process in multiprocessing.active_children():
            process.kill()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _end_with(parent: int) -> None:
    """Let this worker end when its parent does. A worker holds both ends of its queues, and so would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends its workers
    if follow := end_with_parent(signal.SIGKILL):
        follow()
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
