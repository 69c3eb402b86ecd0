"""Finds and reads the files of data sets, and says plainly what is wrong with them."""

from __future__ import annotations

import contextlib
import gzip
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import BinaryIO, cast

from dpsim.errors import ConfigError, FileFormatError

_CHUNK = 1 << 20
_BROKEN = (EOFError, zlib.error, zipfile.BadZipFile, gzip.BadGzipFile)


def path_of(text: str) -> Path:
    """Return the path a token names; ``~`` is the home folder, a relative path starts at the current folder."""
    if not text or "\0" in text:
        raise ConfigError(f"{text!r} is no path", allowed="the path of a file or folder")
    try:
        return Path(text).expanduser()
    except RuntimeError as error:
        raise ConfigError(f"{text}: {error}", remedy="write the path in full, without ~") from error


@contextlib.contextmanager
def reading(path: Path, kind: str) -> Iterator[None]:
    """Raise ``FileFormatError`` for a file that cannot be read or is damaged as a ``kind`` (a gzip file, ...)."""
    try:
        yield
    except _BROKEN as error:
        raise FileFormatError(
            f"{path} is damaged: {error or type(error).__name__}", allowed=f"a whole {kind}", remedy="get it again"
        ) from error
    except OSError as error:
        raise FileFormatError(
            f"cannot read {path}: {error.strerror or error}", allowed=f"a {kind} that you may read"
        ) from error


def check_file(path: Path, kind: str) -> None:
    """Raise ``FileFormatError`` unless ``path`` is an ordinary file."""
    with reading(path, kind):
        if path.is_file():
            return
        what = "is a folder" if path.is_dir() else "is no ordinary file" if path.exists() else "does not exist"
    raise FileFormatError(f"{path} {what}", allowed=f"the path of a {kind}")


def check_folder(path: Path, files: str, remedy: str) -> None:
    """Raise ``FileFormatError`` unless ``path`` is a folder."""
    with reading(path, "folder"):
        if path.is_dir():
            return
        is_file = path.exists()
    if is_file:
        raise FileFormatError(
            f"{path} is a file", allowed=f"a folder with {files}", remedy="unpack an archive and give its folder"
        )
    raise FileFormatError(f"there is no folder {path}", allowed=f"a folder with {files}", remedy=remedy)


def find(folder: Path, spellings: Sequence[str]) -> Path | None:
    """Return the first of ``spellings`` that ``folder`` has."""
    with reading(folder, "folder"):
        return next((folder / name for name in spellings if (folder / name).exists()), None)


def open_plain_or_gzip(path: Path) -> BinaryIO:
    """Open ``path`` to be read, through gzip if its name ends in .gz."""
    return cast(BinaryIO, gzip.open(path)) if path.suffix == ".gz" else path.open("rb")


def read_at_most(file: BinaryIO, count: int) -> bytes:
    """Return the next ``count`` bytes, or what is left; asks for no more memory than there is data."""
    parts, missing = [], count
    while missing and (part := file.read(min(missing, _CHUNK))):
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)
