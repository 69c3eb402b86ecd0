"""Processes that compute side by side for one command, and end with it however it ends."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from typing import TypeVar

from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.child_process import end_with_parent

T = TypeVar("T")
_CLOSED = "handle is closed"
"""What Python's pool says in place of ``BrokenProcessPool`` where a process ends while work is being handed to it."""


@contextlib.contextmanager
def workers(count: int) -> Iterator[Executor | None]:
    """Hold an executor of so many processes; ``None`` for one, which is this process itself.

    Raises ``ConfigError`` for fewer than one, and ``DpsimError`` where a process ends before its work does.
    """
    if count < 1:
        raise ConfigError(f"--workers is {count}", allowed="1 or more", remedy="give the number of cores to use")
    if count == 1:
        yield None
        return
    try:
        with _pool(count) as executor:
            yield executor
    except (BrokenProcessPool, OSError) as error:
        if isinstance(error, OSError) and str(error) != _CLOSED:
            raise
        raise DpsimError(
            f"one of {count} processes ended before its work",
            remedy="often there was too little memory: give fewer --workers",
        ) from error


def computed(task: Callable[[], T], give_up: Callable[[], bool], nice: int = 0) -> T | BaseException | None:
    """Return what a task computes in a process of its own, or what it raises; None where ``give_up`` says so before.

    ``give_up`` waits a little at each call.
    """
    with _pool(1, nice) as executor:
        future = executor.submit(task)
        while not future.done():
            if give_up():
                _kill_workers()
                return None
        return future.exception() or future.result()


@contextlib.contextmanager
def _pool(count: int, nice: int = 0) -> Iterator[Executor]:
    """Hold processes that end with this one, also where it is killed; where it is interrupted, they are killed.

    They are started anew (``spawn``), since a fork would copy the threads of NumPy and numba in any state.
    """
    spawn = multiprocessing.get_context("spawn")
    executor = ProcessPoolExecutor(count, mp_context=spawn, initializer=_begin, initargs=(os.getpid(), nice))
    try:
        yield executor
    except BaseException:
        _kill_workers()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


def _kill_workers() -> None:
    for process in multiprocessing.active_children():
        process.kill()


def _begin(parent: int, nice: int) -> None:
    """Let this worker end when its parent does. A worker holds both ends of its queues, and so would wait for ever."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent has it too, and ends its workers
    if follow := end_with_parent(signal.SIGKILL):
        follow()
    if os.getppid() != parent:  # it ended before that
        os._exit(1)
    os.nice(nice)
