"""Rounding to 16 bits in vector code: the bits of the description, and nothing changes what is rounded already."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wire_reference import rounded

from dpsim.comm.compression import Compression
from dpsim.kernels.allreduce import reference
from dpsim.kernels.rounding import round_array, round_sum
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Rounding

Array = np.ndarray[Any, Any]
TO = st.one_of(
    st.builds(Rounding, st.just("float16"), st.integers(0, 20).map(lambda power: 2.0**-power)),
    st.just(Rounding("bfloat16", 1.0)),
)
SPECIAL = np.array(
    [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        np.nan,
        1e-45,
        -1e-39,
        2.0**-24,
        2.0**-25,
        2.0**-14,
        65504.0,
        65519.99,
        65520.0,
        -65536.0,
        3.4028235e38,
        3.3961775e38,
        1 + 2.0**-11,
        1 + 2.0**-8,
    ],
    np.float32,
)
"""Zeros, infinities, no number, subnormal ones of both kinds, the largest ones and what rounds beyond them, ties."""


def numbers(random: np.random.Generator, elements: int) -> Array:
    """Any float32 bits, ordinary numbers, and special ones."""
    any_bits = random.integers(0, 2**32, elements, dtype=np.uint32).view(np.float32)
    usual = (random.standard_normal(elements) * 2.0 ** random.integers(-40, 30, elements)).astype(np.float32)
    kind = random.integers(0, 3, elements)
    return np.select([kind == 0, kind == 1], [any_bits, usual], random.choice(SPECIAL, elements)).astype(np.float32)


def same(actual: Array, expected: Array) -> bool:
    """The same bits; where there is no number, none."""
    none = np.isnan(expected)
    bits = [one.view(np.uint32)[~none] for one in (actual, expected)]
    return bool(np.isnan(actual[none]).all()) and np.array_equal(*bits)


@settings(max_examples=150)
@given(to=TO, elements=st.integers(0, 70), offset=st.integers(0, 3), seed=st.integers(0, 2**32))
def test_numbers_and_sums_round_as_described_and_as_codes_do(
    to: Rounding, elements: int, offset: int, seed: int
) -> None:
    random = np.random.default_rng(seed)
    a, b = (numbers(random, elements + offset)[offset:] for _ in range(2))
    out = np.full(elements + 1, 7.0, np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for x, round_it in (
            (a, lambda: round_array(a, *to, out[:-1])),
            (a + b, lambda: round_sum(a, b, *to, out[:-1])),
        ):
            round_it()
            expected = rounded(x, *to)
            assert same(out[:-1], expected) and out[-1] == 7
            assert same(reference.rounded(x, *to), expected)
            codes, back = np.empty(elements, np.uint16), np.empty(elements, np.float32)
            Compression(*to).encode(x, codes)
            Compression(*to).decode(codes, back)
            assert back.tobytes() == out[:-1].tobytes(), "the codes of a number stand for the rounded one"


@settings(max_examples=100)
@given(to=TO, elements=st.integers(1, 70), seed=st.integers(0, 2**32))
def test_what_is_rounded_stays_and_travels_without_loss(to: Rounding, elements: int, seed: int) -> None:
    x = numbers(np.random.default_rng(seed), elements)
    round_array(x, *to, x)
    again, codes, back = np.empty_like(x), np.empty(elements, np.uint16), np.empty_like(x)
    round_array(x, *to, again)
    Compression(*to).encode(x, codes)
    Compression(*to).decode(codes, back)
    assert x.tobytes() == again.tobytes() == back.tobytes()


@pytest.mark.parametrize("to", [Rounding("float16", 2.0**-6), Rounding("bfloat16", 1.0)])
def test_the_operations_of_layers_are_those_of_numpy(to: Rounding) -> None:
    random = np.random.default_rng(1)
    a, b = (random.standard_normal((7, 30)).astype(np.float32) for _ in range(2))
    actual: list[list[Array]] = []
    for ops in (NumpyOps(), CpuOps()):
        for x, y in ((a, b), (a[:, ::2], b[:, ::2])):  # arrays with gaps are left to NumPy
            out, total = np.empty_like(x), x.copy()
            ops.round(x, to, out=out)
            ops.add_rounded(total, y, to, out=total)
            actual.append([out, total])
    for plain, vector in zip(actual[:2], actual[2:], strict=True):
        for expected, one in zip(plain, vector, strict=True):
            np.testing.assert_array_equal(one, expected)
