"""Optimizers on flat arrays against their formulas, at sizes around the chunk that the work is done in."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.nn import update
from dpsim.optimizer import AdamW, Lars, Sgd, changed
from dpsim.replica import Array

OPTIMIZERS: list[Sgd | AdamW] = [
    Sgd(momentum=0.0),
    Sgd(momentum=0.9, weight_decay=0.01),
    Sgd(momentum=0.9, weight_decay=0.01, nesterov=True),
    AdamW(weight_decay=0.0),
    AdamW(beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=0.1),
]


def state_of(optimizer: Sgd | AdamW, w: Array) -> dict[str, Array]:
    return {slot: np.zeros_like(w) for slot in optimizer.slots}


@pytest.mark.parametrize("size", [0, 1, 1000, 16_384, 16_385, 40_000])
@pytest.mark.parametrize("decay", [0.0, 0.01])
@pytest.mark.parametrize("nesterov", [False, True])
def test_sgd_is_its_formula_and_works_in_place(size: int, decay: float, nesterov: bool) -> None:
    w, g, v = np.random.default_rng(0).standard_normal((3, size))
    sgd = Sgd(momentum=0.9, weight_decay=decay, nesterov=nesterov)
    d = 0.25 * g + decay * w
    expected_v = 0.9 * v + d
    expected_w = w - 0.1 * (d + 0.9 * expected_v if nesterov else expected_v)
    kept = g.copy()
    update(w, g, {"velocity": v}, sgd, 0.1, 0.25, 1)
    np.testing.assert_allclose(v, expected_v, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(w, expected_w, rtol=1e-12, atol=1e-15)
    assert np.array_equal(g, kept)


@pytest.mark.parametrize("size", [0, 1, 16_385])
@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_adamw_is_its_formula_and_works_in_place(size: int, decay: float) -> None:
    rng = np.random.default_rng(1)
    w, g, m = rng.standard_normal((3, size))
    v = rng.random(size)
    adamw = AdamW(beta1=0.8, beta2=0.95, epsilon=1e-3, weight_decay=decay)
    step, rate, kept = 3, 0.02, g.copy()
    expected_m = 0.8 * m + 0.2 * (0.5 * g)
    expected_v = 0.95 * v + 0.05 * (0.5 * g) ** 2
    corrected_m, corrected_v = expected_m / (1 - 0.8**step), expected_v / (1 - 0.95**step)
    expected_w = (1 - rate * decay) * w - rate * corrected_m / (np.sqrt(corrected_v) + 1e-3)
    update(w, g, {"first_moment": m, "second_moment": v}, adamw, rate, 0.5, step)
    np.testing.assert_allclose(m, expected_m, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(v, expected_v, rtol=1e-12, atol=1e-15)
    np.testing.assert_allclose(w, expected_w, rtol=1e-12, atol=1e-15)
    assert np.array_equal(g, kept)


def test_adamws_first_step_goes_by_the_rate_whatever_the_gradients_size() -> None:
    """Bias correction makes m = g and v = g^2 in the first step, so every element moves by the rate."""
    g = np.array([1e-3, -1.0, 1e4])
    w = np.zeros(3)
    optimizer = AdamW(weight_decay=0.5, epsilon=1e-30)
    update(w, g, state_of(optimizer, w), optimizer, 0.01, 1.0, 1)
    np.testing.assert_allclose(w, -0.01 * np.sign(g), rtol=1e-12)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@settings(max_examples=20)
@given(data=st.data())
def test_an_elements_result_does_not_depend_on_its_place(optimizer: Sgd | AdamW, data: st.DataObject) -> None:
    """The same bits when the array is updated whole and in two parts cut anywhere, in float32."""
    size = data.draw(st.integers(1, 40_000))
    cut = data.draw(st.integers(0, size))
    w, g = np.random.default_rng(size).standard_normal((2, size), np.float32)
    whole, parts = w.copy(), w.copy()
    state, split = state_of(optimizer, w), state_of(optimizer, w)
    for step in (1, 2, 3):
        update(whole, g, state, optimizer, 0.1 / step, 0.3, step)
        for some in (slice(0, cut), slice(cut, size)):
            update(parts[some], g[some], {k: v[some] for k, v in split.items()}, optimizer, 0.1 / step, 0.3, step)
    assert whole.tobytes() == parts.tobytes()
    assert all(state[slot].tobytes() == split[slot].tobytes() for slot in state)
    assert not np.array_equal(whole, w)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_numpy_numbers_do_not_widen_float32(optimizer: Sgd | AdamW) -> None:
    w, g = np.ones((2, 10), np.float32)
    state = state_of(optimizer, w)
    update(w, g, state, optimizer, np.float64(0.1), np.float64(0.5), 1)
    assert {a.dtype for a in (w, *state.values())} == {np.dtype(np.float32)}
    assert np.all(w < 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
def test_padding_of_zeros_stays_zero(optimizer: Sgd | AdamW) -> None:
    w, g = np.zeros((2, 10), np.float32)
    state = state_of(optimizer, w)
    for step in (1, 2):
        update(w, g, state, optimizer, 0.1, 0.5, step)
    assert not any(array.any() for array in (w, *state.values()))


@pytest.mark.torch
@pytest.mark.parametrize("optimizer", OPTIMIZERS, ids=str)
@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_ten_steps_equal_pytorchs_under_a_changing_rate(optimizer: Sgd | AdamW, dtype: str) -> None:
    import torch

    rng = np.random.default_rng(2)
    w = rng.standard_normal(50).astype(dtype)
    parameter = torch.nn.Parameter(torch.from_numpy(w.copy()))
    decay = optimizer.weight_decay
    if isinstance(optimizer, Sgd):
        more = {"momentum": optimizer.momentum, "nesterov": optimizer.nesterov}
        theirs = torch.optim.SGD([parameter], lr=0.1, weight_decay=decay, **more)
    else:
        betas = (optimizer.beta1, optimizer.beta2)
        theirs = torch.optim.AdamW([parameter], lr=0.1, weight_decay=decay, betas=betas, eps=optimizer.epsilon)
    state = state_of(optimizer, w)
    for step in range(1, 11):
        g = rng.standard_normal(50).astype(dtype)
        rate = 0.1 / step
        theirs.param_groups[0]["lr"] = rate
        parameter.grad = torch.from_numpy((g * 0.25).astype(dtype))
        theirs.step()
        update(w, g, state, optimizer, rate, 0.25, step)
    rtol = 1e-12 if dtype == "float64" else 2e-5
    np.testing.assert_allclose(w, parameter.detach().numpy(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize(
    ("kind", "settings", "message"),
    [
        (Sgd, {"learning_rate": -1.0}, "learning_rate is -1.0"),
        (Sgd, {"momentum": math.nan}, "momentum is nan"),
        (Sgd, {"momentum": 0.0, "nesterov": True}, "leave nesterov out"),
        (AdamW, {"beta1": 1.0}, "beta1 is 1.0"),
        (AdamW, {"beta2": -0.1}, "beta2 is -0.1"),
        (AdamW, {"epsilon": 0.0}, "epsilon is 0.0"),
        (Lars, {"learning_rate": math.nan}, "learning_rate is nan"),
        (Lars, {"momentum": -0.5}, "momentum is -0.5"),
        (Lars, {"weight_decay": -1.0}, "weight_decay is -1.0"),
        (Lars, {"trust_coefficient": 0.0}, "trust_coefficient is 0.0"),
        (Lars, {"trust_coefficient": math.inf}, "trust_coefficient is inf"),
        (AdamW, {"weight_decay": math.inf}, "weight_decay is inf"),
    ],
)
def test_a_setting_out_of_range_is_refused(kind: Any, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        kind(**settings)
    assert message in str(caught.value)


def test_settings_change_an_optimizer_and_another_name_takes_its_defaults() -> None:
    base = Sgd(weight_decay=1e-3)
    assert changed(base, None, {}) == changed(base, "sgd", {}) == base
    assert changed(base, None, {"momentum": 0.5}) == Sgd(weight_decay=1e-3, momentum=0.5)
    assert changed(base, "adamw", {"learning_rate": 0.1}) == AdamW(learning_rate=0.1)
    assert changed(base, "lars", {"trust_coefficient": 0.01}) == Lars(trust_coefficient=0.01)
    with pytest.raises(ConfigError, match=r"trust_coefficient is 0\.01, and sgd has none"):
        changed(base, None, {"trust_coefficient": 0.01})
    with pytest.raises(ConfigError, match=r"momentum is 0\.5, and adamw has none"):
        changed(base, "adamw", {"momentum": 0.5})
    with pytest.raises(ConfigError, match="did you mean 'adamw'"):
        changed(base, "adam", {})
