"""Processes that compute side by side for one command."""

from __future__ import annotations

import contextlib
import multiprocessing
from collections.abc import Iterator
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

from dpsim.errors import ConfigError, DpsimError


@contextlib.contextmanager
def workers(count: int) -> Iterator[Executor | None]:
    """Hold an executor of so many processes; ``None`` for one, which is this process itself.

    The processes are started anew (``spawn``), since a fork would copy the threads of NumPy and numba in any state.
    Raises ``ConfigError`` for fewer than one, and ``DpsimError`` where a process ends before its work does.
    """
    if count < 1:
        raise ConfigError(f"--workers is {count}", allowed="1 or more", remedy="give the number of cores to use")
    if count == 1:
        yield None
        return
    try:
        with ProcessPoolExecutor(count, mp_context=multiprocessing.get_context("spawn")) as executor:
            yield executor
    except BrokenProcessPool as error:
        raise DpsimError(
            f"one of {count} processes ended before its work",
            remedy="often there was too little memory: give fewer --workers",
        ) from error
