"""What a user's script prints while dpsim runs it many times: lines that are alike once, and all where a run fails."""

from __future__ import annotations

import contextlib
import re
import sys
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import DpsimError
from dpsim.launch.jobs import on_ranks
from dpsim.launch.protection import Protection
from dpsim.progress import Progress

_MOST_LINES = 2000
"""The last lines of a run that are kept, to be shown where it fails."""
_shown: set[str] = set()
"""The lines that this command has shown, without their numbers."""


class ScriptOutput:
    """The lines that one run prints to stdout and stderr."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST_LINES)

    def add(self, line: str) -> None:
        """Keep a line, and show it on stderr unless one that differs by its numbers alone was shown before."""
        self._lines.append(line)
        without_numbers = re.sub(r"[0-9]+", "0", line)
        if line.strip() and without_numbers not in _shown:
            _shown.add(without_numbers)
            print(f"script: {line}", file=sys.stderr, flush=True)

    def show_all(self) -> None:
        """Show all lines as they were printed."""
        for line in self._lines:
            print(line, file=sys.stderr)
        sys.stderr.flush()


@contextlib.contextmanager
def shown_once() -> Iterator[ScriptOutput]:
    """Yield what takes the lines of a run; all of them are shown where it ends with a ``DpsimError``."""
    output = ScriptOutput()
    try:
        yield output
    except DpsimError:
        output.show_all()
        raise


def on_ranks_shown_once(
    task: str, request: Noun, *, devices: int, progress: Progress | None, protection: Protection | None
) -> Any:
    """Return what ``dpsim.launch.jobs.on_ranks`` does of a task whose ranks run the script."""
    argument = dict(codec.to_builtins(request))
    with shown_once() as output:
        return on_ranks(task, argument, devices=devices, progress=progress, protection=protection, show=output.add)


@contextlib.contextmanager
def written(folder: Path, output: ScriptOutput) -> Iterator[IO[bytes]]:
    """Yield a file in ``folder`` for what a process prints; its lines are added when the context ends.

    It is no pipe, which processes that outlive the script could keep open.
    """
    path = folder / "printed.txt"
    try:
        with path.open("wb") as file:
            yield file
    finally:
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                output.add(line.rstrip("\r\n"))
