"""Runs a user's own Python script on ranks that dpsim starts: ``dpsim launch local --devices 2 -- train.py``."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dpsim.errors import ConfigError
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress

if TYPE_CHECKING:
    from mpi4py import MPI


def check_script(path: str) -> None:
    """Raises ``ConfigError`` unless ``path`` is an existing Python script."""
    if not path.endswith(".py") or not Path(path).is_file():
        missing = "it is a folder" if Path(path).is_dir() else "there is no such file"
        reason = missing if path.endswith(".py") else "it does not end in .py"
        raise ConfigError(f"cannot run {path!r}: {reason}", allowed="the path of a Python script")


def run_script(path: str, arguments: Sequence[str], *, devices: int) -> None:
    """Run the script on ``devices`` ranks; what they print to stdout goes to stdout.

    Raises ``JobFailed`` with the script's traceback, or its exit code, if it fails on a rank.
    """
    check_script(path)
    argument = {"path": str(Path(path).absolute()), "arguments": list(arguments)}
    on_ranks("dpsim.launch.user_script:script_on_rank", argument, devices=devices, stdout=True)


def script_on_rank(comm: MPI.Intracomm, argument: dict[str, Any], progress: Progress) -> None:
    """The task: run the script as ``python SCRIPT ARGUMENTS`` would."""
    sys.argv = [argument["path"], *argument["arguments"]]
    sys.path.insert(0, str(Path(argument["path"]).parent))
    try:
        runpy.run_path(argument["path"], run_name="__main__")
    except SystemExit as ended:
        if ended.code not in (None, 0):
            if not isinstance(ended.code, int):
                print(ended.code, file=sys.stderr)
            raise
