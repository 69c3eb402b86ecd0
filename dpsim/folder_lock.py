"""Keeps two runs from writing into one folder. The kernel lets go of a folder when the process that holds it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dpsim.errors import ConfigError


def lock(handle: int) -> bool:
    """Hold an open folder until the handle is closed; whether nobody else holds it.

    True, too, on a file system without locks: runs there go on without this protection.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


@contextlib.contextmanager
def locked(folder: Path | None) -> Iterator[None]:
    """Hold ``folder``, which is made if need be, for one command. Raises ``ConfigError`` where another one holds it.

    Where there is None, nothing is held.
    """
    if folder is None:
        yield
        return
    try:
        folder.mkdir(parents=True, exist_ok=True)
        handle = os.open(folder, os.O_RDONLY)
    except OSError as error:
        raise ConfigError(
            f"cannot write into {folder}: {error.strerror or error}",
            allowed="a folder that you may write to",
            remedy="choose another one with --output",
        ) from error
    try:
        if not lock(handle):
            raise ConfigError(
                f"another command is writing into {folder}",
                allowed="a folder for each command",
                remedy="choose another one with --output, or wait for that command's end",
            )
        yield
    finally:
        os.close(handle)
