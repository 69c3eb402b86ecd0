"""Tasks that the launcher's tests run on ranks."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import psutil
from mpi4py import MPI

from dpsim.errors import NotFiniteError
from dpsim.progress import Progress


def echo(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> Any:
    """The argument back, with what the ranks know of themselves."""
    progress(f"hello from {comm.rank}\nand its second line")
    print("printed by rank", comm.rank)
    about: dict[str, Any] = {"rank": comm.rank, "pid": os.getpid(), "cores": len(os.sched_getaffinity(0))}
    about["threads"] = os.environ["OPENBLAS_NUM_THREADS"]
    parent = _listening(psutil.Process(os.getppid()))  # mpiexec hands its own socket on to the ranks
    about["listening"] = sorted({address for address, _ in _listening(psutil.Process()) - parent})
    about["shared"] = os.environ.get("UCX_POSIX_DIR")
    return {"argument": argument, "ranks": comm.gather(about)}


def _listening(process: psutil.Process) -> set[tuple[str, int]]:
    """The TCP addresses that a process listens on."""
    connections = process.net_connections(kind="tcp")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def sum_ranks(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> int:
    """The sum of rank + 1 over all ranks."""
    return int(comm.allreduce(comm.rank + 1))


def fail(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> None:
    """End in the asked way on the asked rank while the others wait for it for ever."""
    comm.Barrier()
    if comm.rank == argument["rank"]:
        how = argument["how"]
        if how == "exception":
            raise ZeroDivisionError("the reason")
        if how == "mistake":
            raise NotFiniteError("loss is nan at step 3", allowed="finite losses", remedy="lower the learning rate")
        if how == "exit":
            sys.exit(7)
        time.sleep(0.2)
        os.kill(os.getpid(), getattr(signal, how))
    comm.Barrier()


def hung_up(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> int:
    """Get SIGHUP, go on, and use MPI."""
    os.kill(os.getpid(), signal.SIGHUP)
    return int(comm.allreduce(1))


def hang(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> None:
    """Say that it runs, and never end."""
    Path(argument["folder"], f"{comm.rank}.pid").write_text(str(os.getpid()))
    progress("running")
    time.sleep(600)


def kill(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> None:
    """Rank 0 ends the asked ranks at once, itself perhaps, while all are waiting."""
    ranks = comm.gather(os.getpid())
    if ranks is not None:
        for rank in sorted(argument["ranks"], reverse=True):
            os.kill(ranks[rank], signal.SIGKILL)
    time.sleep(600)


def tcp_listeners(comm: Any, _: Any, __: Any) -> Any:
    """Return the sockets of TCP that listen and are open in each rank."""
    listening = {
        fields[9] for line in Path("/proc/net/tcp").read_text().splitlines()[1:] if (fields := line.split())[3] == "0A"
    }
    own = set()
    for entry in os.scandir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            own.add(os.readlink(entry.path).removeprefix("socket:[").removesuffix("]"))
    return comm.gather(sorted(own & listening))
