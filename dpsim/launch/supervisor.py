"""Who watches whom: a rank its launcher and ``mpiexec``, a parent process of its own the rank.

``mpiexec`` ends all ranks of a job as soon as it notices that one of them is gone, and does so by the same signal that
may have killed the first: afterwards nobody can tell how many died by themselves. A watched rank is a child of the
process that ``mpiexec`` started, which keeps the rank's end from it until the launching process has heard of it.
A rank ends with the launching process, and when the process of ``mpiexec`` that started it does.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.launch.teardown import end_with_parent, forget_shared_files

if TYPE_CHECKING:
    from dpsim.launch.rank_channel import Line

_LAST_WORDS_S = 10.0


@dataclass(frozen=True, kw_only=True)
class Parent:
    """The process that started this one: its name and number for a message, and a handle (pidfd) that tells its end."""

    text: str
    handle: int


def parent() -> Parent:
    """The parent of this process. To be called first, before there is another one."""
    pid = os.getppid()
    name = Path(f"/proc/{pid}/comm").read_text(encoding="utf-8", errors="replace").strip()
    return Parent(text=f"{name} (process {pid} on {socket.gethostname()})", handle=os.pidfd_open(pid))


def end_with_launcher(line: Line, started_by: Parent) -> None:
    """From now on this process ends when the launching process hangs up, and when the process that started it ends.

    The latter it tells the launching process, for ``mpiexec`` may not notice.
    """

    def wait() -> None:
        if not line.wait_for_end(started_by.handle):
            with contextlib.suppress(OSError):
                line.send("deserted", started_by.text)
                line.wait_for_end(timeout_s=_LAST_WORDS_S)
        forget_shared_files()
        os._exit(1)

    threading.Thread(target=wait, name="end with the launcher", daemon=True).start()


def watch(line: Line) -> None:
    """Split this process into the rank, in which alone this returns, and its parent.

    To be called before there are threads, and before MPI is started. Does nothing where a rank would outlive its
    parent: only Linux promises that it does not.
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
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    code = os.waitstatus_to_exitcode(os.waitpid(rank, 0)[1])
    if code < 0:
        line.killed(-code)
    os._exit(code & 0xFF)
