"""Runs tasks on the ranks of an MPI job that already runs (``mpiexec -n 2 dpsim ...``, ``srun ...``).

Rank 0 decides. The other ranks wait, asleep, for the tasks it names, and end when it ends.
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
from dpsim.launch import control_channel, jobs, worker

if TYPE_CHECKING:
    from mpi4py import MPI

_TAG = 32_000
_NAP_S = 0.002
_released = False


def run(task: str, argument: dict[str, Any], *, devices: int, progress: jobs.Progress | None, pin: bool) -> Any:
    """``jobs.on_ranks`` on the first ``devices`` ranks of this job."""
    world = worker.world()
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
    return json.loads(json.dumps(_take_part(world, json.loads(request), progress)))


def serve() -> None:
    """Do rank 0's tasks until it ends."""
    world = worker.world()
    if world.rank == 0:
        return  # the launcher and MPI disagree; the launcher's rank 0 reports it
    while True:
        while not world.iprobe(source=0, tag=_TAG):
            time.sleep(_NAP_S)
        request = world.recv(source=0, tag=_TAG)
        if request is None:
            return
        _take_part(world, json.loads(request), None)


def release() -> None:
    """On rank 0, once nothing more is to do: let the other ranks end."""
    global _released
    if _released:
        return
    _released = True
    world = worker.world()
    for rank in range(1, world.size):
        world.send(None, dest=rank, tag=_TAG)


def _check_size(world: MPI.Intracomm) -> None:
    here = jobs.job()
    if here is not None and here.size is not None and here.size != world.size:
        raise CommunicationError(
            f"{here.launcher} started {here.size} tasks, and MPI sees {world.size}",
            allowed="a launcher of the same MPI library that mpi4py loads",
            remedy="use that library's mpiexec (or srun --mpi=pmi2), or start dpsim without a launcher",
        )


def _take_part(world: MPI.Intracomm, request: dict[str, Any], progress: jobs.Progress | None) -> Any:
    from mpi4py import MPI

    _introduce()
    part = world.rank < request["devices"]
    comm = MPI.Intracomm(world.Split(0 if part else MPI.UNDEFINED, world.rank))
    if not part:
        return None
    affinity = os.sched_getaffinity(0) if request["pin"] else None
    try:
        with one_thread():
            if affinity is not None:
                worker.pin(comm)
            return worker.load(request["task"])(comm, request["argument"], progress or (lambda _: None))
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        if interrupted:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            time.sleep(min(world.rank, 6))  # all hear of it; a rank that waits inside MPI cannot say so
        elif world.rank != 0:
            time.sleep(0.5)  # when every rank fails alike, rank 0 is the one to say so
        if isinstance(error, DpsimError):
            print(f"dpsim: {error}", file=sys.stderr)
        elif interrupted:
            print("dpsim: interrupted", file=sys.stderr)
        else:
            print(f"dpsim: rank {world.rank} of {world.size} failed\n", file=sys.stderr)
            traceback.print_exception(error)
        sys.stderr.flush()
        time.sleep(0.2)  # the launcher passes these lines on before it hears of the end
        worker.abort(error)
    finally:
        if affinity is not None:
            os.sched_setaffinity(0, affinity)
        comm.Free()


@functools.cache
def _introduce() -> None:
    """Say once which process is which rank, where the launcher names a killed one by its process alone (hydra)."""
    world, here = worker.world(), jobs.job()
    if (
        here is None
        or here.launcher != "mpiexec"
        or {"OMPI_COMM_WORLD_RANK", control_channel.VARIABLE} & os.environ.keys()
    ):
        return
    told = world.gather(f"rank {world.rank}: {os.getpid()} on {socket.gethostname()}")
    if told is not None:
        print(f"dpsim: process ids: {', '.join(told)}", file=sys.stderr, flush=True)


def one_thread() -> Any:
    """One compute thread a rank, as in a job that dpsim starts, unless the user has set a number."""
    import threadpoolctl

    asked = any(name in os.environ for name in jobs.THREAD_PINS)
    for name in jobs.THREAD_PINS:
        os.environ.setdefault(name, "1")
    return threadpoolctl.threadpool_limits(None if asked else 1)
