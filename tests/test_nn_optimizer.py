"""SGD on flat arrays against its formula, at sizes around the chunk it works in."""

from __future__ import annotations

import numpy as np
import pytest

from dpsim.nn import sgd_update
from dpsim.plan import Sgd


@pytest.mark.parametrize("size", [0, 1, 1000, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("decay", [0.0, 0.01])
def test_sgd_is_its_formula_and_works_in_place(size: int, decay: float) -> None:
    w, g, v = np.random.default_rng(0).standard_normal((3, size))
    sgd = Sgd(learning_rate=0.1, momentum=0.9, weight_decay=decay)
    expected_v = 0.9 * v + (0.25 * g + decay * w)
    expected_w = w - 0.1 * expected_v
    kept = g.copy()
    sgd_update(w, g, v, sgd, 0.25)
    np.testing.assert_allclose(v, expected_v, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(w, expected_w, rtol=1e-12, atol=1e-15)
    assert np.array_equal(g, kept)


def test_a_numpy_scale_does_not_widen_float32() -> None:
    w, g, v = np.ones((3, 10), np.float32)
    sgd_update(w, g, v, Sgd(), np.float64(0.5))
    assert w.dtype == v.dtype == np.float32 and np.allclose(v, 1.4)
