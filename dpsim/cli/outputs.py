"""Checks output paths before the work instead of after it: nothing of the user's is replaced, and all can be written.

One rule for all commands: a file is new, empty, or what dpsim wrote before as the same kind; a folder is new, empty, or
holds dpsim's own record of that kind; nothing that a command reads is written. Own files are told by a mark in them.
"""

from __future__ import annotations

import json
import os
import re
import tempfile
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from dpsim.errors import ConfigError

if TYPE_CHECKING:
    from dpsim.report.charts import Chart

_PLOTS = (".png", ".svg")
_PAGES = {"index.html": "page", "report.md": "markdown"}
_TABLES = {"points.csv": ".csv", "samples.csv": ".csv", "timeline.csv": ".csv"}
_MARKS = {
    "page": rb'<nav aria-label="Files of this report">|the model of <code>dpsim predict</code> runs in this page',
    "markdown": rb"(?s)\n## Warnings\n.*\n## How it was measured\n",
    ".png": rb"(?s)\A\x89PNG.*Software\0dpsim",
    ".svg": rb"<!-- dpsim -->\s*\Z",
    ".parquet": rb"\APAR1",
    "checkpoint": rb"dpsim\.checkpoint/",
    "packed": rb"\A\xfd7zXZ\x00",
}
"""What files of dpsim have in them, by kind, or by the endings of their names. JSON has a ``schema``, CSV columns."""
_HEAD_BYTES, _SEARCHED_BYTES = 16, 2**22
_VALIDATION_HEAD = b"dataset,case,line,quantity,"
"""What the table of ``python -m dpsim.validation`` begins with, which no other part of dpsim knows."""
_CHECKPOINT = "checkpoint-*.safetensors"
FOLDERS: Mapping[str, tuple[str, Mapping[str, str]]] = {
    "sweep": (
        "a sweep",
        {
            "predictions.json": "predictions",
            "inputs.json": "inputs",
            "samples.json": "samples",
            "array.json": "array",
            "records.json.xz": "packed",
        },
    ),
    "bench": ("a benchmark of allreduce", {"allreduce.json": "bench"}),
    "reproduce": ("a record of reproduce", {"reproduce.json": "reproduce", "predictions.json": "drift"}),
    "quality": ("a study of quality", {"quality.json": "quality", "quality_predictions.json": "quality-predictions"}),
    "estimate": ("what profile --from-steps fitted", {"workload.json": "workload", "machine.json": "machine"}),
    "report": ("a report of dpsim", _PAGES | _TABLES),
    "checkpoints": ("checkpoints of dpsim", {_CHECKPOINT: "checkpoint"}),
}
"""What a command may write again, in words, and the files that tell it with the kind of each."""
RECORDS = ("sweep", "bench", "reproduce", "quality")
"""The folders of which ``dpsim report`` writes the report again."""
FITTED = "dpsim profile --from-steps: "
"""How the ``source`` of a fitted file begins; ``_FITTED_BEFORE`` is that of earlier versions."""
_FITTED_BEFORE = "dpsim estimate: "


def writable(
    path: Path | None,
    kind: str = "",
    *,
    folders: tuple[str, ...] = (),
    flag: str = "--output",
    inputs: Iterable[Path | None] = (),
) -> None:
    """Raises ``ConfigError`` for a path that is not writable, and for one where something of the user's would be lost.

    ``folders`` are the kinds of ``FOLDERS`` that a folder may hold. Without them the path is of a file: a page, JSON of
    the schema ``kind``, or without ``kind`` a plot or a table, as its name ends. ``inputs`` are what the command reads.
    Devices and pipes are allowed. None, for a flag that was left out, is allowed.
    """
    if path is None:
        return
    read = [file for file in inputs if file is not None and file.exists()]
    try:
        reason = _folder_refused(path, folders, read) if folders else _file_refused(path, kind, read)
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
    if reason:
        words = " or ".join(FOLDERS[each][0] for each in folders)
        allowed = f"a new or empty folder, or one that holds {words}" if folders else "a new file, or one of this kind"
        raise ConfigError(
            f"cannot write {flag} {path}: {reason}",
            allowed=f"{allowed}, where you may write",
            remedy=f"choose another one with {flag}; nothing was changed",
        )


