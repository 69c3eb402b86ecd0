"""Systems for the tests of the allreduce benchmark: one that adds wrongly, run as ``turns.py`` runs its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpsim.harness.bench.turns import SCALE, SCALING, Reduction


class AloneContender:
    """One rank, whose sum is its own array; ``broken``: the algorithm that adds 1 to an element now and then."""

    rank = 0
    library = "a test"

    def __init__(self, *, wrong_calls: range = range(0)) -> None:
        self._calls, self._wrong_calls = 0, wrong_calls

    def reductions(self, count: int) -> list[Reduction]:
        data, out = np.zeros(count, np.float32), np.zeros(count, np.float32)

        def scale() -> None:
            np.multiply(data, np.float32(SCALE), out=data)

        def nothing() -> None:
            pass

        def copy() -> None:
            out[...] = data

        def broken() -> None:
            if self._calls in self._wrong_calls:
                data[count // 2] += 1
            self._calls += 1

        ways: list[Any] = [(SCALING, data, scale), ("right", data, nothing), ("right", out, copy)]
        return [
            *(Reduction(name, data, target, call) for name, target, call in ways),
            Reduction("broken", data, data, broken),
        ]
