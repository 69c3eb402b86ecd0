"""What commands print: progress on stderr, results on stdout, and the JSON object of ``--json``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, TypeVar

from dpsim.errors import printable
from dpsim.progress import Progress

if TYPE_CHECKING:
    from pathlib import Path

    from dpsim.imports.merge import Imported
    from dpsim.report.saved import SavedResult
    from dpsim.report.table import Column

Row = TypeVar("Row")
SCHEMA = "dpsim.output/1"


@contextmanager
def progress() -> Iterator[Progress]:
    """A function that shows progress: on a terminal in one line that it overwrites, elsewhere line by line.

    On a terminal a text that begins with ``warning:`` is not overwritten.
    """
    terminal = sys.stderr.isatty()

    def show_line(text: str) -> None:
        text = printable(text)
        if terminal and text.startswith("warning:"):
            print(f"\r\x1b[2K{text}", file=sys.stderr, flush=True)
        elif terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[2K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    try:
        yield show_line
    finally:
        if terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


@contextmanager
def measuring(wait: str | None) -> Iterator[Progress]:
    """The same for a command that measures: first it waits as ``--wait-until-quiet`` says, or says who uses the cores.

    Raises ``ConfigError`` where they stay busy.
    """
    from dpsim.cli import readers
    from dpsim.study.other_processes import before_measuring

    wait_s = readers.wait(wait)
    with progress() as shown:
        before_measuring(wait_s, shown)
        yield shown


def json_object(command: str, points: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """The object that a command prints with ``--json``."""
    from dpsim import codec
    from dpsim.study.environment import environment

    return {
        "schema": SCHEMA,
        "command": command,
        "environment": codec.to_builtins(environment()),
        "points": [dict(point) for point in points],
        "summary": dict(summary),
    }


def print_json(command: str, points: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print the JSON object of a command."""
    from dpsim import codec

    print(codec.to_json(json_object(command, points, summary)))


def as_json(
    command: str,
    points: Iterable[Mapping[str, Any]],
    summary: Mapping[str, Any],
    output: Path | None,
    *,
    json: bool,
) -> bool:
    """Write the JSON object into ``output``, if there is one, and print it with ``json``; return whether it does."""
    from dpsim import codec

    if json or output is not None:
        text = codec.to_json(json_object(command, points, summary))
        if output is not None:
            codec.write_json(output, text)
        if json:
            print(text)
    return json


def result(
    saved: SavedResult,
    folder: Path | None,
    *,
    json: bool,
    command: str,
    pages: Sequence[str] = ("html", "md"),
    verbose: bool = False,
    more: Mapping[str, Any] = MappingProxyType({}),
) -> None:
    """Write the ``pages`` of a result's report into ``folder``, if there is one, and print the result.

    ``more`` is what else the summary of ``--json`` has.
    """
    from dpsim.report.write import PAGES

    page = None if folder is None or not pages else folder / PAGES[pages[0]]
    if folder is not None and page is not None:
        saved.declared.report.write(folder, saved.data, pages)
    if json:
        print_json(command, saved.points(), saved.declared.report.summary(saved.data) | more)
        return
    for shown in saved.declared.report.show(saved.data, page, verbose):
        if isinstance(shown, str):
            print(shown)
        else:
            rich(shown)


def doubts(tables: Iterable[Imported]) -> list[str]:
    """Say on stderr which rows of imported logs are doubtful, and return these sentences."""
    said = [doubt for table in tables for doubt in table.doubts]
    for doubt in said:
        print(f"warning: {doubt}; compare it with the original", file=sys.stderr)
    return said


def count_devices(number: int) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number} device{'s' if number != 1 else ''}"


def rich(*renderables: Any) -> None:
    """Print rich text and tables. The width of a pipe is COLUMNS, or 100 columns."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(*renderables, crop=False)
        return
    columns = os.environ.get("COLUMNS", "")
    # Without a height, rich would use 80 columns on a dumb terminal.
    Console(width=int(columns) if columns.isdigit() else 100, height=25, highlight=False).print(
        *renderables, crop=False
    )


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], *, title: str = "") -> None:
    """Print a table."""
    from dpsim.report.table import table
    from dpsim.report.terminal import TerminalReport

    rich(TerminalReport(tables=[table(columns=columns, sections={title: rows})]))
