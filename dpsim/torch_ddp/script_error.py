"""Where in a user's PyTorch script an exception was raised, and through which calls. Loads no torch."""

from __future__ import annotations

import itertools
import os
import re
import sysconfig
import traceback
from collections import deque
from pathlib import Path
from types import FrameType, TracebackType

from dpsim.user_code import text_of

_DPSIM = str(Path(__file__).parents[1]) + os.sep
_STANDARD_LIBRARY = sysconfig.get_path("stdlib") + os.sep
_LIBRARIES = re.compile(r".*/(site|dist)-packages/")
_MOST_OWN, _INNERMOST, _MOST_CALLS = 8, 3, 1000
"""How many lines of the user's files are shown, how many innermost lines of any file, and among how many calls."""


def exit_code(ended: SystemExit) -> str:
    """``exit code 3``, or what ``sys.exit("no data")`` says, which Python prints as it ends with exit code 1."""
    return f"exit code {ended.code}" if isinstance(ended.code, int) else f"exit code 1: {text_of(ended)}"


def place_in(module: str, where: TracebackType | None, name: str) -> str:
    """``train.py:17``: the innermost line of ``module``, such as ``__main__``; without one ``name``."""
    places = deque(((frame, line) for frame, line in traceback.walk_tb(where) if _is_of(frame, module)), maxlen=1)
    return "".join(f"{Path(frame.f_code.co_filename).name}:{line}" for frame, line in places) or name


def _is_of(frame: FrameType, module: str) -> bool:
    return frame.f_globals.get("__name__") == module and not frame.f_code.co_filename.startswith(_DPSIM)


def calls_to(module: str, where: TracebackType | None) -> str:
    """The calls from ``module`` to the exception, a line each, to follow a message; empty if there is one at most.

    These are the calls in the user's own files and the innermost ones, and whether they end in dpsim.
    """
    since = itertools.dropwhile(lambda place: not _is_of(place[0], module), traceback.walk_tb(where))
    called = traceback.StackSummary.extract(iter(deque(since, maxlen=_MOST_CALLS)))
    if len(called) < 2:
        return ""
    own = [index for index, call in enumerate(called) if _is_own(call.filename)]
    shown = sorted({*own[-_MOST_OWN:], *range(len(called))[-_INNERMOST:]})
    lines = ["", "  called through:"]
    lines += [
        f"    {_path(call.filename)}:{call.lineno} in {call.name}: {call.line}"
        for call in map(called.__getitem__, shown)
    ]
    if called[-1].filename.startswith(_DPSIM):
        lines += [
            "  The last line is of what dpsim puts in place of PyTorch's process group, launcher or model.",
            "  If the script works without dpsim, this is a defect of dpsim.",
        ]
    return "\n".join(lines)


def _is_own(filename: str) -> bool:
    """Whether a file is the user's own: not of dpsim, of a library or of Python."""
    return not (filename.startswith((_DPSIM, _STANDARD_LIBRARY, "<frozen")) or _LIBRARIES.match(filename))


def _path(filename: str) -> str:
    """A path as short as it can be: below the folder of the libraries or of dpsim, or the current one."""
    below = _LIBRARIES.sub("", filename).removeprefix(str(Path(_DPSIM).parent) + os.sep)
    return below.removeprefix(os.getcwd() + os.sep)
