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
from collections.abc import Callable, Iterable

VARIABLE = "DPSIM_FOLDER"
"""Holds the folder in the environment of every process that is started for it, so that all can be identified."""

SHARED_FOLDER = "/dev/shm"
_MPICH_FILE = re.compile(r"/\S*/mpich_sh\w+$", re.MULTILINE)
_HYDRA_FOLDER = "/tmp"
"""Hydra ignores TMPDIR for its file with a description of the machine."""
_HYDRA_FILE = re.compile(r"/hydra_hwloc_xmlfile_\w{6}$")
_END_S, _POLL_S = 5.0, 0.02


def end(folder: str) -> None:
    """End every process on this machine that was started for ``folder``, and remove the folder.

    Also removes its folder in /dev/shm, its link, and ``abandoned_files``.
    """
    end_processes(folder)
    unlink({*abandoned_files(), link(folder)})
    for path in (shared_folder(folder), folder):
        shutil.rmtree(path, ignore_errors=True)
    keeper = [__file__.encode(), os.fsencode(folder), b""]
    for pid in _processes():  # the keeper has nothing left to do, and may be stopped
        _kill(pid, lambda pid: _strings(pid, "cmdline")[-3:] == keeper)


def shared_folder(folder: str) -> str:
    """Return the folder in shared memory that belongs to a temporary folder."""
    return f"{SHARED_FOLDER}/{os.path.basename(folder)}"


def link(folder: str) -> str:
    """Return the short path that a temporary folder may have besides its own."""
    return f"/tmp/{os.path.basename(folder)}.link"


def end_processes(folder: str) -> None:
    """Kill every process on this machine that was started for ``folder`` or a subfolder; remove their shared files."""
    deadline_s, files = time.monotonic() + _END_S, set[str]()
    while (processes := started_for(folder)) and time.monotonic() < deadline_s:
        for process in processes:
            files |= shared_files(process)
            _kill(process, lambda pid: _was_started_for(pid, folder))
        time.sleep(_POLL_S)
    unlink(files)


def started_for(folder: str) -> list[int]:
    """Return the running processes, except this one, that were started for ``folder`` or a subfolder."""
    return [pid for pid in _processes() if _was_started_for(pid, folder)]


def shared_files(process: int | str = "self") -> set[str]:
    """Return the files in /dev/shm through which a process shares memory with the other ranks of an mpich job.

    Once all ranks have opened them, their names are no longer needed. Only a rank that ends normally removes its own,
    so a killed job would leave some MB behind.
    """
    with contextlib.suppress(OSError), open(f"/proc/{process}/maps", encoding="utf-8", errors="replace") as maps:
        return {path for path in _MPICH_FILE.findall(maps.read()) if path.startswith(f"{SHARED_FOLDER}/")}
    return set()


def unlink(paths: Iterable[str]) -> None:
    """Remove files, some of which may be gone."""
    for path in paths:
        with contextlib.suppress(OSError):
            os.unlink(path)


def abandoned_files() -> set[str]:
    """Return this user's files of mpich in shared memory, and of hydra's proxies, that no process has open.

    A rank was killed before the others opened its file, or a proxy before it removed its own.
    """
    left = set()
    for folder, pattern in ((SHARED_FOLDER, _MPICH_FILE), (_HYDRA_FOLDER, _HYDRA_FILE)):
        for entry in entries(folder):
            with contextlib.suppress(OSError):  # others remove theirs meanwhile
                if pattern.search(entry.path) and entry.stat(follow_symlinks=False).st_uid == os.getuid():
                    left.add(entry.path)
    for pid in [os.getpid(), *_processes()] if left else ():
        for descriptor in entries(f"/proc/{pid}/fd"):  # before the maps: mpich opens a file, maps it and closes it
            with contextlib.suppress(OSError):
                left.discard(os.readlink(descriptor.path))
        left -= shared_files(pid)
    return left


def entries(folder: str) -> list[os.DirEntry[str]]:
    """Return what is in a folder; nothing where it cannot be read."""
    with contextlib.suppress(OSError), os.scandir(folder) as listing:
        return list(listing)
    return []


def _processes() -> list[int]:
    return [int(name) for name in os.listdir("/proc") if name.isdecimal() and int(name) != os.getpid()]


def _strings(pid: int, file: str) -> list[bytes]:
    """Return what a file of /proc lists between zeros; nothing where the process has ended or is another user's."""
    with contextlib.suppress(OSError), open(f"/proc/{pid}/{file}", "rb") as strings:
        return strings.read().split(b"\0")
    return []


def _was_started_for(pid: int, folder: str) -> bool:
    mark = os.fsencode(f"{VARIABLE}={folder}")
    return any(variable == mark or variable.startswith(mark + b"/") for variable in _strings(pid, "environ"))


def _kill(pid: int, condition: Callable[[int], bool]) -> None:
    """Kill a process if it fulfils the condition, also where its id has gone to another process meanwhile."""
    with contextlib.suppress(OSError):
        handle = os.pidfd_open(pid)
        try:
            if condition(pid):
                signal.pidfd_send_signal(handle, signal.SIGKILL)
        finally:
            os.close(handle)


def main(folder: str) -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    sys.stdin.buffer.read()
    end(folder)


if __name__ == "__main__":
    main(sys.argv[1])
