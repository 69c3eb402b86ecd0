"""Learning-rate schedules: closed forms, continuity, and momentum correction as an equality of two forms of SGD."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.learning_rate import Constant, Cosine, RateSchedule, Step, learning_rate, parse_decay
from dpsim.nn import update
from dpsim.optimizer import Sgd

DECAYS = st.one_of(
    st.just(Constant()),
    st.builds(Cosine, final_fraction=st.floats(0, 1)),
    st.builds(
        Step,
        milestones=st.lists(st.integers(5, 12), min_size=1, max_size=3, unique=True).map(lambda m: tuple(sorted(m))),
        gamma=st.floats(0.01, 0.99),
    ),
)


def rates(schedule: RateSchedule, base: float = 0.1, batch: int = 32, per_epoch: int = 10, total: int = 100) -> Any:
    return [
        learning_rate(schedule, base, step, global_batch=batch, steps_per_epoch=per_epoch, total_steps=total)
        for step in range(total)
    ]


def test_without_a_schedule_the_rate_is_the_optimizers() -> None:
    assert set(rates(RateSchedule())) == {0.1}


def test_a_large_batch_warms_up_from_the_unscaled_rate_to_the_scaled_one_by_equal_steps() -> None:
    """Goyal et al., section 2.2: from rate to k rate by a constant amount each step, over 5 epochs; k = 8 there."""
    actual = rates(RateSchedule(reference_batch=256, warmup_epochs=5), base=0.1, batch=2048)
    assert actual[0] == pytest.approx(0.1)
    assert actual[50:] == [pytest.approx(0.8)] * 50
    np.testing.assert_allclose(np.diff(actual[:51]), 0.7 / 50)


def test_without_scaling_the_rate_rises_from_one_such_step() -> None:
    for more in ({}, {"reference_batch": 32}):
        actual = rates(RateSchedule(warmup_epochs=0.4, **more), base=1.0)
        assert actual[:6] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 1.0])


def test_a_smaller_batch_than_the_reference_scales_the_rate_down() -> None:
    assert set(rates(RateSchedule(reference_batch=64))) == {0.05}


def test_steps_decay_at_their_epochs() -> None:
    actual = rates(RateSchedule(decay=Step(milestones=(3, 6.55), gamma=0.5)), base=1.0)
    assert [len(list(g)) for _, g in itertools.groupby(actual)] == [30, 36, 34]
    assert sorted(set(actual), reverse=True) == [1.0, 0.5, 0.25]


def test_a_cosine_begins_at_the_rate_is_halfway_in_the_middle_and_ends_at_its_floor() -> None:
    schedule = RateSchedule(decay=Cosine(final_fraction=0.2), warmup_epochs=2)
    actual = rates(schedule, base=1.0)
    assert actual[20] == 1.0
    assert actual[60] == pytest.approx(0.6)
    at_end = {"global_batch": 32, "steps_per_epoch": 10, "total_steps": 100}
    assert learning_rate(schedule, 1.0, 100, **at_end) == pytest.approx(0.2)
    assert learning_rate(schedule, 1.0, 150, **at_end) == pytest.approx(0.2)
    assert all(a > b for a, b in itertools.pairwise(actual[20:]))


@given(
    decay=DECAYS,
    warmup=st.floats(0, 5),
    batch=st.integers(1, 1000),
    reference=st.one_of(st.none(), st.integers(1, 1000)),
)
def test_the_rate_rises_to_the_scaled_one_and_never_exceeds_it(
    decay: Any, warmup: float, batch: int, reference: int | None
) -> None:
    schedule = RateSchedule(decay=decay, warmup_epochs=warmup, reference_batch=reference)
    actual = rates(schedule, base=1.0, batch=batch)
    first = math.ceil(warmup * 10)
    whole = batch / (reference or batch)
    if not isinstance(decay, Step) or first < decay.milestones[0] * 10:
        assert actual[first] == pytest.approx(whole)  # continuous: the ramp's end is the decay's beginning
    assert all(a < b for a, b in itertools.pairwise(actual[:first]))
    assert all(a >= b * (1 - 1e-12) for a, b in itertools.pairwise(actual[first:]))
    assert max(actual) <= whole * (1 + 1e-12) and min(actual) >= 0
    assert codec.decode(codec.to_builtins(schedule), RateSchedule, "schedule") == schedule


def test_our_sgd_under_a_changing_rate_equals_the_other_form_with_momentum_correction() -> None:
    """Goyal et al., Remark 2: v = m v + rate g with v corrected by rate_t / rate_(t-1), and not without."""
    rng = np.random.default_rng(0)
    schedule = RateSchedule(decay=Step(milestones=(6, 8)), warmup_epochs=4, reference_batch=8)
    ours, velocity = np.ones(20), {"velocity": np.zeros(20)}
    other, v = np.ones(20), np.zeros(20)
    uncorrected, u = np.ones(20), np.zeros(20)
    before = None
    for step, rate in enumerate(rates(schedule)):
        g = rng.standard_normal(20)
        update(ours, g, velocity, Sgd(momentum=0.9), rate, 1.0, step + 1)
        correction = rate / before if before else 1.0
        v = 0.9 * correction * v + rate * g
        other -= v
        u = 0.9 * u + rate * g
        uncorrected -= u
        before = rate
    np.testing.assert_allclose(ours, other, rtol=1e-9)
    assert np.abs(ours - uncorrected).max() > 1e-2


@pytest.mark.parametrize(
    ("text", "decay"),
    [
        ("constant", Constant()),
        ("step:30,60,80", Step(milestones=(30, 60, 80))),
        ("step:1.5,gamma=0.2", Step(milestones=(1.5,), gamma=0.2)),
        ("cosine", Cosine()),
        ("cosine:0.01", Cosine(final_fraction=0.01)),
    ],
)
def test_a_schedule_reads_from_its_token(text: str, decay: Any) -> None:
    assert parse_decay(text) == decay


@pytest.mark.parametrize(
    "text",
    [
        "",
        "cosin",
        "step",
        "step:",
        "step:a",
        "step:3,gamma=x",
        "step:gamma=0.5",
        "cosine:",
        "cosine:1,2",
        "constant:1",
        "step:nan",
        "step:5,3",
        "step:0",
        "step:5,gamma=2",
        "cosine:2",
        "cosine:gamma=0.1",
        "step:inf",
    ],
)
def test_a_schedule_that_means_nothing_is_refused(text: str) -> None:
    with pytest.raises(ConfigError):
        parse_decay(text)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"warmup_epochs": -1.0}, "warmup_epochs is -1.0"),
        ({"warmup_epochs": math.inf}, "warmup_epochs is inf"),
        ({"reference_batch": 0}, "reference_batch is 0"),
        ({"warmup_epochs": 6.0, "decay": Step(milestones=(5.0,))}, "in 6 epochs of warm-up"),
    ],
)
def test_a_schedule_out_of_range_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        RateSchedule(**given)
