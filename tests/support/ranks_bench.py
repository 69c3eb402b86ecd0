"""Systems for the tests of the allreduce benchmark: one that adds wrongly, timed as ``turns.py`` times its own."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpsim.study.runners.allreduce.turns import SCALE, SCALING, HostRank, Variant


class SingleRank(HostRank):
    """One rank, whose sum is its own array; ``broken``: the algorithm that adds 1 to an element now and then."""

    def __init__(self, page: str, *, wrong_calls: range = range(0)) -> None:
        super().__init__(0, "a test", {"ranks": 1, "cores": [0], "page": page, "dtype": "float32", "count": 100})
        self._calls, self._wrong_calls = 0, wrong_calls

    def variants(self, count: int) -> list[Variant]:
        data, out = self._arrays

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

        calls: list[Any] = [
            (SCALING, data, scale),
            ("right", data, nothing),
            ("right", out, copy),
            ("broken", data, broken),
        ]
        return [Variant(algorithm=name, source=data, target=target, call=call) for name, target, call in calls]
