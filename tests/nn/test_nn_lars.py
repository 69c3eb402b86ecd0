"""LARS against its formula in NumPy, on whole tensors and on parts of them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import pytest

from dpsim.nn.optimizer import LarsUpdate, Part
from dpsim.optimizer import Lars
from dpsim.replica import Array

SHAPES = [(1, 1), (7,), (33, 31), (5, 3, 2, 2), (1025, 1), (1,), (4, 0), (6, 5), (2, 3)]
ZERO_WEIGHTS, ZERO_GRADIENTS, BOTH_ZERO = 7, 3, 8
BOUNDS = np.cumsum([0, *(int(np.prod(shape)) for shape in SHAPES)]).tolist()
SETTINGS = Lars(momentum=0.8, weight_decay=0.01, trust_coefficient=0.02)


def flat_arrays(dtype: str) -> tuple[Array, Array]:
    """Parameters and gradients of the shapes, of very different sizes; those of some tensors are zero."""
    rng = np.random.default_rng(3)
    w, g = rng.standard_normal((2, BOUNDS[-1]))
    for n, (start, stop) in enumerate(itertools.pairwise(BOUNDS)):
        g[start:stop] *= 10.0 ** (n - 4)
        w[start:stop] *= n not in (ZERO_WEIGHTS, BOTH_ZERO)
        g[start:stop] *= n not in (ZERO_GRADIENTS, BOTH_ZERO)
    return w.astype(dtype), g.astype(dtype)


def parts_between(cuts: Sequence[int]) -> list[list[Part]]:
    """The parts of the tensors that lie between each two cuts: what each of several ranks would update."""
    ranks: list[list[Part]] = []
    for low, high in itertools.pairwise(cuts):
        parts, matrix = [], -1
        for shape, (start, stop) in zip(SHAPES, itertools.pairwise(BOUNDS), strict=True):
            matrix += len(shape) > 1
            if max(start, low) < min(stop, high):
                first = max(start, low)
                elements = min(stop, high) - first
                parts.append(Part(matrix if len(shape) > 1 else None, first, first, elements, first - low))
        ranks.append(parts)
    return ranks


def train(dtype: str, cuts: Sequence[int], steps: int, rate: float, settings: Lars = SETTINGS) -> tuple[Array, Array]:
    """Parameters and velocity after some steps on ranks that update what lies between the cuts."""
    w, g = flat_arrays(dtype)
    matrices = sum(len(shape) > 1 for shape in SHAPES)
    velocities = [np.zeros(high - low, dtype) for low, high in itertools.pairwise(cuts)]
    ranks = [
        LarsUpdate(w, g, v, parts, matrices, settings) for v, parts in zip(velocities, parts_between(cuts), strict=True)
    ]
    for step in range(steps):
        total = np.sum([rank.measure() for rank in ranks], axis=0)
        for rank in ranks:
            rank.apply(total, rate / (1 + step), 0.25)
    return w, np.concatenate(velocities)


def reference(steps: int, rate: float, settings: Lars = SETTINGS) -> tuple[Array, Array]:
    flat_w, flat_g = flat_arrays("float64")
    flat_v = np.zeros_like(flat_w)
    for step in range(steps):
        for shape, (start, stop) in zip(SHAPES, itertools.pairwise(BOUNDS), strict=True):
            w, g, v = flat_w[start:stop], 0.25 * flat_g[start:stop], flat_v[start:stop]
            trust, decay = 1.0, 0.0
            if len(shape) > 1:
                decay = settings.weight_decay
                of_w, of_g = np.linalg.norm(w), np.linalg.norm(g)
                if of_w > 0 and of_g > 0:
                    trust = settings.trust_coefficient * of_w / (of_g + decay * of_w)
            v[...] = settings.momentum * v + rate / (1 + step) * trust * (g + decay * w)
            w -= v
    return flat_w, flat_v


@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize(("dtype", "tolerance"), [("float64", 1e-12), ("float32", 2e-5)])
def test_it_is_its_formula(dtype: str, tolerance: float, decay: float) -> None:
    settings = Lars(momentum=0.8, weight_decay=decay, trust_coefficient=0.02)
    actual = train(dtype, (0, BOUNDS[-1]), 4, 0.5, settings)
    for got, expected in zip(actual, reference(4, 0.5, settings), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_how_tensors_are_divided_changes_no_bit(dtype: str) -> None:
    end = BOUNDS[-1]
    whole = train(dtype, (0, end), 3, 0.5)
    for cuts in ((0, 1, end), (0, 500, 516, end), (0, 16, 1024, 1024, 2000, end), (*range(0, end, 160), end)):
        for got, expected in zip(train(dtype, cuts, 3, 0.5), whole, strict=True):
            assert got.tobytes() == expected.tobytes(), cuts


def test_a_matrix_moves_by_its_own_norm_whatever_the_size_of_its_gradient() -> None:
    settings = Lars(momentum=0.0, weight_decay=0.0, trust_coefficient=0.02)
    before, _ = flat_arrays("float64")
    after, _ = train("float64", (0, BOUNDS[-1]), 1, 0.5, settings)
    for n in (0, 2, 4):
        own = slice(BOUNDS[n], BOUNDS[n + 1])
        assert np.linalg.norm(after[own] - before[own]) == pytest.approx(0.5 * 0.02 * np.linalg.norm(before[own]))


def test_gradients_of_zero_leave_decay_and_momentum_alone() -> None:
    own = slice(BOUNDS[BOTH_ZERO], BOUNDS[BOTH_ZERO + 1])
    w, v = train("float32", (0, BOUNDS[-1]), 3, 0.5)
    assert not w[own].any() and not v[own].any()
    own = slice(BOUNDS[ZERO_GRADIENTS], BOUNDS[ZERO_GRADIENTS + 1])
    before, _ = flat_arrays("float64")
    after, _ = train("float64", (0, BOUNDS[-1]), 1, 0.5)
    np.testing.assert_allclose(after[own], before[own] * (1 - 0.5 * 0.01), rtol=1e-12)
