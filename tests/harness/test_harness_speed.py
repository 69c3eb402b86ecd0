"""A machine whose speed changes: its two speeds from reference times, and samples brought to one speed."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim.errors import ConfigError
from dpsim.harness.measurement.speed import Mixture, Visits, factors, mixture, slow_factor, slowdown

SLOW = 1.45


def reference_times(share: float, count: int = 400, seed: int = 0, slow: float = SLOW) -> list[float]:
    """Times of 1 ms, of which a share is ``slow`` times longer, all within 2 % of that."""
    random = np.random.default_rng(seed)
    late = random.permutation(count) < round(share * count)
    return (1e-3 * np.where(late, slow, 1.0) * random.normal(1.0, 0.02, count)).tolist()


@given(share=st.floats(0.1, 0.9), slow=st.floats(1.25, 2.0), seed=st.integers(0, 1000))
def test_both_speeds_and_their_share_are_known_from_reference_times(share: float, slow: float, seed: int) -> None:
    actual = mixture(reference_times(share, seed=seed, slow=slow))
    assert actual.full_s == pytest.approx(1e-3, rel=0.01)
    assert actual.change == pytest.approx(slow, rel=0.02)
    assert actual.slow_share == pytest.approx(share, abs=0.01)


def test_no_estimate_jumps_where_the_share_passes_one_half() -> None:
    means = []
    for share in (0.48, 0.49, 0.5, 0.51, 0.52):
        actual = mixture(reference_times(share))
        means.append(actual.full_s + actual.slow_share * (actual.slow_s - actual.full_s))
    assert np.diff(means) == pytest.approx([0.01 * (SLOW - 1) * 1e-3] * 4, abs=2e-6)


@given(spread=st.floats(0.0, 0.02), seed=st.integers(0, 1000), count=st.integers(1, 300))
def test_a_steady_machine_has_one_speed_which_is_the_median(spread: float, seed: int, count: int) -> None:
    times = (1e-3 * np.random.default_rng(seed).normal(1.0, spread, count).clip(0.9, 1.1)).tolist()
    actual = mixture(times)
    assert actual == Mixture(full_s=float(np.median(times)), slow_s=float(np.median(times))) and actual.steady
    assert not actual.slow(times).any()


def test_a_few_disturbed_times_and_waiting_for_a_core_are_no_second_speed() -> None:
    times = reference_times(0.0)
    assert mixture([*times, 5e-3, 2e-3, 2e-3]).steady
    assert mixture(times + [3 * time for time in times]).steady


@pytest.mark.parametrize("times", [[], [1e-3, 0.0], [math.nan], [math.inf]])
def test_reference_times_that_cannot_have_been_measured_are_refused(times: list[float]) -> None:
    with pytest.raises(ConfigError, match="times of the reference computation"):
        mixture(times)


@given(exponent=st.floats(0.3, 1.5), share=st.floats(0.2, 0.8))
def test_samples_brought_to_full_speed_do_not_depend_on_the_speed(exponent: float, share: float) -> None:
    """Also where steps follow the speed less, or more, than the reference computation does."""
    references = reference_times(share)
    speeds = mixture(references)
    samples = 5e-3 * (np.array(references) / 1e-3) ** exponent
    factor = slow_factor(samples, references, speeds)
    assert factor == pytest.approx(SLOW**exponent, rel=0.02)
    assert samples / factors(references, speeds, factor) == pytest.approx(5e-3, rel=0.01)


def test_with_too_few_samples_at_a_speed_they_are_taken_to_follow_the_reference_computation() -> None:
    speeds = mixture(reference_times(0.5))
    assert slow_factor([5.0] * 20 + [9.0] * 5, [1e-3] * 20 + [1.45e-3] * 5, speeds) == speeds.change
    assert slow_factor([5.0] * 20 + [9.0] * 6, [1e-3] * 20 + [1.45e-3] * 6, speeds) == pytest.approx(1.8)


def test_on_a_steady_machine_samples_stay_as_they_are() -> None:
    speeds = mixture(reference_times(0.0))
    assert (factors([1e-3, 1.1e-3], speeds, 2.0) == 1.0).all()


def test_a_slowdown_does_not_depend_on_which_visits_were_slow() -> None:
    """One device takes 3 ms, two take 1.2 times as long; each visit is at a speed of its own."""
    one, two = Visits(), Visits()
    alone, together = reference_times(0.3, seed=1), reference_times(0.7, seed=2)
    for below_s, above_s in zip(alone, together, strict=True):
        one.add([3.0 * below_s] * 4, below_s)
        two.add([3.6 * above_s] * 4, above_s)
    ratio = slowdown(one, two, mixture(alone), mixture(together))
    assert ratio.median == pytest.approx(1.2, rel=0.01) and ratio.relative_half_width < 0.01
