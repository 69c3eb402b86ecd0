"""A program of the tests of gpu_check's training, in numba's simulator: every figure beside ``Other``."""

from __future__ import annotations

import sys
from pathlib import Path

from quick_simulator import short_turns

from dpsim.experiments.gpu_check import training
from dpsim.experiments.gpu_check.journal import keep
from dpsim.experiments.gpu_check.record import TARGETS


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


if __name__ == "__main__":
    with short_turns():
        keep(Path(sys.argv[1]), [training.measure(name, Other) for name in TARGETS])
