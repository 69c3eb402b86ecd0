"""The command line: one small file per command, which parses and prints, and decides nothing.

A command imports whatever is slow to import when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from dpsim import installation

if TYPE_CHECKING:
    from cyclopts import App


def main(arguments: Sequence[str] | None = None, app: App | None = None) -> None:
    """Run ``dpsim``, or another ``app``, with these arguments (by default the process's own) and exit.

    Exit codes: 0 success; 1 a rank or the program failed; 2 a mistake of the user, explained on stderr;
    130 interrupted.
    """
    _open_closed_streams()
    _name_other_program()
    try:
        from dpsim.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments, app)
    except KeyboardInterrupt:  # before the command has started
        print("dpsim: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C must not change the exit code
    sys.exit(code)


def _name_other_program() -> None:
    """Name the other program whose ``dpsim/__init__.py`` pip wrote over this one, which would have named it."""
    if not hasattr(sys.modules["dpsim"], "_OTHER") and (other := installation.other_program()):
        remedy = installation.without_other_program()
        print(f"dpsim: {other} is another program, in the same folder\n  to do:   {remedy}", file=sys.stderr)


def _open_closed_streams() -> None:
    """Open ``/dev/null`` as each closed standard stream, so that no other file takes its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            opened = os.open(os.devnull, os.O_RDWR)
            os.dup2(opened, number)
            if opened != number:
                os.close(opened)
    if sys.stdout is None:
        sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
