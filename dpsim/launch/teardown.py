"""Ends a job for good: whatever state it is in, no process and no file of it is left behind."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

from dpsim.launch import scratch_keeper

_GRACE_S = 2.0
_ENDINGS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End ``process``, an ``mpiexec`` perhaps, and everything on this machine that was started for ``folder``.

    Takes a few seconds at most, in which a further Ctrl-C is not heeded.
    """
    with undisturbed():
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        scratch_keeper.end_processes(str(folder))
        if process.poll() is None:
            process.kill()
        process.wait()


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """For a child to call first: the kernel then sends it this signal when its parent ends. None where none does so."""
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1
    return lambda: libc.prctl(set_parent_death_signal, number) and None


def forget_shared_files() -> None:
    """Remove the names of this rank's shared memory, which lives on until the last rank has ended.

    To be called when every rank of this node has started MPI.
    """
    for path in scratch_keeper.shared_files():
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
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
