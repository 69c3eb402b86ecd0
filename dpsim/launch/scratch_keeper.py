"""Removes a temporary folder, and ends the processes started for it, when the process that made the folder has ended.

A process that is killed cannot clean up after itself. ``python -I -S scratch_keeper.py FOLDER`` therefore waits for the
end of its standard input, whose other end the folder's maker holds. It uses only the standard library, to start fast.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable

VARIABLE = "DPSIM_FOLDER"
"""Holds the folder in the environment of every process that is started for it, so that all can be identified."""

_SHARED_FOLDER = "/dev/shm"
_MPICH_FILE = re.compile(rf"{_SHARED_FOLDER}/mpich_sh\w+$", re.MULTILINE)
_TOPOLOGY_FOLDER = "/tmp"
"""Hydra ignores TMPDIR for this file."""
_TOPOLOGY_FILE = re.compile(r"/hydra_hwloc_xmlfile_\w{6}$")
_END_S, _POLL_S = 5.0, 0.02


def end(folder: str) -> None:
    """End every process on this machine that was started for ``folder``, and remove the folder.

    Also removes its folder in /dev/shm, its link, and mpich's files there and hydra's files that no process has open.
    """
    end_processes(folder)
    for path in unused_shared_files() | abandoned_topologies() | {link(folder)}:
        with contextlib.suppress(OSError):
            os.unlink(path)
    for path in (shared_folder(folder), folder):
        shutil.rmtree(path, ignore_errors=True)
    for pid in _processes():
        if pid != os.getpid():
            _kill(pid, folder, _keeps)  # it has nothing left to do, and may be stopped


def shared_folder(folder: str) -> str:
    """The folder in shared memory that belongs to a temporary folder."""
    return f"{_SHARED_FOLDER}/{os.path.basename(folder)}"


def link(folder: str) -> str:
    """The short path that a temporary folder may have beside its own."""
    return f"/tmp/{os.path.basename(folder)}.link"


def end_processes(folder: str) -> None:
    """Kill every process on this machine that was started for ``folder`` or a subfolder; remove their shared files."""
    deadline_s, files = time.monotonic() + _END_S, set[str]()
    while (processes := started_for(folder)) and time.monotonic() < deadline_s:
        for process in processes:
            files |= shared_files(process)
            _kill(process, folder, _was_started_for)
        time.sleep(_POLL_S)
    for path in files:
        with contextlib.suppress(OSError):
            os.unlink(path)


def started_for(folder: str) -> list[int]:
    """The running processes, except this one, that were started for ``folder`` or a subfolder."""
    return [pid for pid in _processes() if pid != os.getpid() and _was_started_for(pid, folder)]


def shared_files(process: int | str = "self") -> set[str]:
    """The files in /dev/shm through which a process shares memory with the other ranks of an mpich job.

    Once all ranks have opened them, their names are no longer needed. Only a rank that ends normally removes its own,
    so a killed job would leave some MB behind.
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


def _keeps(pid: int, folder: str) -> bool:
    """Whether a process is the keeper of a folder."""
    try:
        with open(f"/proc/{pid}/cmdline", "rb") as command:
            return command.read().endswith(f"\0{__file__}\0{folder}\0".encode())
    except OSError:
        return False


def _kill(pid: int, folder: str, condition: Callable[[int, str], bool]) -> None:
    """Kill a process if it fulfils the condition, also where its id has gone to another process meanwhile."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if condition(pid, folder):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def unused_shared_files() -> set[str]:
    """This user's mpich files that no process has open: a rank was killed before the others opened its file."""
    left = _own_files(_SHARED_FOLDER, _MPICH_FILE)
    for pid in _processes() if left else ():
        left -= _open_files(
            pid
        )  # first the open files, then the mapped ones: mpich opens a file, maps it and closes it
        left -= shared_files(pid)
    return left


def abandoned_topologies() -> set[str]:
    """This user's files with hydra's description of the machine that no process has open.

    Each of hydra's proxies keeps its file open and removes it when it ends, but not when it is killed.
    """
    left = _own_files(_TOPOLOGY_FOLDER, _TOPOLOGY_FILE)
    for pid in _processes() if left else ():
        left -= _open_files(pid)
    return left


def _own_files(folder: str, pattern: re.Pattern[str]) -> set[str]:
    """This user's files in a folder whose paths match. Others remove theirs meanwhile."""
    paths = set()
    for entry in entries(folder):
        with contextlib.suppress(OSError):
            if pattern.search(entry.path) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                paths.add(entry.path)
    return paths


def _open_files(pid: int) -> set[str]:
    paths = set()
    for descriptor in entries(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            paths.add(os.readlink(descriptor.path))
    return paths


def entries(folder: str) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as found:
        return list(found)
    return []


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(folder)


if __name__ == "__main__":
    main(sys.argv[1])
