"""What the stress tests that kill in rounds share: their arguments, a scratch folder, the time they take."""

from __future__ import annotations

import argparse
import contextlib
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import psutil

from dpsim.launch.scratch import scratch

T = TypeVar("T")


def run_rounds(description: str | None, default: int, run: Callable[[int, int, Path], T]) -> tuple[str, T]:
    """(``200 rounds in 31 s``, the result of ``run(rounds, seed, folder)``).

    ``--rounds`` and ``--seed`` come from the command line.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=default)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with scratch("kill") as folder:
        begin_s = time.monotonic()
        result = run(arguments.rounds, arguments.seed, folder / "runs")
        wall_s = time.monotonic() - begin_s
    return f"{arguments.rounds} rounds in {wall_s:.0f} s", result


def is_running(process: psutil.Process) -> bool:
    """Whether a process exists and has not ended."""
    with contextlib.suppress(psutil.Error):
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    return False
