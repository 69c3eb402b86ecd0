"""A parent process for each rank, which tells the launching process how the rank ended.

``mpiexec`` ends all ranks of a job as soon as it notices that one of them is gone, and does so by the same signal that
may have killed the first: afterwards nobody can tell how many died by themselves. A watched rank is a child of the
process that ``mpiexec`` started, which keeps the rank's end from it until the launching process has heard of it.
"""

from __future__ import annotations

import os
import signal
from typing import TYPE_CHECKING

from dpsim.comm.ending import end_with_parent

if TYPE_CHECKING:
    from dpsim.comm.channel import Line


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
