"""Keeps two runs from writing into one folder. The kernel releases a lock when the process that holds it ends."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from dpsim.errors import ConfigError


def lock(handle: int) -> bool:
    """Lock an open folder until the handle is closed; False if another process has locked it.

    True, too, on a file system without locks, where runs are not protected.
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
    """Lock ``folder``, which is made if it does not exist. Raises ``ConfigError`` where another command has locked it.

    ``None``: nothing is locked.
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
