"""Steps to a target against the batch, the gradient noise scale, and which devices pay."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.model.critical_batch import (
    StepsFit,
    fit_steps,
    gradient_noise,
    paying_devices,
    power_law,
    same_samples,
)


@given(st.floats(1, 1e5), st.floats(10, 1e5))
def test_a_fit_recovers_the_least_steps_and_the_noise_batch(least: float, noise: float) -> None:
    curve = StepsFit(min_steps=least, noise_batch=noise)
    fit = fit_steps({int(b): curve.steps(int(b)) for b in (noise / 3 + 1, noise + 2, noise * 4 + 3)})
    assert fit.min_steps == pytest.approx(least, rel=1e-6) and fit.noise_batch == pytest.approx(noise, rel=1e-6)


def test_steps_samples_and_efficiency_agree() -> None:
    fit = StepsFit(min_steps=10, noise_batch=400)
    for batch in (1, 50, 400, 3000):
        samples, least = fit.steps(batch) * batch, fit.min_steps * fit.noise_batch
        assert (fit.steps(batch) / 10 - 1) * (samples / least - 1) == pytest.approx(1)
        assert fit.efficiency(batch) == pytest.approx(least / samples)
        assert fit.time_s(batch, 0.2) == pytest.approx(least / fit.goodput(batch, batch / 0.2))


def test_too_few_batches_and_steps_that_show_no_least_are_refused_in_words() -> None:
    with pytest.raises(ConfigError, match="at 2 global batches") as caught:
        fit_steps({16: 100.0, 32: 60.0})
    assert "3 or more" in caught.value.allowed
    with pytest.raises(ConfigError, match="fall as fast as the batch grows") as caught:
        fit_steps({16: 640.0, 32: 310.0, 64: 150.0})
    assert "larger" in caught.value.remedy
    with pytest.raises(ConfigError, match="do not fall"):
        fit_steps({16: 10.0, 32: 11.0, 64: 12.0})


def test_the_baselines_go_through_a_line_in_logarithms() -> None:
    steps = {16: 160.0, 64: 40.0, 256: 10.0}
    assert power_law(steps, 1024) == pytest.approx(2.5) and same_samples(steps, 32) == pytest.approx(80)


def test_the_gradient_noise_is_unbiased_for_normal_gradients() -> None:
    generator = np.random.default_rng(3)
    mean, deviation = generator.normal(size=200) * 0.3, 2.0
    samples = mean + deviation * generator.normal(size=(400, 64, 200))
    big = (samples.mean(axis=1) ** 2).sum(axis=1)
    small = (samples.reshape(400, 8, 8, 200).mean(axis=2) ** 2).sum(axis=2).mean(axis=1)
    trace, square = gradient_noise(small.tolist(), big.tolist(), 8, 64)
    assert trace == pytest.approx(200 * deviation**2, rel=0.02) and square == pytest.approx((mean**2).sum(), rel=0.05)
    with pytest.raises(ConfigError, match="gradient norms"):
        gradient_noise([1.0], [], 8, 64)


def test_devices_pay_until_a_doubling_saves_less_than_5_percent() -> None:
    assert paying_devices({1: 100.0, 2: 60.0, 4: 40.0, 8: 39.0, 16: 20.0}) == 4
    assert paying_devices({1: 100.0, 2: 120.0}) == 1
    assert paying_devices({2: 100.0, 16: 100 * 0.94**3}) == 16
    assert paying_devices({2: 100.0, 16: 100 * 0.96**3}) == 2
    with pytest.raises(ConfigError, match="no number of devices"):
        paying_devices({})


def test_a_fit_of_nonsense_cannot_be_made() -> None:
    for bad in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ConfigError):
            StepsFit(min_steps=bad, noise_batch=10)
