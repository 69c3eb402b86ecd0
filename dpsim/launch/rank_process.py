"""What every rank does, whether dpsim or another launcher started it, and the tasks of a job of another launcher.

A rank loads its task, binds itself to a core, computes with one thread, and when it fails, ends all ranks. In a job
that already runs (``mpiexec -n 2 dpsim ...``, ``srun ...``), rank 0 decides which tasks run. The other ranks sleep
until it sends one, and end when it ends.
"""

from __future__ import annotations

import atexit
import functools
import importlib.util
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, NoReturn

from dpsim.errors import CommunicationError, ConfigError, DpsimError
from dpsim.launch import control_channel, rank_info
from dpsim.launch.failure_report import script_exit_code
from dpsim.launch.shaped import on_shaped_hosts
from dpsim.progress import Progress, no_progress

if TYPE_CHECKING:
    from mpi4py import MPI

THREAD_VARIABLES = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")
"""Environment variables for the number of compute threads. Each rank uses one thread unless the user has set these."""

WITHOUT_TERMINAL_SIGNALS = ("/bin/sh", "-c", 'trap \'\' INT HUP; exec "$0" "$@"')
"""Starts a Python that ignores these signals at first; by itself it prints a traceback if SIGINT comes as it starts."""

Task = Callable[["MPI.Intracomm", dict[str, Any], Progress], Any]
"""A function that runs on every rank: (communicator, argument, progress) -> result."""

_TAG = 32_000
_POLL_S = 0.002
_FORWARD_S = 0.2
"""How long the launcher has to forward a rank's last lines before it learns that the rank has ended."""


_announce_independence: list[Callable[[], None]] = []


def independent(announce: Callable[[], None] | None = None) -> None:
    """Say that this rank awaits no message of MPI any more, once every rank has come so far.

    From then on a job that outlives its ranks (``jobs.on_ranks``) goes on when one is killed. ``announce``, of the
    program of a rank alone, is what says it.
    """
    if announce is not None:
        _announce_independence.append(announce)
        return
    for each in _announce_independence:
        each()


def load(task: str) -> Task:
    """Return the function that ``task`` names as ``module:function``. Raises ``ConfigError`` if there is none."""
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
    node = comm.Dup() if on_shaped_hosts() else comm.Split_type(MPI.COMM_TYPE_SHARED)
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
    if (world := rank_info.loaded_world()) is not None:
        world.Abort(code)
    os._exit(code)


def end_all(error: BaseException, heading: str = "") -> NoReturn:
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


def run_attached(task: str, argument: dict[str, Any], *, devices: int, progress: Progress, pin: bool) -> Any:
    """Run ``jobs.on_ranks`` on the first ``devices`` ranks of the job that this process is part of."""
    world, job = rank_info.world(), rank_info.job()
    if job is not None and job.size is not None and job.size != world.size:
        raise CommunicationError(
            f"{job.launcher} started {job.size} tasks, but MPI reports {world.size}",
            allowed="a launcher of the MPI library that mpi4py loads",
            remedy="use that library's mpiexec (or srun --mpi=pmi2), or start dpsim without a launcher",
        )
    if world.rank != 0:
        serve()
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
    return json.loads(json.dumps(_run_request(world, json.loads(request), progress)))


def serve() -> NoReturn:
    """Run the tasks that rank 0 sends, on the other ranks, then raise ``SystemExit(0)``."""
    if importlib.util.find_spec("mpi4py") is not None:
        world = rank_info.world()
        while world.rank != 0:  # MPI may number the ranks differently from the launcher, whose rank 0 reports that
            while not world.iprobe(source=0, tag=_TAG):
                time.sleep(_POLL_S)
            if (request := world.recv(source=0, tag=_TAG)) is None:
                break
            _run_request(world, json.loads(request), no_progress)
    raise SystemExit(0)


@functools.cache
def release() -> None:
    """Let the other ranks end: called on rank 0 after its last task."""
    if importlib.util.find_spec("mpi4py") is not None:
        world = rank_info.world()
        for rank in range(1, world.size):
            world.send(None, dest=rank, tag=_TAG)


def _run_request(world: MPI.Intracomm, request: dict[str, Any], progress: Progress) -> Any:
    """Run the requested task; returns this rank's result, None on ranks that the task does not use."""
    from mpi4py import MPI

    _print_process_ids()
    participates = world.rank < request["devices"]
    comm = MPI.Intracomm(world.Split(0 if participates else MPI.UNDEFINED, world.rank))
    if not participates:
        return None
    affinity = os.sched_getaffinity(0)
    try:
        with one_thread():
            if request["pin"]:
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
        if request["pin"]:
            os.sched_setaffinity(0, affinity)
        comm.Free()


@functools.cache
def _print_process_ids() -> None:
    """Print once which process is which rank, under mpich's mpiexec: it names a killed rank only by its process id."""
    world, job = rank_info.world(), rank_info.job()
    if job is None or job.launcher != "mpiexec":
        return
    if {"OMPI_COMM_WORLD_RANK", control_channel.VARIABLE} & os.environ.keys():
        return
    processes = world.gather(f"rank {world.rank}: {os.getpid()} on {socket.gethostname()}")
    if processes is not None:
        print(f"dpsim: process ids: {', '.join(processes)}", file=sys.stderr, flush=True)
