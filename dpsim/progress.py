"""Progress of long work, as lines of text."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str], None]
"""Takes a line that says what is being done now. A line that begins with ``warning:`` should stay visible."""


def no_progress(_: str) -> None:
    """Drop every line: a ``Progress``."""
