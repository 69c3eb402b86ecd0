"""How far a later mean may lie from a calibrated one, from block means of the calibration."""

from __future__ import annotations

import math

import numpy as np
import pytest

from dpsim.errors import ConfigError
from dpsim.study.scatter import later_error, later_mean_error, median_error


def stretches(kind: str, seed: int, count: int = 120) -> tuple[np.ndarray, np.ndarray]:
    """Times of two stretches of visits, one after the other: independent, or with a speed that lasts for 20 visits."""
    random = np.random.default_rng(seed)
    noise = random.normal(0, 0.05, 2 * count)
    if kind == "wandering":
        speed = 0.1 * random.normal()
        for visit in range(2 * count):
            speed = 0.95 * speed + 0.1 * math.sqrt(1 - 0.95**2) * random.normal()
            noise[visit] += speed
    times = np.exp(noise)
    return times[:count], times[count:]


@pytest.mark.parametrize(("kind", "least"), [("independent", 0.9), ("wandering", 0.8)])
def test_the_error_of_the_next_stretch_is_foreseen(kind: str, least: float) -> None:
    inside, widths = [], []
    for seed in range(200):
        first, second = stretches(kind, seed)
        error = later_mean_error(np.arange(len(first)), first)
        inside.append(abs(math.log(second.mean() / first.mean())) <= 1.645 * error)
        widths.append(error)
    assert np.mean(inside) >= least
    assert np.median(widths) < (0.03 if kind == "independent" else 0.2)


def test_a_wandering_speed_makes_the_error_much_larger_than_independent_times_do() -> None:
    errors = [
        np.median([later_mean_error(np.arange(120), stretches(kind, seed)[0]) for seed in range(50)])
        for kind in ("independent", "wandering")
    ]
    assert errors[1] > 2 * errors[0]


def test_constant_times_have_no_error_and_few_times_none_that_is_known() -> None:
    assert later_mean_error(np.arange(50), np.ones(50)) == 0.0
    assert later_mean_error(np.arange(5), [1.0, 2.0, 1.0, 2.0, 1.0]) == 0.0
    assert later_mean_error(np.zeros(50), np.random.default_rng(0).uniform(1, 2, 50)) == 0.0
    with pytest.raises(ConfigError, match="finite"):
        later_mean_error([0.0, 1.0], [1.0, -1.0])


def test_settings_of_other_lengths_are_one_series_in_time() -> None:
    """Both settings are twice as slow in the second half."""
    pace = np.repeat([1.0, 2.0], 20)
    assert later_error([(np.arange(40), step_s * pace) for step_s in (1.0, 7.0)]) > 0.2
    assert later_error([([], [])]) == 0.0


def test_the_error_of_a_median_falls_with_the_root_of_the_visits() -> None:
    random = np.random.default_rng(0)
    few, many = (median_error(np.exp(random.normal(0, 0.1, count))) for count in (100, 10_000))
    assert few == pytest.approx(0.0125, rel=0.3) and many == pytest.approx(0.00125, rel=0.1)
    assert median_error([1.0]) == 0.0
