"""Runs tasks on the ranks of an MPI job that already runs (``mpiexec -n 2 dpsim ...``, ``srun ...``).

Rank 0 decides which tasks run. The other ranks sleep until it sends one, and end when it ends.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Any

from dpsim.errors import CommunicationError, ConfigError, DpsimError
from dpsim.launch import authentication, rank_info
from dpsim.launch.rank_process import abort, load, one_thread, pin
from dpsim.progress import Progress, no_progress

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 32_000
_POLL_S = 0.002
_FORWARD_S = 0.2
"""How long the launcher has to forward a rank's last lines before it learns that the rank has ended."""
_released = False


def run(task: str, argument: dict[str, Any], *, devices: int, progress: Progress | None, pin: bool) -> Any:
    """``jobs.on_ranks`` on the first ``devices`` ranks of this job."""
    world = rank_info.world()
    _check_size(world)
    if world.rank != 0:
        serve()
        raise SystemExit(0)
    atexit.register(release)
    if devices > world.size:
        raise ConfigError(
            f"devices is {devices}, but this job was started with {world.size} rank{'s' if world.size > 1 else ''}",
            allowed=f"1 to {world.size}",
            remedy="start as many ranks as devices, or start dpsim without mpiexec: it then starts the ranks itself",
        )
    request = json.dumps({"task": task, "argument": argument, "devices": devices, "pin": pin})
    for rank in range(1, world.size):
        world.send(request, dest=rank, tag=_TAG)
    return json.loads(json.dumps(_run_request(world, json.loads(request), progress or no_progress)))


def serve() -> None:
    """On ranks other than 0: run the tasks that rank 0 sends, until it releases this rank."""
    world = rank_info.world()
    if world.rank == 0:
        return  # the launcher numbers the ranks differently from MPI; the launcher's rank 0 reports that
    while True:
        while not world.iprobe(source=0, tag=_TAG):
            time.sleep(_POLL_S)
        request = world.recv(source=0, tag=_TAG)
        if request is None:
            return
        _run_request(world, json.loads(request), no_progress)


def release() -> None:
    """On rank 0, after its last task: let the other ranks end."""
    global _released
    if _released:
        return
    _released = True
    world = rank_info.world()
    for rank in range(1, world.size):
        world.send(None, dest=rank, tag=_TAG)


def end_all(error: BaseException, heading: str = "") -> None:
    """Print an exception that this rank cannot handle, and end all ranks of the job.

    A ``DpsimError`` is printed as one message, anything else as a traceback below ``heading``.
    """
    if isinstance(error, DpsimError):
        print(f"dpsim: {error}", file=sys.stderr)
    elif isinstance(error, KeyboardInterrupt):
        print("dpsim: interrupted", file=sys.stderr)
    else:
        print(heading, end="", file=sys.stderr)
        traceback.print_exception(error)
    sys.stderr.flush()
    time.sleep(_FORWARD_S)
    abort(error)


def _check_size(world: MPI.Intracomm) -> None:
    job = rank_info.job()
    if job is not None and job.size is not None and job.size != world.size:
        raise CommunicationError(
            f"{job.launcher} started {job.size} tasks, but MPI reports {world.size}",
            allowed="a launcher of the MPI library that mpi4py loads",
            remedy="use that library's mpiexec (or srun --mpi=pmi2), or start dpsim without a launcher",
        )


def _run_request(world: MPI.Intracomm, request: dict[str, Any], progress: Progress) -> Any:
    """This rank's result of the requested task; None on ranks that the task does not use."""
    from mpi4py import MPI

    _print_process_ids()
    participates = world.rank < request["devices"]
    comm = MPI.Intracomm(world.Split(0 if participates else MPI.UNDEFINED, world.rank))
    if not participates:
        return None
    affinity = os.sched_getaffinity(0) if request["pin"] else None
    try:
        with one_thread():
            if affinity is not None:
                pin(comm)
            return load(request["task"])(comm, request["argument"], progress)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(min(world.rank, 6))  # the lowest interrupted rank reports; ranks that wait inside MPI cannot
        elif world.rank != 0:
            time.sleep(0.5)  # when every rank fails in the same manner, rank 0 reports
        end_all(error, f"dpsim: rank {world.rank} of {world.size} failed\n\n")
    finally:
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
        comm.Free()


@functools.cache
def _print_process_ids() -> None:
    """Print once which process is which rank, under mpich's mpiexec: it names a killed rank only by its process id."""
    world, job = rank_info.world(), rank_info.job()
    if (
        job is None
        or job.launcher != "mpiexec"
        or {"OMPI_COMM_WORLD_RANK", authentication.VARIABLE} & os.environ.keys()
    ):
        return
    processes = world.gather(f"rank {world.rank}: {os.getpid()} on {socket.gethostname()}")
    if processes is not None:
        print(f"dpsim: process ids: {', '.join(processes)}", file=sys.stderr, flush=True)
