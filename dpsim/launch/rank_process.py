"""What every rank does, whether dpsim or another launcher started it.

It loads its task, binds itself to a core, computes with one thread, and when it fails, ends all ranks.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from dpsim.errors import ConfigError, DpsimError
from dpsim.launch.failure_report import script_exit_code
from dpsim.launch.rank_info import loaded_world
from dpsim.progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Environment variables for the number of compute threads. Each rank uses one thread unless the user has set these."""

WITHOUT_TERMINAL_SIGNALS = ("/bin/sh", "-c", 'trap \'\' INT HUP; exec "$0" "$@"')
"""Starts a Python that ignores these signals at first; by itself it prints a traceback if SIGINT comes as it starts."""

Task = Callable[["MPI.Intracomm", dict[str, Any], Progress], Any]
"""A function that runs on every rank: (communicator, argument, progress) -> result."""


def load(task: str) -> Task:
    """The function that ``task`` names as ``module:function``. Raises ``ConfigError`` if there is none."""
    module, _, name = task.partition(":")
    try:
        function: Task = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or " "):
            raise
        raise ConfigError(f"there is no task {task!r}: {error}", allowed="module:function") from error
    return function


def pin(comm: MPI.Intracomm) -> None:
    """Bind this process to one of its cores, chosen by its rank on this node. Collective."""
    from mpi4py import MPI

    cores = sorted(os.sched_getaffinity(0))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    os.sched_setaffinity(0, {cores[node.rank % len(cores)]})
    node.Free()


def one_thread() -> AbstractContextManager[Any]:
    """Limit this process to one compute thread while the context is open, unless the user has set a number."""
    import threadpoolctl

    set_by_user = any(name in os.environ for name in THREAD_VARIABLES)
    for name in THREAD_VARIABLES:
        os.environ.setdefault(name, "1")
    limits: AbstractContextManager[Any] = threadpoolctl.threadpool_limits(None if set_by_user else 1)
    return limits


def abort(error: BaseException) -> NoReturn:
    """End all ranks now. Otherwise the others would wait for this one forever."""
    if (code := script_exit_code(error)) is None:
        code = 2 if isinstance(error, DpsimError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    if (world := loaded_world()) is not None:
        world.Abort(code)
    os._exit(code)
