"""A check of the first sum of a user's own allreduce: dpsim's tests know the algorithms of dpsim alone."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from dpsim.comm.message_steps import MessageAllreduce
from dpsim.comm.transport import Array, CollectiveSteps, SteppedAllreduce, Transport
from dpsim.errors import AllreduceError


class CheckedAllreduce(SteppedAllreduce):
    """The allreduce ``steps(transport, data)`` of a user, whose first run is compared with dpsim's direct exchange.

    That adds float64 copies. The tolerance is the rounding error of a sum of n values in any order: n eps sum(|x|).
    A first run that is wrong raises ``AllreduceError``.
    """

    def __init__(self, t: Transport, data: Array, algorithm: str, steps: Callable[..., CollectiveSteps]) -> None:
        super().__init__(t, self._begin)
        self._data, self._algorithm, self._steps = data, algorithm, steps
        self._checked = False

    def _begin(self) -> CollectiveSteps:
        if self._checked:
            return self._steps(self._transport, self._data)
        self._checked = True
        return self._check()

    def _check(self) -> CollectiveSteps:
        t, data = self._transport, self._data
        expected = np.concatenate([data, np.abs(data)]).astype(np.float64)
        yield from MessageAllreduce(t, [expected], "direct").start()
        yield from self._steps(t, data)
        sums, magnitudes = np.split(expected, 2)
        with np.errstate(invalid="ignore"):
            near = np.abs(data - sums) <= t.size * np.finfo(data.dtype).eps * magnitudes
        wrong = np.flatnonzero(~near & np.isfinite(magnitudes))  # others have failed where they were computed
        if wrong.size:
            first = wrong[0]
            raise AllreduceError(
                f"the allreduce {self._algorithm!r} gives a wrong sum on rank {t.rank} of {t.size}: element {first} is"
                f" {data[first]:.9g} instead of {sums[first]:.9g} ({wrong.size} of {data.size} elements are wrong)",
                allowed="the sum over the ranks, in place, on every rank",
                remedy="correct the function that the algorithm gives as steps; a right one stands in docs/extend.md",
            )
