"""Ends what was started for a temporary folder and removes the folder, when the process that made it is gone.

``python -I -S scratch_keeper.py FOLDER`` waits for the end of its standard input, whose other end the maker of
the folder holds: a process that is killed cannot clean up after itself. It uses the standard library alone, so that
it starts at once.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time

VARIABLE = "DPSIM_FOLDER"
"""In the environment of every process that is started for a folder: the folder. So all of them can be found."""

_SHARED_FOLDER = "/dev/shm"
_MPICH_FILE = re.compile(rf"{_SHARED_FOLDER}/mpich_sh\w+$", re.MULTILINE)
_TOPOLOGY_FOLDER = "/tmp"
"""Hydra heeds no TMPDIR here."""
_TOPOLOGY_FILE = re.compile(r"hydra_hwloc_xmlfile_\w{6}")
_GONE_WITHIN_S, _LOOK_S = 5.0, 0.02


def end(folder: str) -> None:
    """End every process of this machine that was started for ``folder``, and remove it.

    Of mpich's files in /dev/shm and its descriptions of this machine those go, too, which no process has open.
    """
    end_processes(folder)
    for path in unused_shared_files() | abandoned_topologies():
        with contextlib.suppress(OSError):
            os.unlink(path)
    shutil.rmtree(folder, ignore_errors=True)


def end_processes(folder: str) -> None:
    """Kill every process of this machine that was started for ``folder`` or one in it, and remove its shared files."""
    until, files = time.monotonic() + _GONE_WITHIN_S, set[str]()
    while (found := started_for(folder)) and time.monotonic() < until:
        for process in found:
            files |= shared_files(process)
            _kill(process, folder)
        time.sleep(_LOOK_S)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def started_for(folder: str) -> list[int]:
    """The processes that were started for ``folder`` or one in it, without this one and those that have ended."""
    return [pid for pid in _processes() if pid != os.getpid() and _was_started_for(pid, folder)]


def shared_files(process: int | str = "self") -> set[str]:
    """The files in /dev/shm by which a process shares memory with the other ranks of an mpich job.

    Only their names are of use to nobody once all ranks have them open, and only a rank that ends in order removes
    its own: a killed job would leave some MB behind.
    """
    try:
        with open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
            return set(_MPICH_FILE.findall(maps.read()))
    except OSError:
        return set()


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal()]


def _was_started_for(pid: int, folder: str) -> bool:
    try:
        with open(f"/proc/{pid}/environ", "rb") as environment:
            variables = environment.read().split(b"\0")
    except OSError:  # it has ended, or is another user's
        return False
    mark = f"{VARIABLE}={folder}".encode()
    return any(variable == mark or variable.startswith(mark + b"/") for variable in variables)


def _kill(pid: int, folder: str) -> None:
    """Kill a process, unless its number is another one's by now."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if _was_started_for(pid, folder):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def unused_shared_files() -> set[str]:
    """mpich's files of this user that no process has open: of a rank that was killed before the others came."""
    try:
        own = {entry.path for entry in os.scandir(_SHARED_FOLDER) if entry.stat().st_uid == os.getuid()}
    except OSError:
        return set()
    left = {path for path in own if _MPICH_FILE.fullmatch(path)}
    for pid in _processes() if left else ():
        left -= _open_files(pid)  # in this order: a file is opened, then mapped, then closed
        left -= shared_files(pid)
    return left


def abandoned_topologies() -> set[str]:
    """Files of this user with which hydra's proxies describe the machine to their ranks, and that no process has open.

    A proxy has its own open from first to last and removes it when it ends, but not when it is killed.
    """
    left = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(_TOPOLOGY_FOLDER):
            if _TOPOLOGY_FILE.fullmatch(entry.name) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                left.add(entry.path)
    for pid in _processes() if left else ():
        left -= _open_files(pid)
    return left


def _open_files(pid: int) -> set[str]:
    found = set()
    with contextlib.suppress(OSError):
        for handle in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                found.add(os.readlink(handle.path))
    return found


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(folder)


if __name__ == "__main__":
    main(sys.argv[1])
