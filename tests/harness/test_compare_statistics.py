from typing import Any

import numpy as np
import pytest
from scipy.stats import bootstrap

from dpsim.errors import ConfigError
from dpsim.study.statistics import median_interval, median_ratio


def test_interval_holds_the_median_and_narrows_with_more_samples() -> None:
    rng = np.random.default_rng(0)
    few, many = median_interval(rng.normal(10, 1, 20).tolist()), median_interval(rng.normal(10, 1, 2000).tolist())
    for actual in (few, many):
        assert actual.low <= actual.median <= actual.high
    assert many.high - many.low < (few.high - few.low) / 3


def test_interval_covers_the_true_median_about_19_times_in_20() -> None:
    rng = np.random.default_rng(1)
    actual = [median_interval(rng.normal(0.5, 0.1, 40).tolist(), resamples=400) for _ in range(200)]
    assert 0.88 <= np.mean([i.low <= 0.5 <= i.high for i in actual]) <= 1.0


@pytest.mark.parametrize("samples", [[0.3], [0.3] * 7])
def test_one_sample_or_equal_samples_give_no_width(samples: list[float]) -> None:
    actual = median_interval(samples)
    assert (actual.low, actual.median, actual.high) == (0.3, 0.3, 0.3)
    assert actual.relative_half_width == 0


def test_ties_give_finite_ends() -> None:
    actual = median_interval([1.0, 1.0, 1.0, 2.0, 2.0])
    assert np.isfinite([actual.low, actual.high]).all()


def test_the_same_samples_give_the_same_interval() -> None:
    samples = np.random.default_rng(3).random(50).tolist()
    assert median_interval(samples) == median_interval(samples)


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_no_samples_or_samples_that_are_not_finite_are_refused(samples: list[float]) -> None:
    with pytest.raises(ConfigError):
        median_interval(samples)


@pytest.mark.parametrize("count", [2, 7, 36, 2**12])
def test_intervals_are_those_of_scipy(count: int) -> None:
    above, below = np.random.default_rng(count).lognormal(size=(2, count))
    options: dict[str, Any] = {"method": "percentile", "n_resamples": 1000, "vectorized": True}

    def ratio(a: Any, b: Any, axis: int) -> Any:
        return np.median(a, axis=axis) / np.median(b, axis=axis)

    batch = max(1, 2**20 // count)
    of_median = bootstrap((above,), np.median, batch=batch, rng=np.random.default_rng(0), **options)
    of_ratio = bootstrap((above, below), ratio, paired=True, rng=np.random.default_rng(0), **options)
    for actual, expected in ((median_interval(above), of_median), (median_ratio(above, below), of_ratio)):
        assert [actual.low, actual.high] == pytest.approx([*expected.confidence_interval], rel=1e-12)
