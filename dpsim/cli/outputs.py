"""Refuses an output path before the work, not after it: what cannot be written to, and what would be lost."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path

from dpsim.errors import ConfigError

_PAGES = ("index.html", "report.md")
_HEADS = {".png": (b"\x89PNG",), ".svg": (b"<",)}
_JSON_HEADS = (b"{", b"[")


def writable(
    path: Path | None, *, folder: bool = False, flag: str = "--output", inputs: Iterable[Path | None] = ()
) -> None:
    """Raises ``ConfigError`` for a path that cannot be written to, and for one whose content would be lost.

    A file is only written over one of its kind (by its name PNG, SVG, else JSON) that is none of ``inputs``; a report
    only over a report. A device or pipe is written into. ``path`` None is none given.
    """
    if path is None:
        return
    try:
        reason = _folder_refused(path) if folder else _file_refused(path, inputs)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        what = "a folder" if folder else "a file"
        raise ConfigError(
            f"cannot write {flag} {path}: {reason}",
            allowed=f"{what} in a place that you may write to",
            remedy=f"choose another one with {flag}",
        )


def _file_refused(path: Path, inputs: Iterable[Path | None]) -> str:
    """Why a file cannot be written to ``path``; empty where it can."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "" if os.access(path, os.W_OK) else "it cannot be written to"
    if any(given is not None and given.exists() and path.exists() and path.samefile(given) for given in inputs):
        return "it is read by this command"
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(16).lstrip()
        if head and (b"\0" in head or not head.startswith(_HEADS.get(path.suffix.lower(), _JSON_HEADS))):
            return "it exists, and is of another kind than what would be written"
    return _place_refused(path.resolve().parent)


def _folder_refused(path: Path) -> str:
    """Why a report cannot be written into the folder ``path``; empty where it can."""
    if path.exists() and not path.is_dir():
        return "it is not a folder"
    for page in (path / name for name in _PAGES):
        if page.exists() and b"dpsim" not in page.read_bytes():
            return f"its {page.name} is no report of dpsim"
    return _place_refused(path)


def _place_refused(folder: Path) -> str:
    """Why nothing can be made in ``folder``, or in the nearest one above it that exists; empty where it can."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    tempfile.TemporaryFile(dir=folder).close()
    return ""
