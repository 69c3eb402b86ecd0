"""Temporary folders that are gone afterwards, whatever becomes of the process that made them."""

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
from dpsim.launch import scratch_keeper, teardown

_NAME = re.compile(r"dpsim-[a-z]+-\w{8}\.scratch")


@contextlib.contextmanager
def scratch(purpose: str) -> Iterator[Path]:
    """A new folder that is removed afterwards, and every process with ``environment(folder)`` ended.

    A keeper (``dpsim.launch.scratch_keeper``) does both when this process is killed; should that be killed
    too, the next scratch folder's maker does. Raises ``ConfigError`` where no temporary folder can be written to.
    """
    with contextlib.ExitStack() as stack:
        try:
            _clear_abandoned()
            folder = _locked_folder(stack, purpose)
        except OSError as error:
            raise ConfigError(
                f"cannot make a temporary folder: {error.strerror or error}",
                allowed="a folder for temporary files that you may write to, with space in it",
                remedy="name one: TMPDIR=FOLDER dpsim ...",
            ) from error
        watching = subprocess.Popen(
            [sys.executable, "-I", "-S", scratch_keeper.__file__, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
        )
        stack.callback(_end, folder, watching)
        yield folder


def _end(folder: Path, watching: subprocess.Popen[bytes]) -> None:
    with teardown.undisturbed():
        scratch_keeper.end(str(folder))
        watching.communicate()  # closes its standard input, at whose end it goes


def environment(folder: Path) -> dict[str, str]:
    """What marks a process as started for ``folder``."""
    return {scratch_keeper.VARIABLE: str(folder)}


def _locked_folder(stack: contextlib.ExitStack, purpose: str) -> Path:
    """A new folder, locked as long as ``stack`` is open: it is not abandoned. Raises ``OSError``."""
    while True:
        folder = Path(tempfile.mkdtemp(prefix=f"dpsim-{purpose}-", suffix=".scratch")).resolve()
        with contextlib.suppress(FileNotFoundError):
            handle = os.open(folder, os.O_RDONLY)
            stack.callback(os.close, handle)
            if lock(handle) and folder.exists():  # else another process has just taken it for an abandoned one
                return folder


def _clear_abandoned() -> None:
    """Remove this user's scratch folders that no process holds, and end what was started for them."""
    for entry in os.scandir(tempfile.gettempdir()):
        if not _NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        with contextlib.suppress(OSError):  # it has gone, is another user's, is held, or there are no locks here
            handle = os.open(entry.path, os.O_RDONLY | os.O_NOFOLLOW)
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if os.fstat(handle).st_uid == os.getuid():
                    scratch_keeper.end(os.path.realpath(entry.path))
            finally:
                os.close(handle)
