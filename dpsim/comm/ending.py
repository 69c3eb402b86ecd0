"""Ends a job for good: whatever state it is in, no process and no file of it is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.comm.rank_output import Seen

if TYPE_CHECKING:
    import psutil

_GRACE_S = 2.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_MPICH_FILE = re.compile(r"/dev/shm/mpich_sh\w+$", re.MULTILINE)


def stop(process: subprocess.Popen[bytes], job_name: str, seen: Seen) -> None:
    """End ``mpiexec`` and every rank on this machine that is still there, and remove their shared memory.

    Takes a few seconds at most, in which a further Ctrl-C is not heeded.
    """
    with _undisturbed():
        family = _descendants(process)
        files = {path for member in family for path in shared_files(member.pid)}
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        if process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        _kill(family)
        for host, pid in seen.pids.values():
            with contextlib.suppress(OSError):
                if host == socket.gethostname() and job_name.encode() in Path(f"/proc/{pid}/cmdline").read_bytes():
                    os.kill(pid, signal.SIGKILL)
        for path in files:
            with contextlib.suppress(OSError):
                os.unlink(path)


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """For a child to call first: the kernel then sends it this signal when its parent ends. None where none does so."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1
    return lambda: libc.prctl(set_parent_death_signal, number) and None


def shared_files(process: int | str = "self") -> set[str]:
    """The files in /dev/shm by which a process shares memory with the other ranks of an mpich job.

    Only their names are of use to nobody once all ranks have them open, and only a rank that ends in order removes
    its own: a killed job would leave some MB behind.
    """
    try:
        maps = Path(f"/proc/{process}/maps").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    return set(_MPICH_FILE.findall(maps))


def forget_shared_files() -> None:
    """Remove the names of this rank's shared memory, which lives on until the last rank has ended.

    To be called when every rank of this node has started MPI.
    """
    for path in shared_files():
        with contextlib.suppress(OSError):
            os.unlink(path)


def _descendants(process: subprocess.Popen[bytes]) -> list[psutil.Process]:
    import psutil

    if process.poll() is not None:
        return []
    try:
        return list(psutil.Process(process.pid).children(recursive=True))
    except psutil.Error:
        return []


def _kill(family: list[psutil.Process]) -> None:
    """Kill those that are still there. A process id that is another process's by now is recognised."""
    import psutil

    for member in family:
        with contextlib.suppress(psutil.Error):
            member.kill()


@contextlib.contextmanager
def _undisturbed() -> Iterator[None]:
    """No Ctrl-C and no request to end is heeded meanwhile. Only the main thread can see to that."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) or signal.SIG_DFL for number in _ENDINGS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
