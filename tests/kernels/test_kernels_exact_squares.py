"""Sums of squares against exact arithmetic of fractions, and whether how they are divided changes a bit."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpsim.kernels.exact_squares import digits, roots, sums_of_squares
from dpsim.replica import Array

DTYPES = ["float32", "float64"]


def sums(x: Array, *bounds: int) -> NDArray[np.float64]:
    """The digits of the parts of ``x`` between bounds."""
    edges = np.array(bounds or (0, len(x)), np.int64)
    out = np.full((len(edges) - 1, digits(x.dtype.name)), 7.0)
    sums_of_squares(x, edges[:-1], edges[1:], out)
    return out


def exact(x: Array) -> float:
    """The root of the exact sum of the squares, each of which is a float64 number."""
    with np.errstate(under="ignore"):
        squares = x.astype(np.float64) ** 2
    total = sum(map(Fraction, squares.tolist()), Fraction(0))
    return math.sqrt(total)


def of_all_sizes(size: int, dtype: str, seed: int) -> Array:
    """Numbers of very different magnitudes, the largest and the smallest of the dtype among them, and zeros."""
    rng = np.random.default_rng(seed)
    limits = np.finfo(dtype)
    exponents = rng.integers(-149, 127, size) if dtype == "float32" else rng.integers(-500, 500, size)
    x = np.ldexp(rng.standard_normal(size), exponents).astype(dtype)
    x[rng.random(size) < 0.1] = 0
    if dtype == "float32":
        x[rng.random(size) < 0.05] = limits.smallest_subnormal
        x[rng.random(size) < 0.05] = limits.max if seed % 2 else limits.smallest_normal
    return x


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 2, 1023, 1024, 1025, 5000])
def test_the_root_is_that_of_the_exact_sum(size: int, dtype: str) -> None:
    for x in (of_all_sizes(size, dtype, size), np.random.default_rng(size).standard_normal(size).astype(dtype)):
        assert roots(sums(x), dtype)[0] == pytest.approx(exact(x), rel=1e-15)


@pytest.mark.parametrize("dtype", DTYPES)
@settings(max_examples=40)
@given(data=st.data())
def test_parts_in_any_order_add_up_to_the_same_bits(dtype: str, data: st.DataObject) -> None:
    size = data.draw(st.integers(1, 3000))
    x = of_all_sizes(size, dtype, size)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=8)))
    parts = sums(x, 0, *cuts, size)
    whole = roots(sums(x), dtype)
    assert roots(parts.sum(axis=0)[None], dtype).tobytes() == whole.tobytes()
    assert roots(parts[::-1].cumsum(axis=0)[-1:], dtype).tobytes() == whole.tobytes()
    shuffled = np.random.default_rng(0).permutation(x)
    assert roots(sums(shuffled), dtype).tobytes() == whole.tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_a_value_that_is_not_finite_makes_its_own_root_infinite(dtype: str, value: float) -> None:
    x = np.ones(10, dtype)
    x[7] = value
    assert roots(sums(x, 0, 5, 10), dtype).tolist() == [math.sqrt(5), math.inf]
    assert roots(sums(x, 0, 5, 10).sum(axis=0)[None], dtype)[0] == math.inf
    if dtype == "float64":
        assert roots(sums(np.array([1e200])), dtype)[0] == math.inf
