"""A command that is attacked, in folders of its own: whatever happens, it leaves nothing and changes no user's file."""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import time
from collections.abc import Collection, Mapping
from pathlib import Path

import psutil

from dpsim.experiments.command import ROOT
from dpsim.launch import scratch, scratch_keeper

NOTES = ("notes.txt", "data/best.pt", "reports/index.html")
"""Files that no command has to do with, though dpsim writes some of these names elsewhere."""
GONE_WITHIN_S = 10.0
_SHARED = "/dev/shm"
_NEW_S = 1.0
"""Processes of other runs may have begun so long before this one's end, and then made their namespaces."""
_OF_PYTORCH = "torchinductor_"
"""PyTorch's folder of compiled code, which it keeps."""


class Run:
    """A command of ``python -m`` below the new folder ``marked``, by which its processes are told from others.

    It works in ``folder``, where it finds the user's ``NOTES``.
    """

    process: subprocess.Popen[bytes]

    def __init__(self, marked: Path) -> None:
        self.marked, self.folder, self.temporary = marked, marked / "w", marked / "t"
        for each in (self.marked, self.folder, self.temporary):
            each.mkdir()
        add_notes(self.folder)
        self._before = {*os.listdir(_SHARED), *scratch_keeper.abandoned_files()}
        own = {"PYTHONPATH": str(ROOT), "TMPDIR": str(self.temporary)} | scratch.environment(marked)
        self.environment = {**os.environ, **own}
        self._files: dict[str, str] | None = None
        self.namespaces: set[str] = set()
        """The network namespaces of their own that its processes were seen in."""

    def start(self, words: Collection[str]) -> None:
        """Start a command. All that is in the folder at the first start belongs to the user."""
        self._files = contents(self.folder) if self._files is None else self._files
        with (self.marked / "output.txt").open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-m", *words],
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env=self.environment,
                start_new_session=True,
            )

    def text(self) -> str:
        """Return all that the command has printed."""
        return (self.marked / "output.txt").read_text(encoding="utf-8", errors="replace")

    def processes(self) -> list[int]:
        """Return the processes that the command has started, and its own."""
        running = scratch_keeper.started_for(str(self.marked))
        self.namespaces |= {_namespace(pid) for pid in running} - {_namespace(os.getpid()), ""}
        return running

    def end(self) -> None:
        """Kill whatever still runs."""
        scratch_keeper.end_processes(str(self.marked))
        self.process.wait()

    def traceback(self) -> str:
        """Return the last line that was printed, if a traceback was."""
        text = self.text()
        shown = "Traceback (most recent call last)" in text
        return f"traceback: {text.strip().splitlines()[-1][:200]}" if shown else ""

    def changes(self, outputs: Collection[str] = ()) -> str:
        """Say which files of the user's were changed or removed, but for ``outputs``; empty if none."""
        return changes(self._files or {}, self.folder, outputs)

    def left(self) -> str:
        """Say what is left of the run though it should be gone, or which user's files changed; empty: nothing."""
        until, began_before_s = time.monotonic() + GONE_WITHIN_S, time.time() - _NEW_S
        while True:
            self.process.poll()
            left = [_shown(pid) for pid in self.processes()]
            left += [path.name for path in self.temporary.iterdir() if not path.name.startswith(_OF_PYTORCH)]
            left += [f"{_shown(pid)} in a network namespace" for pid in holders(self.namespaces, began_before_s)]
            left += sorted(_unused({*os.listdir(_SHARED), *scratch_keeper.abandoned_files()} - self._before))
            if not left:
                return self.changes()
            if time.monotonic() > until:
                return f"left after {GONE_WITHIN_S:.0f} s: {', '.join(left)}"
            time.sleep(0.05)


def _namespace(pid: int) -> str:
    with contextlib.suppress(OSError):
        return os.readlink(f"/proc/{pid}/ns/net")
    return ""


def holders(namespaces: Collection[str], until_s: float) -> list[int]:
    """Return the processes in one of these namespaces, or that hold one open: without any, the kernel removes it.

    Only those that began before ``until_s`` (seconds since the epoch): the kernel gives a new namespace an old number.
    """
    found = []
    for pid in psutil.pids() if namespaces else ():
        held = set[str]()
        with contextlib.suppress(psutil.Error):
            if psutil.Process(pid).create_time() < until_s:
                held.add(_namespace(pid))
        if not held:
            continue
        for descriptor in scratch_keeper.entries(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(os.readlink(descriptor.path))
        if not held.isdisjoint(namespaces):
            found.append(pid)
    return found


def _shown(pid: int) -> str:
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        return f"{process.name()} ({process.status()}, {' '.join(process.cmdline()[-3:])[:80]})"
    return "a process"


def _unused(names: set[str]) -> set[str]:
    """Return those of these files and folders that no process has open, mapped, or named in its environment."""
    for pid in psutil.pids() if names else ():
        seen = ""
        for file in ("environ", "maps"):
            with contextlib.suppress(OSError):
                seen += Path(f"/proc/{pid}/{file}").read_text(encoding="utf-8", errors="replace")
        for descriptor in scratch_keeper.entries(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                seen += os.readlink(descriptor.path)
        names = {name for name in names if name not in seen}
    return names


def add_notes(folder: Path) -> None:
    """Write the files of ``NOTES``."""
    for name in NOTES:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(f"what I wrote in {name}\n", encoding="utf-8")


def contents(folder: Path) -> dict[str, str]:
    """Return the digest of each file below a folder, by its relative path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def changes(before: Mapping[str, str], folder: Path, outputs: Collection[str] = ()) -> str:
    """Say which files of ``before`` are not what they were, but for those in ``outputs``; empty if none."""
    now = contents(folder)
    kept = {name: digest for name, digest in before.items() if not {name, name.partition("/")[0]} & {*outputs}}
    removed = sorted(name for name in kept if name not in now)
    changed = sorted(name for name, digest in kept.items() if now.get(name, digest) != digest)
    differing = (("removed", removed), ("changed", changed))
    return "; ".join(f"{what} of the user's files: {', '.join(names)}" for what, names in differing if names)
