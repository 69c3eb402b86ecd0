"""Tasks of the tests of ``reproduce``: several trainings in one job."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim.progress import Progress
from dpsim.study.runners import digest


def several(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """Every task, one after another."""
    return [digest.run(comm, task, report) for task in argument["tasks"]]
