"""Kernels against the NumPy operations that define their meaning, on awkward shapes; and what their bits depend on."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.kernels import update
from dpsim.kernels.allreduce.tree import fold, leaf_tree
from dpsim.kernels.vector import even_parts
from dpsim.nn.cpu_ops import CpuOps
from dpsim.nn.layer import Buffers
from dpsim.nn.numpy_ops import NumpyOps
from dpsim.replica import Array

CPU, NUMPY = CpuOps(), NumpyOps()
DTYPES = [np.float32, np.float64]


@pytest.fixture(scope="module", autouse=True)
def _cache_of_its_own(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Shapes made up here are met once: they should not fill the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("DPSIM_CACHE_DIR", str(folder))
        yield folder


def close(actual: Array, expected: Array, scale: float = 1.0) -> None:
    tolerance = 1e-5 if actual.dtype == np.float32 else 1e-13
    np.testing.assert_allclose(actual, expected, rtol=20 * tolerance, atol=tolerance * max(scale, 1.0))


@st.composite
def convolutions(draw: st.DrawFn) -> dict[str, int]:
    return {
        "samples": draw(st.integers(0, 3)),
        "height": draw(st.integers(1, 12)),
        "width": draw(st.integers(1, 40)),
        "inputs": draw(st.integers(1, 20)),
        "outputs": draw(st.one_of(st.integers(1, 20), st.sampled_from([32, 70]))),
        "kernel": draw(st.sampled_from([1, 3, 5])),
        "stride": draw(st.integers(1, 3)),
    }


def arrays_of(
    dtype: type, *, samples: int, height: int, width: int, inputs: int, outputs: int, kernel: int, stride: int
) -> tuple[Array, Array, Array]:
    """(x, weight, output gradient) of a convolution."""
    random = np.random.default_rng(0)
    out = (samples, -(-height // stride), -(-width // stride), outputs)
    shapes = ((samples, height, width, inputs), (kernel, kernel, inputs, outputs), out)
    x, weight, grad = (random.standard_normal(shape).astype(dtype) for shape in shapes)
    return x, weight, grad


def all_three(ops: NumpyOps, x: Array, weight: Array, grad: Array, stride: int) -> tuple[Array, Array, Array]:
    work = Buffers(ops, x.dtype)
    y, dx, dw = np.full_like(grad, np.nan), np.full_like(x, np.nan), np.full_like(weight, np.nan)
    ops.conv2d(x, weight, stride, (0, len(x)), y, work)
    ops.conv2d_input_gradient(grad, weight, stride, (0, len(x)), dx, work)
    ops.conv2d_weight_gradient(x, grad, (0, len(x)), stride, dw, work)
    return y, dx, dw


@settings(max_examples=12)
@given(convolutions(), st.sampled_from(DTYPES), st.lists(st.integers(0, 2), min_size=1, max_size=9))
def test_weight_gradients_of_leaves_are_added_along_the_tree(
    shapes: dict[str, int], dtype: type, sizes: list[int]
) -> None:
    shapes |= {"samples": max(sum(sizes), 1)}
    sizes[-1] += shapes["samples"] - sum(sizes)
    leaves = tuple(int(edge) for edge in np.cumsum([0, *sizes]))
    x, weight, grad = arrays_of(dtype, **shapes)
    work, stride = Buffers(CPU, x.dtype), shapes["stride"]

    def alone(leaf: int) -> Array:
        start, stop = leaves[leaf : leaf + 2]
        out = np.full_like(weight, np.nan)
        CPU.conv2d_weight_gradient(x[start:stop], grad[start:stop], (0, stop - start), stride, out, work)
        return out

    CPU.conv2d_weight_gradient(x, grad, leaves, stride, actual := np.full_like(weight, np.nan), work)
    assert actual.tobytes() == fold(leaf_tree(len(sizes)), alone, operator.add).tobytes()


@settings(max_examples=12)
@given(convolutions(), st.sampled_from(DTYPES))
def test_convolutions_are_those_of_numpy(shapes: dict[str, int], dtype: type) -> None:
    x, weight, grad = arrays_of(dtype, **shapes)
    actual = all_three(CPU, x, weight, grad, shapes["stride"])
    for mine, expected in zip(actual, all_three(NUMPY, x, weight, grad, shapes["stride"]), strict=True):
        close(mine, expected, scale=float(np.abs(expected).max(initial=1)))


@settings(max_examples=40)
@given(convolutions())
def test_the_gradients_of_numpys_convolution_are_its_adjoints(shapes: dict[str, int]) -> None:
    """sum(conv(x, w) g) = sum(x dx(g, w)) = sum(w dw(x, g)): the convolution is linear in x and in w."""
    x, weight, grad = arrays_of(np.float64, **shapes)
    y, dx, dw = all_three(NUMPY, x, weight, grad, shapes["stride"])
    product = float((y * grad).sum())
    assert float((x * dx).sum()) == pytest.approx(product, rel=1e-9, abs=1e-9)
    assert float((weight * dw).sum()) == pytest.approx(product, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("stride", [1, 2, 3])
def test_numpys_convolution_is_its_definition(stride: int) -> None:
    x, weight, grad = arrays_of(np.float64, samples=2, height=5, width=7, inputs=2, outputs=3, kernel=3, stride=stride)
    padded = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    same = sum(padded[:, i : i + 5, j : j + 7] @ weight[i, j] for i in range(3) for j in range(3))
    close(all_three(NUMPY, x, weight, grad, stride)[0], np.asarray(same)[:, ::stride, ::stride])


@pytest.mark.parametrize(("inputs", "outputs"), [(channels, 21 - channels) for channels in range(1, 21)])
def test_every_number_of_channels(inputs: int, outputs: int) -> None:
    x, weight, grad = arrays_of(
        np.float32, samples=2, height=3, width=2, inputs=inputs, outputs=outputs, kernel=1, stride=1
    )
    for mine, expected in zip(all_three(CPU, x, weight, grad, 1), all_three(NUMPY, x, weight, grad, 1), strict=True):
        close(mine, expected, scale=float(np.abs(expected).max()))


def test_a_samples_bits_do_not_depend_on_its_batch() -> None:
    x, weight, grad = arrays_of(np.float32, samples=9, height=6, width=7, inputs=5, outputs=18, kernel=3, stride=2)
    y, dx, _ = all_three(CPU, x, weight, grad, 2)
    for start, stop in ((0, 1), (3, 4), (2, 7)):
        some_y, some_dx, _ = all_three(CPU, x[start:stop].copy(), weight, grad[start:stop].copy(), 2)
        assert some_y.tobytes() == y[start:stop].tobytes() and some_dx.tobytes() == dx[start:stop].tobytes()


def test_a_nan_reaches_every_output_pixel_that_sees_it() -> None:
    x, weight, grad = arrays_of(np.float32, samples=1, height=6, width=6, inputs=2, outputs=3, kernel=3, stride=1)
    x[0, 2, 5, 1] = np.nan
    y, _, dw = all_three(CPU, x, weight, grad, 1)
    assert np.argwhere(np.isnan(y[0, :, :, 0])).tolist() == [[h, w] for h in (1, 2, 3) for w in (4, 5)]
    assert np.isnan(dw[:, :, 1]).sum() == 6 * 3 and not np.isnan(dw[:, :, 0]).any()


@settings(max_examples=10)
@given(
    rows=st.one_of(st.integers(1, 9), st.integers(60, 300)),
    channels=st.one_of(st.integers(1, 20), st.sampled_from([33, 64, 65, 130])),
    dtype=st.sampled_from(DTYPES),
)
def test_batch_norm_is_that_of_numpy(rows: int, channels: int, dtype: type) -> None:
    random = np.random.default_rng(1)
    x = (5 + 3 * random.standard_normal((rows, channels))).astype(dtype)
    grad, (scale, shift, slope) = (random.standard_normal((n, channels)).astype(dtype) for n in (rows, 3))
    results = []
    for ops in (CPU, NUMPY):
        mean, squares, dot, total = np.full((4, channels), np.nan, dtype)
        y, dx = np.full_like(x, np.nan), grad.copy()
        ops.channel_moments(x, mean, squares)
        ops.channel_normalise(x, mean, scale, shift, y)
        ops.channel_normalise_sums(grad, x, mean, dot, total)
        ops.channel_normalise_backward(dx, x, mean, scale, slope, shift)
        results.append((mean, squares, dot, total, y, dx))
    for mine, expected in zip(*results, strict=True):
        close(mine, expected, scale=10 + np.sqrt(rows))


def test_statistics_of_a_long_column_far_from_zero_keep_their_accuracy() -> None:
    x = np.random.default_rng(0).standard_normal((100_000, 3), np.float32) + np.float32(1000)
    mean, squares = np.empty((2, 3), np.float32)
    CPU.channel_moments(x, mean, squares)
    exact = x.astype(np.float64)
    np.testing.assert_allclose(mean, exact.mean(axis=0), rtol=1e-6)
    np.testing.assert_allclose(squares / 100_000, exact.var(axis=0), rtol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 15, 16, 17, 100])
def test_relu_is_that_of_numpy(size: int, dtype: type) -> None:
    x = np.random.default_rng(0).standard_normal(size).astype(dtype)
    x[:5] = [np.nan, np.inf, -np.inf, 0.0, -0.0][: len(x)]
    for ops in (CPU, NUMPY):
        y, mask, grad = np.empty_like(x), np.zeros(size, bool), np.ones_like(x)
        ops.relu(x, y, mask)
        ops.keep_where(grad, mask)
        assert np.array_equal(y, np.maximum(x, 0), equal_nan=True)
        assert np.array_equal(mask, x > 0) and np.array_equal(grad, mask) and mask.view(np.uint8).max(initial=0) <= 1


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_has_the_bits_of_its_formula(nesterov: bool, decay: float, dtype: type) -> None:
    for size in (0, 1, 100):
        w, g, v = np.random.default_rng(0).standard_normal((3, size)).astype(dtype)
        step = g * dtype(0.25) + w * dtype(decay)
        expected_v = v * dtype(0.9) + step
        expected_w = w - (step + expected_v * dtype(0.9) if nesterov else expected_v) * dtype(0.1)
        update.sgd(w, g, v, 0.25, 0.9, decay, 0.1, nesterov)
        assert np.array_equal(w, expected_w) and np.array_equal(v, expected_v)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_adamw_is_its_formula(decay: float, dtype: type) -> None:
    w, g, m, v = np.random.default_rng(0).standard_normal((4, 37)).astype(dtype)
    v = np.abs(v)
    d = 0.25 * g
    first, second = 0.9 * m + 0.1 * d, 0.999 * v + 0.001 * d * d
    expected = (1 - 0.1 * decay) * w - 0.1 / 0.2 * first / (np.sqrt(second) / np.sqrt(0.3) + 1e-8)
    update.adamw(w, g, m, v, 0.25, 0.9, 0.999, 1e-8, decay, 0.1, 0.2, 0.3)
    for mine, wanted in ((w, expected), (m, first), (v, second)):
        close(mine, wanted)


@pytest.mark.parametrize("size", [5, 16, 40])
def test_an_element_has_the_same_bits_wherever_it_lies(size: int) -> None:
    parts = np.random.default_rng(0).standard_normal((4, 40)).astype(np.float32)
    parts[3] = np.abs(parts[3])
    whole, shifted = parts.copy(), parts[:, 40 - size :].copy()
    for arrays in (whole, shifted):
        update.sgd(arrays[0], arrays[1], arrays[2], 0.3, 0.9, 0.01, 0.1, nesterov=True)
        update.adamw(arrays[0], arrays[1], arrays[2], arrays[3], 0.3, 0.9, 0.99, 1e-8, 0.01, 0.1, 0.2, 0.3)
    assert all(a[40 - size :].tobytes() == b.tobytes() for a, b in zip(whole, shifted, strict=True))


def test_other_dtypes_and_views_are_left_to_numpy() -> None:
    x, y, mask = np.arange(-2, 4).astype(np.float16), np.empty(6, np.float16), np.zeros(6, bool)
    CPU.relu(x, y, mask)
    assert y.tolist() == [0, 0, 0, 1, 2, 3] and mask.tolist() == [False] * 3 + [True] * 3
    wide, out = np.arange(-6, 6, dtype=np.float32).reshape(6, 2), np.zeros((6, 2), np.float32)
    CPU.relu(wide[:, 0], out[:, 0], mask)
    assert out.tolist() == [[0, 0], [0, 0], [0, 0], [0, 0], [2, 0], [4, 0]]


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), (70, 16)])
def test_work_arrays_begin_at_a_cache_line_and_are_zero(shape: tuple[int, ...]) -> None:
    for dtype in (np.float32, np.float64, np.bool_):
        array = CPU.zeros(shape, dtype)
        assert array.shape == shape and array.dtype == dtype and array.flags.c_contiguous and not array.any()
        assert array.size == 0 or array.ctypes.data % 64 == 0


@given(st.integers(1, 300), st.integers(1, 24))
def test_even_parts_cover_all_and_differ_in_size_by_one_at_most(total: int, most: int) -> None:
    parts = [range(at, at + size) for start, end, size in even_parts(total, most) for at in range(start, end, size)]
    assert [i for part in parts for i in part] == list(range(total))
    sizes = {len(part) for part in parts}
    assert max(sizes) - min(sizes) <= 1
    assert max(sizes) <= most
    assert len(parts) == -(-total // most)
