"""Where in a user's code an exception arose, and what it says."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from pathlib import Path

_LONGEST_TEXT = 1000

_IGNORED = (str(Path(__file__).parent), "<frozen", importlib.__path__[0], contextlib.__file__)


def place_of(error: BaseException, *others: str) -> str:
    """``own.py, line 3``: the innermost place outside of dpsim, the import system, and the folders ``others``.

    Empty if there is none.
    """
    if isinstance(error, SyntaxError) and error.filename is not None:
        return f"{Path(error.filename).name}, line {error.lineno}"
    frames = traceback.extract_tb(error.__traceback__)
    outside = [frame for frame in frames if not frame.filename.startswith((*_IGNORED, *others))]
    return f"{Path(outside[-1].filename).name}, line {outside[-1].lineno}" if outside else ""


def text_of(error: BaseException) -> str:
    """What an exception says, on a single line of at most 1000 characters that a terminal shows as they are."""
    text = "".join(letter if letter.isprintable() else "?" for letter in " ".join(str(error).split()))
    return text if len(text) <= _LONGEST_TEXT else text[: _LONGEST_TEXT - 3] + "..."
