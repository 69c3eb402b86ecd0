"""The command line: one small file per command, which parses and prints, and decides nothing.

A command imports whatever is slow to import when it runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``dpsim`` with these arguments (by default the process's own) and exit.

    Exit codes: 0 success; 1 a rank or the program failed; 2 a mistake of the user, explained on stderr;
    130 interrupted.
    """
    try:
        from dpsim.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # before the command has started
        print("dpsim: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a late Ctrl-C must not change the exit code
    sys.exit(code)
