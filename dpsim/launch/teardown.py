"""Ends a job so that no process and no file of it is left behind, whatever state it is in."""

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
_TERMINATING_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def stop(process: subprocess.Popen[bytes], folder: Path) -> None:
    """End ``process`` (for instance ``mpiexec``) and every process on this machine that was started for ``folder``.

    Takes a few seconds at most; Ctrl-C is ignored meanwhile.
    """
    with signals_ignored():
        if process.poll() is None:
            process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
        scratch_keeper.end_processes(str(folder))
        if process.poll() is None:
            process.kill()
        process.wait()


def end_with_parent(number: signal.Signals) -> Callable[[], None] | None:
    """A function that a child calls first, so that the kernel sends it this signal when its parent ends.

    None on systems other than Linux, whose kernels do not offer this.
    """
    if not sys.platform.startswith("linux"):
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    set_parent_death_signal = 1
    return lambda: libc.prctl(set_parent_death_signal, number) and None


def unlink_shared_files() -> None:
    """Remove the names of this rank's shared memory; the memory itself lives on until the last rank has ended.

    To be called after every rank of this node has started MPI.
    """
    for path in scratch_keeper.shared_files():
        with contextlib.suppress(OSError):
            os.unlink(path)


@contextlib.contextmanager
def signals_ignored() -> Iterator[None]:
    """Ignore SIGINT, SIGTERM and SIGHUP while the context is open. Only works in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, signal.SIG_IGN) or signal.SIG_DFL for number in _TERMINATING_SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
