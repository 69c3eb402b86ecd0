"""Where in a user's code an exception arose."""

from __future__ import annotations

import contextlib
import importlib
import traceback
from pathlib import Path

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
