"""Checks output paths before the work instead of after it: whether they are writable, and what would be overwritten."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.report.charts import Chart

_PAGES = ("index.html", "report.md")
_HEADS = {".png": (b"\x89PNG",), ".svg": (b"<",), ".html": (b"<!doctype html>",), ".parquet": (b"PAR1",)}
_PLOTS = (".png", ".svg")
_BINARY = (".png", ".parquet")
_JSON_HEADS = (b"{", b"[")
_HEAD_BYTES = 16


def writable(
    path: Path | None, *, folder: bool = False, flag: str = "--output", inputs: Iterable[Path | None] = ()
) -> None:
    """Raises ``ConfigError`` for a path that is not writable, and for one whose content would be lost.

    A file may only replace a file of its kind (PNG, SVG, HTML, CSV or Parquet by its name, otherwise JSON) that is not
    one of ``inputs``, and a report only a report. Devices and pipes are allowed. None, for a flag that was left out, is
    allowed.
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


def drawable(path: Path | None) -> None:
    """Raises ``ConfigError`` for a path of ``--plot`` that is not writable, or names neither a PNG nor an SVG."""
    writable(path, flag="--plot")
    if path is not None and path.suffix.lower() not in _PLOTS:
        raise ConfigError(
            f"cannot draw --plot {path}: its name ends in {path.suffix or 'no suffix'}",
            allowed=", ".join(_PLOTS),
            remedy=f"name it {path.with_suffix('.png')}",
        )


def draw_plot(path: Path, chart: Chart) -> None:
    """Draw a chart into the file of ``--plot``. Raises ``ConfigError``."""
    from dpsim.report.figures import draw, save_as

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_as(draw(chart), path)
    except OSError as error:
        raise ConfigError(
            f"cannot write --plot {path}: {error.strerror or error}", remedy="choose another file"
        ) from error


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
            head = file.read(_HEAD_BYTES).lstrip()
        kind = path.suffix.lower()
        if head and ((b"\0" in head and kind not in _BINARY) or not head.startswith(_heads(kind))):
            return "it exists, and is a file of another kind"
    return _place_refused(path.resolve().parent)


def _heads(kind: str) -> tuple[bytes, ...]:
    """What files of a kind begin with; a CSV file begins with the columns of one of dpsim's tables."""
    if kind != ".csv":
        return _HEADS.get(kind, _JSON_HEADS)
    from dpsim.records.columns import FRAMES

    tables = (columns for tables in FRAMES.values() for columns in tables.values())
    return tuple(",".join(column.name for column in columns).encode()[:_HEAD_BYTES] for columns in tables)


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
