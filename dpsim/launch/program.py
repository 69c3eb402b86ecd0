"""The program that called dpsim, on the ranks that it starts: what it registers has to be known there too.

As with ``multiprocessing``'s spawn, a rank runs the program's file under another name than ``__main__``, so that what
stands below ``if __name__ == "__main__"`` stays with the program itself.
"""

from __future__ import annotations

import contextlib
import os
import runpy
import sys
from collections.abc import Iterator
from pathlib import Path

from dpsim.errors import ConfigError

VARIABLE = "DPSIM_PROGRAM"
_ON_A_RANK = "__dpsim_rank__"


def registered() -> list[str]:
    """Return the algorithms, fusion rules and strategies that the running program brought."""
    from dpsim.algorithms import ALGORITHMS
    from dpsim.fusion_rules import FUSION_RULES
    from dpsim.strategy import STRATEGIES

    strategies = [name for name, kind in STRATEGIES.items() if not kind.__module__.startswith("dpsim.")]
    return [*ALGORITHMS.of_program(), *FUSION_RULES.of_program(), *strategies]


@contextlib.contextmanager
def on_ranks_too() -> Iterator[None]:
    """Let the ranks that are started meanwhile register what this program did, by running its file.

    Raises ``ConfigError`` on a rank that runs the file, and where there is no file to run.
    """
    if VARIABLE in os.environ:
        raise ConfigError(
            f"{Path(os.environ[VARIABLE]).name} starts ranks while a rank reads what it registers",
            allowed='a program whose calls of dpsim stand below if __name__ == "__main__":',
        )
    names = registered()
    file = getattr(sys.modules["__main__"], "__file__", None)
    if names and file is None:
        raise ConfigError(
            f"{names[0]} was registered in a session that has no file, so that the ranks cannot know it",
            allowed="a program in a file, or a package with an entry point (docs/extend.md)",
        )
    if names:
        os.environ[VARIABLE] = str(Path(str(file)).resolve())
    try:
        yield
    finally:
        os.environ.pop(VARIABLE, None)


def register_on_rank() -> None:
    """Run the file of the program that started this rank, if it registered something."""
    if file := os.environ.get(VARIABLE):
        sys.path.insert(0, str(Path(file).parent))
        runpy.run_path(file, run_name=_ON_A_RANK)
