"""Stand-ins, in Python, for ``registers_cuda`` in numba's CUDA simulator: the same names, meanings and bits."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np

Numbers = tuple[Any, ...]


def fused(left: Any, right: Any, added: Any) -> Any:
    """left right + added of float32 arrays or numbers, rounded once, as a fused multiply-add does.

    The product is exact in float64. The sum there is rounded to odd, which makes the second rounding the only one
    (Boldo and Melquiond 2008).
    """
    with np.errstate(all="ignore"):
        product = np.multiply(left, right, dtype=np.float64)
        total = np.asarray(product + added)
        low = total - product
        error = (product - (total - low)) + (added - low)
        inexact = np.isfinite(total) & (error != 0) & (total.view(np.int64) & 1 == 0)
        odd = np.where(inexact, np.nextafter(total, np.copysign(np.inf, error)), total)
        return odd.astype(np.float32)


@functools.cache
def outer(rows: int, lanes: int, lane: int) -> Callable[[Numbers, Numbers, Numbers], Numbers]:
    def added(sums: Numbers, left: Numbers, right: Numbers) -> Numbers:
        lefts = np.repeat(np.array(left[lane::lanes], np.float32), len(right))
        return tuple(fused(lefts, np.tile(np.array(right, np.float32), rows), np.array(sums, np.float32)))

    return added


@functools.cache
def part(first: int, count: int) -> Callable[[Numbers], Numbers]:
    def taken(values: Numbers) -> Numbers:
        return values[first : first + count]

    return taken


def minus(left: Numbers, right: Numbers) -> Numbers:
    with np.errstate(all="ignore"):
        return tuple(a - b for a, b in zip(left, right, strict=True))


def widen(values: Numbers) -> Numbers:
    return tuple(map(np.float64, values))


def narrow(values: Numbers) -> Numbers:
    with np.errstate(all="ignore"):
        return tuple(map(np.float32, values))


def keep_positive(values: Numbers, tests: Numbers) -> Numbers:
    return tuple(value if test > 0 else np.float32(0) for value, test in zip(values, tests, strict=True))


def rectify(values: Numbers) -> Numbers:
    return tuple(np.float32(0) if value <= 0 else value for value in values)
