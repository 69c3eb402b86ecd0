"""Ends a rank together with the processes that started it, and reports the signal that killed a watched rank.

``mpiexec`` kills all ranks of a job as soon as it notices that one of them has ended, with the same signal that may
have killed the first. Afterwards nobody can tell how many ranks were lost. A watched rank therefore is a child of the
process that ``mpiexec`` started. That parent reports the rank's end to the launching process first, and only then ends
itself, which ``mpiexec`` notices.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path

from dpsim.launch.rank_channel import LauncherConnection
from dpsim.launch.teardown import end_with_parent, unlink_shared_files

_REPORT_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The process that started this one: its name and process id for a message, and a handle (pidfd) to wait for."""

    text: str
    handle: int


def parent() -> Parent:
    """The parent of this process. Must be called at once: a process whose parent ends gets another one."""
    pid = os.getppid()
    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return Parent(text=f"{name} (process {pid} on {socket.gethostname()})", handle=os.pidfd_open(pid))


def end_with_launcher(launcher: LauncherConnection, starter: Parent) -> None:
    """From now on, end this process when the launching process hangs up or the process that started this one ends.

    The end of the latter is reported to the launching process, because ``mpiexec`` may not notice it.
    """

    def wait() -> None:
        if not launcher.wait_for_end(starter.handle):
            with contextlib.suppress(OSError):
                launcher.send("orphaned", starter.text)
                launcher.wait_for_end(timeout_s=_REPORT_S)
        unlink_shared_files()
        os._exit(1)

    threading.Thread(target=wait, name="end with the launcher", daemon=True).start()


def watch(launcher: LauncherConnection) -> None:
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
        launcher.send_killed(-code)
    os._exit(code & 0xFF)
