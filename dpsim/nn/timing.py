"""Times the candidates for a problem in turns, on arrays that are placed in memory as in training."""

from __future__ import annotations

import functools
import itertools
import math
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from dpsim.choices import CONVOLUTIONS, Problem
from dpsim.kernels.scratch import aligned
from dpsim.nn.array_ops import NumpyOps
from dpsim.nn.candidates import Candidate, arguments, candidates
from dpsim.nn.layer import Buffers
from dpsim.replica import Array

_POOL_BYTES = 1 << 26
_MOST_COPIES = 4
_LEAST_S = 50e-6
_SLOW = 1.6


class Timing:
    """Times of each candidate for one problem, a round at a time.

    Weights and their gradients alternate among several arrays, as many as the layers of a network might have: in
    training they come from memory, not from a cache. The arrays between layers are one each. A candidate that takes
    ``_HOPELESS`` times as long as the best is dropped after two rounds. ``others`` are more candidates, by name.
    """

    def __init__(self, problem: Problem, others: dict[str, Candidate] | None = None) -> None:
        self.candidates = candidates(problem) | (others or {})
        self.times: dict[str, list[float]] = {name: [] for name in self.candidates}
        self._rounds = 0
        self._calls = 1
        self._copies = itertools.cycle(argument_sets(problem))

    def warm_ups(self) -> list[Callable[[], None]]:
        """Functions that run each candidate once, so that it is compiled."""
        arrays = next(self._copies)
        return [functools.partial(candidate, *arrays) for candidate in self.candidates.values()]

    def round(self) -> None:
        """Time every candidate once, in an order that changes from round to round."""
        names = list(self.candidates)
        if not self._rounds:
            self._calls = max(1, math.ceil(_LEAST_S / max(self._timed(names[0], 1), 1e-7)))
        first = self._rounds % len(names)
        for name in names[first:] + names[:first]:
            self.times[name].append(self._timed(name, self._calls))
        self._rounds += 1
        if self._rounds == 2:
            slow_s = _SLOW * min(min(times) for times in self.times.values())
            self.candidates = {name: f for name, f in self.candidates.items() if min(self.times[name]) <= slow_s}

    def run(self, seconds: float, least: int = 4, most: int = 40) -> None:
        """Time rounds for ``seconds``, but at least ``least`` and at most ``most`` of them."""
        end_s = time.perf_counter() + seconds
        while self._rounds < most and (self._rounds < least or time.perf_counter() < end_s):
            self.round()

    def ratios(self) -> dict[str, float]:
        """Each candidate's time over that of the fastest: the median over rounds in which both ran."""
        fastest = min(self.times, key=lambda name: float(np.median(self.times[name])))
        return {
            name: float(np.median([a / b for a, b in zip(times, self.times[fastest], strict=False)]))
            for name, times in self.times.items()
        }

    def _timed(self, name: str, calls: int) -> float:
        candidate = self.candidates[name]
        begin_s = time.perf_counter()
        for _ in range(calls):
            candidate(*next(self._copies))
        return (time.perf_counter() - begin_s) / calls


def argument_sets(problem: Problem) -> list[tuple[Any, ...]]:
    """Sets of a problem's arguments, one for each copy of its weights or their gradients."""
    dtype = np.dtype(problem.dtype)
    between_layers: list[Array] = []

    def one_set() -> tuple[Any, ...]:
        shared = iter(list(between_layers))

        def array(role: str, *shape: int) -> Array:
            if role == "input" and (first_array := next(shared, None)) is not None:
                return first_array
            data = _filled(shape, dtype)
            if role == "input":
                between_layers.append(data)
            return data

        arrays = arguments(problem, array)
        return (*arrays, Buffers(NumpyOps(), dtype)) if problem.operation in CONVOLUTIONS else arrays

    first = one_set()
    copied_bytes = sum(array.nbytes for array in first if isinstance(array, np.ndarray)) - sum(
        array.nbytes for array in between_layers
    )
    copies = min(_MOST_COPIES, _POOL_BYTES // max(copied_bytes, 1))
    return [first, *(one_set() for _ in range(copies - 1))]


def _filled(shape: tuple[int, ...], dtype: np.dtype[Any]) -> Array:
    """An array that begins at a cache line, with standard normal numbers."""
    data = aligned(math.prod(shape) * dtype.itemsize).view(dtype)
    pattern = np.random.default_rng(0).standard_normal(4096).astype(dtype)
    for start in range(0, data.size, len(pattern)):
        data[start : start + len(pattern)] = pattern[: data.size - start]
    return data.reshape(shape)