def drawable(path: Path | None) -> None:
    """Raises ``ConfigError`` for a path of ``--plot`` that is not writable, or names neither a PNG nor an SVG."""
    if path is not None and path.suffix.lower() not in _PLOTS:
        raise ConfigError(
            f"cannot draw --plot {path}: its name ends in {path.suffix or 'no suffix'}",
            allowed=", ".join(_PLOTS),
            remedy=f"name it {path.with_suffix('.png')}",
        )
    writable(path, flag="--plot")


def draw_plot(path: Path, chart: Chart) -> None:
    """Draw a chart into the file of ``--plot``. Raises ``ConfigError``."""
    from dpsim.report.figures import draw, save_as

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_as(draw(chart), path, software="dpsim")
    except OSError as error:
        raise ConfigError(
            f"cannot write --plot {path}: {error.strerror or error}", remedy="choose another file"
        ) from error


def _file_refused(path: Path, kind: str, inputs: Iterable[Path]) -> str:
    """Why ``path`` cannot be written as a file; empty if it can."""
    if path.is_dir():
        return "it is a folder"
    if path.exists() and not path.is_file():
        return "" if os.access(path, os.W_OK) else "it is not writable"
    if any(path.exists() and path.samefile(file) for file in inputs):
        return "this command reads it"
    if path.is_file() and path.stat().st_size and not _is_own(path, kind):
        return f"it exists, and is no {kind or path.suffix.lstrip('.').upper()} file that dpsim made"
    return _place_refused(path.resolve().parent)


def _is_own(path: Path, kind: str = "") -> bool:
    """Whether dpsim wrote a file; one of JSON as this kind."""
    kind = kind or path.suffix.lower()
    if not (kind in _MARKS or kind.startswith(".")):
        try:
            raw = tomllib.loads(path.read_text("utf-8")) if kind == "kernel-table" else json.loads(path.read_bytes())
        except (ValueError, RecursionError):
            return False
        return isinstance(raw, dict) and str(raw.get("schema")).startswith(f"dpsim.{kind}/")
    with path.open("rb") as file:
        head = file.read(_SEARCHED_BYTES)
    return head.startswith(_tables()) if kind == ".csv" else bool(kind in _MARKS and re.search(_MARKS[kind], head))


def _tables() -> tuple[bytes, ...]:
    """What CSV files begin with: the columns of each of dpsim's tables."""
    from dpsim.records.columns import FRAMES

    tables = (columns for tables in FRAMES.values() for columns in tables.values())
    heads = (",".join(column.name for column in columns).encode()[:_HEAD_BYTES] for columns in tables)
    return _VALIDATION_HEAD, *heads


def _folder_refused(path: Path, kinds: tuple[str, ...], inputs: Iterable[Path]) -> str:
    """Why nothing of these kinds can be written into the folder ``path``; empty if it can."""
    if path.exists() and not path.is_dir():
        return "it is not a folder"
    if path.is_dir():
        for file in inputs:
            if path.samefile(file if file.is_dir() else file.parent):
                return f"this command reads {'it' if file.is_dir() else file.name}"
        names = sorted(each.name for each in path.iterdir() if not _is_partial(each.name))
        if names and not any(_holds(path, kind) for kind in kinds):
            return f"it holds {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}"
        for name, kind in _PAGES.items():
            if (path / name).exists() and not _is_own(path / name, kind):
                return f"its {name} is not a report of dpsim"
    return _place_refused(path)


def _is_partial(name: str) -> bool:
    """Whether a name is that of a file that a killed command was writing (``dpsim.codec.write_bytes``)."""
    return name.startswith(".") and name.endswith(".partial")


def _holds(folder: Path, kind: str) -> bool:
    """Whether a folder holds what dpsim wrote of a kind: files that tell it are there, and all of them are dpsim's."""
    named = [(path, of) for name, of in FOLDERS[kind][1].items() for path in folder.glob(name)]
    if not named or not all(path.is_file() and _is_own(path, of) for path, of in named):
        return False
    if kind == "estimate":
        return all(
            str(json.loads(path.read_bytes()).get("source")).startswith((FITTED, _FITTED_BEFORE)) for path, _ in named
        )
    records = (folder / name for each in RECORDS for name in FOLDERS[each][1])
    return kind != "report" or not any(path.exists() for path in records)


def _place_refused(folder: Path) -> str:
    """Why files cannot be made in ``folder``, or in its nearest parent that exists; empty if they can."""
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        return f"{folder} is not a folder"
    tempfile.TemporaryFile(dir=folder).close()
    return ""
