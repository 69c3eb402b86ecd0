"""The command line: one small file a command, which parses and prints and decides nothing.

Everything heavy is imported by the command that needs it, so that ``--help`` answers at once.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence


def main(arguments: Sequence[str] | None = None) -> None:
    """Run ``dpsim`` with these arguments (by default the process's own) and exit.

    Exit codes: 0 done; 1 a rank or the program failed; 2 a mistake of the user's, explained on stderr;
    130 interrupted.
    """
    try:
        from dpsim.cli.app import run

        code = run(sys.argv[1:] if arguments is None else arguments)
    except KeyboardInterrupt:  # before the command began
        print("dpsim: interrupted", file=sys.stderr)
        code = 130
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # all is done: one more Ctrl-C shall not change the exit code
    sys.exit(code)
