"""Tasks of the tests of gpu_check's training, in numba's simulator."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from dpsim.experiments.gpu_check import training
from dpsim.progress import Progress


class Other:
    """In place of PyTorch: it does nothing."""

    def __init__(self, token: str, shape: tuple[int, int, int], batch: int, compute_dtype: str) -> None:
        assert token and batch > 0 and len(shape) == 3 and compute_dtype in ("float32", "bfloat16")

    def steps(self, count: int) -> None:
        assert count > 0

    def activation_bytes(self) -> int:
        return 1000

    def close(self) -> None:
        pass


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any]:
    """All figures beside ``Other``; those without PyTorch; and those for which no time is left."""
    first, second, third = (
        {"results": argument["results"][n], "seconds": seconds} for n, seconds in enumerate((60, 60, -1))
    )
    return {
        "beside": training.measure(comm, first, report, Other),
        "alone": training.measure(comm, second, report),
        "late": training.measure(comm, third, report, Other),
    }
