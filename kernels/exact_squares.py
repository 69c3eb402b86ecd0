"""Sums of squares without rounding errors of addition: the same bits in whatever order and parts they are added.

The squares are float64: of float32 elements exact, of float64 ones rounded, each by itself. Their sum is a whole number
of ``2**-1074``, kept as digits of 32 bits, the lowest first. Digits are float64 numbers, so that those of several parts
may be added by any sum of float64 arrays: below 2**53 it is exact. The last digit is not 0 where an element is not
finite.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.jit import jit

Array = NDArray[Any]

_BITS = 32
_MASK = (1 << _BITS) - 1
_LOWEST = -1074
_EXPONENTS = 2048
_CHUNK = 1024
_FRACTION = (1 << 52) - 1
_HALF = 26
_HALF_MASK = (1 << _HALF) - 1
_RANGES = {"float32": (22, 22), "float64": (0, 68)}
"""The first digit that squares of a dtype may have, and how many follow: up to 2**31 of the largest, and the last."""


def digits(dtype: str) -> int:
    """Return the digits of a sum of squares of a dtype's elements."""
    return _RANGES[dtype][1]


def first_digit(dtype: str) -> int:
    """Return the first digit that they have, counted from that of ``2**-1074``."""
    return _RANGES[dtype][0]


def sums_of_squares(x: Array, starts: NDArray[np.int64], stops: NDArray[np.int64], out: Array) -> None:
    """``out[i]`` = the digits, each below 2**32, of the sum of the squares of ``x[starts[i]:stops[i]]``.

    ``x`` is float32 or float64, 1-D; no part may have 2**31 elements or more.
    """
    _sums(x, starts, stops, _RANGES[x.dtype.name][0], out)


def roots(sums: Array, dtype: str) -> NDArray[np.float64]:
    """Return the square root of each row of digits; infinite where the last digit is not 0."""
    return np.asarray(_roots(sums, _RANGES[dtype][0]))


@jit
def _sums(x: Array, starts: Array, stops: Array, first: int, out: Array) -> None:
    high, low = np.empty(_EXPONENTS, np.int64), np.empty(_EXPONENTS, np.int64)  # halves of fractions, by exponent
    squares = np.empty(_CHUNK, np.float64)
    bits = squares.view(np.int64)
    total = np.empty(out.shape[1], np.int64)
    for row in range(len(starts)):
        high[:], low[:], total[:] = 0, 0, 0
        for begin in range(starts[row], stops[row], _CHUNK):
            count = min(_CHUNK, stops[row] - begin)
            for i in range(count):
                element = np.float64(x[begin + i])
                squares[i] = element * element
            for i in range(count):
                exponent, fraction = bits[i] >> 52, bits[i] & _FRACTION
                if exponent > 0:
                    fraction |= _FRACTION + 1
                high[exponent] += fraction >> _HALF
                low[exponent] += fraction & _HALF_MASK
        for exponent in range(_EXPONENTS - 1):
            power = max(exponent, 1) - 1 - first * _BITS
            _add(total, low[exponent], power)
            _add(total, high[exponent], power + _HALF)
        _carry(total)
        total[-1] = high[_EXPONENTS - 1] > 0
        out[row] = total


@jit
def _add(total: Array, number: int, power: int) -> None:
    """Add ``number`` times 2**place, a number of 63 bits, to digits."""
    if number == 0:
        return
    digit, shift = power // _BITS, power % _BITS
    low, high = (number & _MASK) << shift, (number >> _BITS) << shift
    total[digit] += low & _MASK
    total[digit + 1] += (low >> _BITS) + (high & _MASK)
    if high >> _BITS:
        total[digit + 2] += high >> _BITS


@jit
def _carry(total: Array) -> None:
    for digit in range(len(total) - 1):
        total[digit + 1] += total[digit] >> _BITS
        total[digit] &= _MASK


@jit
def _roots(sums: Array, first: int) -> NDArray[np.float64]:
    results = np.empty(len(sums), np.float64)
    for row in range(len(sums)):
        row_digits = sums[row].astype(np.int64)
        finite = row_digits[-1] == 0
        _carry(row_digits)
        total = 0.0
        for digit in range(len(row_digits) - 1):
            total += math.ldexp(float(row_digits[digit]), (digit + first) * _BITS + _LOWEST)
        results[row] = math.sqrt(total) if finite else math.inf
    return results
