"""Tasks of the tests of ``reproduce``: several trainings in one job."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim.harness.reproduce.on_ranks import train_on_ranks
from dpsim.progress import Progress


def several(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any]:
    """Every task, one after another."""
    return [train_on_ranks(comm, task, report) for task in argument["tasks"]]
