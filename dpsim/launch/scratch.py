"""Temporary folders that are removed afterwards, even if the process that made them is killed."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from dpsim.errors import ConfigError
from dpsim.folder_lock import lock
from dpsim.launch import child_process, scratch_keeper

_LONGEST_FOLDER = 64
"""A socket's path may have 107 characters; those of PyTorch's data loaders add 32 to that of the folder."""
_NAME = re.compile(r"dpsim-[a-z]+-\w{8}\.scratch")
_PLAIN = re.compile(r"[\w./+-]+", re.ASCII)
"""What any shell and any launcher takes for one word."""


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """Make a new folder. Afterwards it is removed, and every process that has ``environment(folder)`` is ended.

    If this process is killed, the keeper (``dpsim.launch.scratch_keeper``) does both. If the keeper is killed too, the
    next process that makes a scratch folder does. Raises ``ConfigError`` if no temporary folder can be made.
    """
    with contextlib.ExitStack() as stack:
        try:
            _clear_abandoned()
            folder = _locked_folder(stack, purpose)
        except OSError as error:
            raise ConfigError(
                f"cannot make a temporary folder: {error.strerror or error}",
                allowed="a folder for temporary files that is writable and has free space",
                remedy="name one: TMPDIR=FOLDER dpsim ...",
            ) from error
        keeper = subprocess.Popen(
            [sys.executable, "-I", "-S", scratch_keeper.__file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        try:
            yield folder
        finally:
            with child_process.signals_ignored():
                scratch_keeper.end(str(folder))
                keeper.communicate()


def shared_folder(folder: Path) -> Path | None:
    """Make a folder in shared memory that is removed together with ``folder``; None where there is no shared memory."""
    shared = Path(scratch_keeper.shared_folder(str(folder)))
    try:
        shared.mkdir(mode=0o700)
    except OSError:
        return None
    return shared


def short_path(folder: Path, inside: Path) -> Path:
    """Return a path of the folder ``inside`` a scratch folder that leaves room for the paths of sockets in it.

    It is a link, which is removed together with ``folder``, where the folder's own path is too long or not plain. A
    scratch folder has one link: the first ``inside`` gets it.
    """
    if len(os.fsencode(inside)) <= _LONGEST_FOLDER and _PLAIN.fullmatch(str(inside)):
        return inside
    link = Path(scratch_keeper.link(str(folder)))
    with contextlib.suppress(OSError):  # this folder may have its link already
        link.symlink_to(inside)
    return link if os.path.realpath(link) == os.path.realpath(inside) else inside


def environment(folder: Path) -> dict[str, str]:
    """Return the environment variable that marks a process as started for ``folder``."""
    return {scratch_keeper.VARIABLE: str(folder)}


def _locked_folder(stack: contextlib.ExitStack, purpose: str) -> Path:
    """Make a folder, locked while ``stack`` is open; the lock shows that it is in use. Raises ``OSError``."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"dpsim-{purpose}-", suffix=".scratch")).resolve()
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            if lock(handle) and folder.exists():  # otherwise another process has just removed it as abandoned
                return folder


def _clear_abandoned() -> None:
    """Remove this user's scratch folders that no process has locked, and end the processes started for them."""
    for entry in scratch_keeper.entries(tempfile.gettempdir()):
        if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
            # OSError: it is gone, another user's, or locked; or this file system has no locks
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
            stack.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.fstat(handle).st_uid == os.getuid():
                scratch_keeper.end(os.path.realpath(entry.path))
