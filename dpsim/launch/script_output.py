"""What a user's script prints while dpsim runs it many times: lines that are alike once, and all where a run fails."""

from __future__ import annotations

import contextlib
import re
import sys
import threading
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import DpsimError
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress

_MOST_LINES = 2000
"""The last lines of a run that are kept, to be shown where it fails."""
_LOOKED_EVERY_S = 0.2
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


def on_ranks_shown_once(task: str, request: Noun, *, progress: Progress | None, **options: Any) -> Any:
    """Return what ``dpsim.launch.jobs.on_ranks`` does, with its ``options``, of a task whose ranks run the script."""
    argument = dict(codec.to_builtins(request))
    with shown_once() as output:
        return on_ranks(task, argument, progress=progress, show=output.add, **options)


@contextlib.contextmanager
def written(folder: Path, output: ScriptOutput) -> Iterator[IO[bytes]]:
    """Yield a file in ``folder`` for what a process prints; its lines are added while it prints them.

    It is no pipe, which processes that outlive the script could keep open.
    """
    path = folder / "printed.txt"
    ended = threading.Event()
    with path.open("wb") as file:
        follower = threading.Thread(target=_follow, args=(path, output, ended), daemon=True)
        follower.start()
        try:
            yield file
        finally:
            file.flush()
            ended.set()
            follower.join()


def _follow(path: Path, output: ScriptOutput, ended: threading.Event) -> None:
    """Add the lines of a file as they are written, until it has ended."""
    rest = b""
    with path.open("rb") as file:
        while True:
            last = ended.wait(_LOOKED_EVERY_S)
            *lines, rest = (rest + file.read()).split(b"\n")
            for line in [*lines, *([rest] if last and rest else [])]:
                output.add(line.decode(errors="replace").rstrip("\r"))
            if last:
                return
