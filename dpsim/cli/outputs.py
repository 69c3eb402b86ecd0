"""Checks output paths before the work instead of after it: whether they are writable, and what would be overwritten."""

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
    """Raises ``ConfigError`` for a path that is not writable, and for one whose content would be lost.

    A file may only replace a file of its kind (PNG or SVG by its name, otherwise JSON) that is not one of ``inputs``,
    and a report only a report. Devices and pipes are allowed. None, for a flag that was left out, is allowed.
    """
    if path is None:
        return
    try:
        reason = _folder_refused(path) if folder else _file_refused(path, inputs)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        kind = "a folder" if folder else "a file"
        raise ConfigError(
            f"cannot write {flag} {path}: {reason}",
            allowed=f"{kind} that you may write to",
            remedy=f"choose another one with {flag}",
        )


def _file_refused(path: Path, inputs: Iterable[Path | None]) -> str:
    """Why ``path`` cannot be written as a file; empty if it can."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "" if os.access(path, os.W_OK) else "it is not writable"
    if any(file is not None and file.exists() and path.exists() and path.samefile(file) for file in inputs):
        return "this command reads it"
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(16).lstrip()
        text = path.suffix.lower() != ".png"  # a PNG file holds zeros, a text none
        if head and ((text and b"\0" in head) or not head.startswith(_HEADS.get(path.suffix.lower(), _JSON_HEADS))):
            return "it exists, and is a file of another kind"
    return _place_refused(path.resolve().parent)


def _folder_refused(path: Path) -> str:
    """Why a report cannot be written into the folder ``path``; empty if it can."""
    if path.exists() and not path.is_dir():
        return "it is not a folder"
    for page in (path / name for name in _PAGES):
        if page.exists() and b"dpsim" not in page.read_bytes():
            return f"its {page.name} is not a report of dpsim"
    return _place_refused(path)


def _place_refused(folder: Path) -> str:
    """Why files cannot be made in ``folder``, or in its nearest parent that exists; empty if they can."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    tempfile.TemporaryFile(dir=folder).close()
    return ""
