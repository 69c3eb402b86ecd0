"""Starts commands that run a user's script, so that no file of the user's changes (``protected_process``)."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import NamedTuple

from dpsim.errors import ConfigError
from dpsim.launch import protected_process
from dpsim.launch.rank_process import WITHOUT_TERMINAL_SIGNALS

MODES = ("namespace", "landlock")
"""What keeps a script from the files, the better first."""

_TEMPORARY = ("/dev", "/dev/shm", "/proc", "/tmp", "/var/tmp")
_KERNEL_FOLDERS = ("/dev", "/proc", "/sys")
_CACHES = (
    "XDG_CACHE_HOME",
    "TORCH_HOME",
    "HF_HOME",
    "TORCHINDUCTOR_CACHE_DIR",
    "TRITON_CACHE_DIR",
    "NUMBA_CACHE_DIR",
    "DPSIM_CACHE_DIR",
)
"""Environment variables that name folders of caches, which go on being written as ~/.cache does."""


class Protection(NamedTuple):
    """The folders in which a script sees what it writes, and nobody else does; and more that are written as ever.

    Apart from them it can write in temporary folders and in caches, and nowhere else.
    """

    discarded: tuple[str, ...]
    writable: tuple[str, ...] = ()


def script_protection(script: str, arguments: Sequence[str], *writable: str) -> Protection:
    """Protect a script's folder, the working directory, the home and the folders that ``arguments`` name.

    Of a path that does not exist this is the nearest folder above it that does. ``script`` may be empty. ``writable``
    are folders that the script's processes may change.
    """
    named = [word for argument in arguments for word in (argument, argument.partition("=")[2]) if word]
    files = [Path(script), Path(script).resolve()] if script else []
    folders = [_home(), Path.cwd(), *(file.parent for file in files), *map(_existing_folder, named)]
    return Protection(tuple(path for path in _resolved(folders) if not path.startswith(_KERNEL_FOLDERS)), writable)


def protected(command: Sequence[str], protection: Protection, folder: Path) -> list[str]:
    """Return the command that runs ``command`` under ``protection``. It can write its scratch folder, ``folder``.

    Raises ``ConfigError``.
    """
    allowed = mode(MODES)
    if allowed is None:
        raise ConfigError(
            "nothing on this system keeps the script from changing your files",
            allowed="Linux 5.13 or newer that allows user namespaces or Landlock",
            remedy="let it change files: --script-may-write (start it where a copy of them is, if it overwrites some)",
        )
    memory = folder / "discarded"
    memory.mkdir()
    caches = [_home() / ".cache", *(Path(os.environ[name]) for name in _CACHES if os.environ.get(name))]
    writable = [*map(Path, _TEMPORARY), Path(tempfile.gettempdir()), *caches, *map(Path, protection.writable), folder]
    return [
        *WITHOUT_TERMINAL_SIGNALS,
        *_command(allowed, protection.discarded, _resolved(writable), str(memory), command),
    ]


def _command(
    mode: str, discarded: Sequence[str], writable: Sequence[str], memory: str, command: Sequence[str]
) -> list[str]:
    folders = json.dumps({"discarded": discarded, "writable": writable, "memory": memory})
    return [sys.executable, "-I", "-S", protected_process.__file__, mode, folders, *command]


def _resolved(folders: Iterable[Path]) -> tuple[str, ...]:
    """Return the real paths of those folders that exist, but for the root of the file system."""
    paths = {os.path.realpath(folder) for folder in folders if os.path.isdir(folder)}
    return tuple(sorted(paths - {"/"}))


def _home() -> Path:
    return Path(os.path.expanduser("~"))


def _existing_folder(path: str) -> Path:
    """Return the nearest folder at or above a path. Words that are no path give the working directory."""
    absolute = Path(path).absolute()
    return next((folder for folder in (absolute, *absolute.parents) if os.path.isdir(folder)), Path("/"))


@functools.cache
def mode(modes: tuple[str, ...]) -> str | None:
    """Return the first mode that the kernel allows this user; None without one."""
    for each in modes:
        command = _command(each, (), (), "", ("true",))
        if subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, check=False).returncode == 0:
            return each
    return None
