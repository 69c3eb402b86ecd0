"""Products of a dense layer against NumPy's, on awkward shapes; a sample's result does not depend on its batch."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from dpsim.choices import Choice, Choices, Operation, Problem
from dpsim.kernels import matmul, weight_gradient
from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.implementations import CANDIDATES

rows = st.integers(1, 70)
extent = st.sampled_from([1, 15, 16, 17, 31, 33, 48, 49, 63, 64, 65])
"""Inputs and outputs: whole vectors, one element more, one less. Each other remainder compiles kernels of its own."""
dtypes = st.sampled_from(["float32", "float64"])


def drawn(seed: int, shape: tuple[int, int], dtype: str) -> NDArray[Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def empty(*shape: int, dtype: str) -> NDArray[Any]:
    return np.full(shape, np.nan, dtype)


@settings(max_examples=60)
@given(rows, extent, extent, dtypes, st.integers(0, 2**32))
def test_the_three_products_of_a_dense_layer(m: int, k: int, n: int, dtype: str, seed: int) -> None:
    x, w, g = drawn(seed, (m, k), dtype), drawn(seed + 1, (k, n), dtype), drawn(seed + 2, (m, n), dtype)
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if dtype == "float32" else {"rtol": 1e-11, "atol": 1e-11}
    y, dw, dx = empty(m, n, dtype=dtype), empty(k, n, dtype=dtype), empty(m, k, dtype=dtype)
    matmul.product(x, w, y)
    weight_gradient.transposed_product(x, g, dw)
    np.testing.assert_allclose(y, x @ w, **tolerance)
    np.testing.assert_allclose(dw, x.T @ g, **tolerance)
    weight_gradient.blocked_transposed_product(x, g, blocked := empty(k, n, dtype=dtype))
    assert blocked.tobytes() == dw.tobytes()
    for product in (matmul.product_with_transposed, matmul.packed_with_transposed):
        dx[...] = np.nan
        product(g, w, dx)
        np.testing.assert_allclose(dx, g @ w.T, **tolerance)


@settings(max_examples=40)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=17), extent, extent, dtypes, st.integers(0, 2**32))
def test_gradients_of_leaves_are_added_along_the_tree(sizes: list[int], k: int, n: int, dtype: str, seed: int) -> None:
    leaves = tuple(int(edge) for edge in np.cumsum([3, *sizes]))
    x, g = drawn(seed, (leaves[-1], k), dtype), drawn(seed + 1, (leaves[-1], n), dtype)

    def alone(leaf: int) -> NDArray[Any]:
        start, stop = leaves[leaf : leaf + 2]
        weight_gradient.transposed_product(x[start:stop], g[start:stop], dw := empty(k, n, dtype=dtype))
        return dw

    weight_gradient.transposed_products(x, g, leaves, actual := empty(k, n, dtype=dtype))
    assert actual.tobytes() == fold(leaf_tree(len(sizes)), alone, operator.add).tobytes()


@pytest.mark.parametrize(("m", "k", "n"), [(19, 70, 600), (9, 33, 257), (40, 48, 512)])
def test_sums_over_more_inputs_than_a_panel_has(m: int, k: int, n: int) -> None:
    g, w = drawn(0, (m, n), "float64"), drawn(1, (k, n), "float64")
    matmul.packed_with_transposed(g, w, out := empty(m, k, dtype="float64"))
    np.testing.assert_allclose(out, g @ w.T, rtol=1e-11, atol=1e-11)


@settings(max_examples=20)
@given(st.integers(2, 40), extent, extent, st.integers(0, 2**32))
def test_a_samples_bits_do_not_depend_on_its_batch(m: int, k: int, n: int, seed: int) -> None:
    x, w, g = drawn(seed, (m, k), "float32"), drawn(seed + 1, (k, n), "float32"), drawn(seed + 2, (m, n), "float32")
    some = slice(m // 3, m // 3 + max(1, m // 2))
    products = (matmul.product, x, n), (matmul.product_with_transposed, g, k), (matmul.packed_with_transposed, g, k)
    for product, of, out in products:
        whole, part = empty(m, out, dtype="float32"), empty(len(x[some]), out, dtype="float32")
        product(of, w, whole)
        product(of[some], w, part)
        assert np.array_equal(whole[some], part)


@settings(max_examples=40)
@given(rows, st.integers(1, 600), st.one_of(extent, st.sampled_from([96, 97, 111, 120])), dtypes, st.integers(0, 2**32))
def test_neither_packing_nor_streaming_the_weights_changes_a_bit(m: int, k: int, n: int, dtype: str, seed: int) -> None:
    x, w = drawn(seed, (m, k), dtype), drawn(seed + 1, (k, n), dtype)
    matmul.product(x, w, plain := empty(m, n, dtype=dtype))
    matmul.packed_product(x, w, packed := empty(m, n, dtype=dtype))
    matmul.streamed_product(x, w, streamed := empty(m, n, dtype=dtype))
    assert plain.tobytes() == packed.tobytes() == streamed.tobytes()


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16"])
@pytest.mark.parametrize(("m", "k", "n"), [(5, 400, 401), (300, 400, 401), (5, 401, 10), (1, 30, 9), (0, 400, 401)])
@pytest.mark.parametrize("operation", ["product", "product_with_transposed", "transposed_product"])
def test_every_candidate_computes_the_same_at_every_size_and_dtype(
    operation: Operation, m: int, k: int, n: int, dtype: str
) -> None:
    x, w, g = drawn(0, (m, k), dtype), drawn(1, (k, n), dtype), drawn(2, (m, n), dtype)
    given, expected = {
        "product": ((x, w), x @ w),
        "product_with_transposed": ((g, w), g @ w.T),
        "transposed_product": ((x, g), x.T @ g),
    }[operation]
    problem = Problem(operation=operation, dtype=dtype, rows=m, sizes=(k, n))
    tolerance = 1e-2 if dtype == "float16" else 1e-3
    for name in CANDIDATES[operation]:
        if (name == "outer" and m != 1) or (name != "blas" and dtype == "float16"):
            continue
        ops = CpuOps()
        ops.use(Choices(kernels=(Choice(problem=problem.shape_class, candidate=name, time_ratios={}),)))
        getattr(ops, operation)(*given, (0, m), out := empty(*expected.shape, dtype=dtype))
        np.testing.assert_allclose(out, expected, rtol=tolerance, atol=tolerance * 30, err_msg=name)


@pytest.mark.parametrize("product", [matmul.product, matmul.streamed_product, matmul.packed_product])
def test_nan_and_infinity_arrive_in_their_row_alone(product: Callable[..., None]) -> None:
    x, w = np.ones((9, 400), np.float32), np.ones((400, 401), np.float32)
    x[3, 5], x[8, 399] = np.nan, np.inf
    product(x, w, y := empty(9, 401, dtype="float32"))
    assert np.isnan(y[3]).all() and np.isposinf(y[8]).all() and np.isfinite(np.delete(y, [3, 8], axis=0)).all()


@settings(max_examples=30)
@given(
    st.lists(st.integers(0, 40), min_size=2, max_size=9),
    st.sampled_from([(5, 7), (20, 20), (64, 30), (400, 350)]),
    st.data(),
)
def test_in_leaves_what_a_leaf_gives_does_not_depend_on_those_computed_with_it(
    sizes: list[int], weights: tuple[int, int], data: st.DataObject
) -> None:
    ops = CpuOps().in_leaves()
    leaves = tuple(int(edge) for edge in np.cumsum([0, *sizes]))
    k, n = weights
    x, w, g = drawn(0, (leaves[-1], k), "float32"), drawn(1, (k, n), "float32"), drawn(2, (leaves[-1], n), "float32")

    def computed(low: int, high: int) -> tuple[NDArray[Any], NDArray[Any]]:
        edges = tuple(edge - leaves[low] for edge in leaves[low : high + 1])
        some_x, some_g = x[leaves[low] : leaves[high]], g[leaves[low] : leaves[high]]
        y, dx = empty(len(some_x), n, dtype="float32"), empty(len(some_x), k, dtype="float32")
        ops.product(some_x, w, edges, out=y)
        ops.product_with_transposed(some_g, w, edges, out=dx)
        return y, dx

    low = data.draw(st.integers(0, len(sizes) - 1))
    high = data.draw(st.integers(low + 1, len(sizes)))
    for whole, part in zip(computed(0, len(sizes)), computed(low, high), strict=True):
        assert whole[leaves[low] : leaves[high]].tobytes() == part.tobytes()
