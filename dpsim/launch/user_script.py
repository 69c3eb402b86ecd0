"""Runs a user's own Python script on ranks that dpsim starts."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.launch import rank_info
from dpsim.launch.jobs import on_ranks
from dpsim.launch.user_program import check_script, run_as_main
from dpsim.progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI


def run_script(path: str, arguments: Sequence[str], *, devices: int, stall_after_s: float | None = None) -> None:
    """Run the script on ``devices`` ranks; what they print to stdout goes to stdout.

    ``stall_after_s`` takes the place of ``rank_info.stall_after_s`` on them. Raises ``JobFailed`` with the script's
    traceback, or its exit code, if it fails on a rank.
    """
    check_script(path)
    argument = {"path": str(Path(path).absolute()), "arguments": list(arguments), "stall_after_s": stall_after_s}
    on_ranks("dpsim.launch.user_script:script_on_rank", argument, devices=devices, stdout=True)


def script_on_rank(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> None:
    """Run the script as ``python SCRIPT ARGUMENTS`` would. A task for ``jobs.on_ranks``."""
    if argument["stall_after_s"] is not None:
        rank_info.stall_after_s = argument["stall_after_s"]
    try:
        run_as_main(argument["path"], argument["arguments"])
    except SystemExit as ended:
        if ended.code not in (None, 0):
            if not isinstance(ended.code, int):
                print(ended.code, file=sys.stderr)
            raise
