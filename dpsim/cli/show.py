"""What commands print: progress on stderr, results on stdout, and the one JSON object of ``--json``."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TypeVar

from dpsim.launch.jobs import Progress

if TYPE_CHECKING:
    from dpsim.report.table import Column

Row = TypeVar("Row")
SCHEMA = "dpsim.output/1"


@contextmanager
def progress() -> Iterator[Progress]:
    """A function that shows a line: the same line over and over on a terminal, a log line elsewhere.

    A text that begins with ``warning:`` stays to be read.
    """
    terminal = sys.stderr.isatty()

    def tell(text: str) -> None:
        if terminal and text.startswith("warning:"):
            print(f"\r\x1b[2K{text}", file=sys.stderr, flush=True)
        elif terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[2K{text[:width]}", end="", file=sys.stderr, flush=True)
        elif text:
            print(text, file=sys.stderr, flush=True)

    try:
        yield tell
    finally:
        if terminal:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)


def json_object(command: str, points: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> dict[str, Any]:
    """What a command prints for programs."""
    from dpsim import codec
    from dpsim.harness.measurement.environment import environment

    return {
        "schema": SCHEMA,
        "command": command,
        "environment": codec.to_builtins(environment()),
        "points": [dict(point) for point in points],
        "summary": dict(summary),
    }


def as_json(command: str, points: Iterable[Mapping[str, Any]], summary: Mapping[str, Any]) -> None:
    """Print the command's one JSON object."""
    from dpsim import codec

    print(codec.to_json(json_object(command, points, summary)))


def count_devices(number: int) -> str:
    """``1 device``, ``2 devices``."""
    return f"{number} device{'s' if number != 1 else ''}"


def rich(*what: Any) -> None:
    """Print rich text and tables; a pipe gets 100 columns unless COLUMNS says otherwise."""
    from rich.console import Console

    if sys.stdout.isatty():
        Console(highlight=False).print(*what, crop=False)
        return
    columns = os.environ.get("COLUMNS", "")
    # With a height too, rich does not fall back to 80 columns on a dumb terminal.
    Console(width=int(columns) if columns.isdigit() else 100, height=25, highlight=False).print(*what, crop=False)


def table(columns: Sequence[Column[Row]], rows: Sequence[Row], *, title: str = "") -> None:
    """Print a table."""
    from dpsim.report.table import table
    from dpsim.report.terminal import TerminalReport

    rich(TerminalReport(tables=[table(columns=columns, sections={title: rows})]))
