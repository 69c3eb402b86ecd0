"""Sums of ranks' values in a given order, as NumPy rounds them."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.kernels.allreduce.expression import Expression
from dpsim.kernels.allreduce.tree import fold


def evaluated(ranges: Sequence[tuple[int, Expression]], values: Sequence[NDArray[Any]]) -> NDArray[Any]:
    """The sums of the ranks' values, each range of elements in its order."""
    total, start = np.empty_like(values[0]), 0
    for end, expression in ranges:
        part = [value[start:end] for value in values]
        total[start:end] = fold(expression, part.__getitem__, operator.add)
        start = end
    assert start == len(total)
    return total
