"""What a step waits for: the slowest device, its input, the host's launches; and what all communication costs it."""

from __future__ import annotations

import itertools
import math
from typing import Any

import msgspec
import numpy as np
import pytest
from scipy.special import ndtr
from small_step import machine, plan, workload

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Link, OverlapCost
from dpsim.model import predict, predict_points
from dpsim.model.slowest import expected_slowest, median_slowest
from dpsim.setting import Grid

SPREAD = tuple(np.quantile(np.random.default_rng(0).lognormal(0, 0.1, 10_000), (np.arange(20) + 0.5) / 20).tolist())
FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_the_expected_slowest_is_that_of_independent_draws(devices: int) -> None:
    draws = np.random.default_rng(1).choice(SPREAD, (200_000, devices)).max(axis=1)
    assert expected_slowest(SPREAD, devices) == pytest.approx(draws.mean(), rel=1e-3)


@pytest.mark.parametrize("devices", [1, 2, 4, 8, 9, 64])
def test_without_correlation_and_slow_devices_the_sum_over_quantiles_is_as_it_was(devices: int) -> None:
    def slowest(count: int) -> float:
        shares = (np.arange(len(SPREAD) + 1) / len(SPREAD)) ** count
        return float(np.diff(shares) @ np.array(SPREAD))

    beyond = (slowest(8) - slowest(4)) / math.log(2) * math.log(max(1.0, devices / 8))
    expected = slowest(min(devices, 8)) + beyond
    assert expected_slowest(SPREAD, devices) == pytest.approx(expected, rel=1e-13)
    assert expected_slowest(SPREAD, devices, slow_devices=(1.0, 1.0)) == pytest.approx(expected, rel=1e-12)
    assert expected_slowest(SPREAD, devices, correlation=1.0) == pytest.approx(np.mean(SPREAD), rel=1e-13)
    assert expected_slowest(SPREAD, devices, correlation=1e-12) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("slow", [(), (1.15,), (2.0, 1.1, 1.1)])
@pytest.mark.parametrize("correlation", [0.0, 0.3, 0.8, 0.999])
@pytest.mark.parametrize("devices", [2, 4, 8])
def test_the_expected_slowest_is_that_of_draws_with_a_common_part(
    devices: int, correlation: float, slow: tuple[float, ...]
) -> None:
    """Within four standard errors of 100,000 steps, each with a normal z that its devices have in common."""
    random = np.random.default_rng(7)
    common, own = random.standard_normal((100_000, 1)), random.standard_normal((100_000, devices))
    x = math.sqrt(correlation) * common + math.sqrt(1 - correlation) * own
    drawn = np.array(SPREAD)[(ndtr(x) * len(SPREAD)).astype(int)]
    drawn[:, : len(slow)] *= slow[:devices]
    slowest = drawn.max(axis=1)
    error = slowest.std() / math.sqrt(len(slowest))
    predicted = expected_slowest(SPREAD, devices, correlation=correlation, slow_devices=slow)
    assert abs(predicted - slowest.mean()) < 4 * error
    if not slow:  # the median is read off the line through the quantiles
        spread = workload(step_spread=SPREAD, step_correlation=correlation)
        largest = [spread.spread_at(share) for share in np.quantile(ndtr(x.max(axis=1)), (0.49, 0.5, 0.51))]
        assert largest[0] < median_slowest(spread, devices) < largest[2]


@pytest.mark.parametrize("devices", [2, 5, 8, 100])
def test_the_more_devices_are_slow_together_the_less_they_wait(devices: int) -> None:
    correlations = (0.0, 1e-6, 0.01, 0.1, 0.3, 0.5, 0.7, 0.9, 0.99, 0.9999, 1 - 1e-6, 1 - 1e-9, 1.0)
    slowest = [expected_slowest(SPREAD, devices, correlation=each) for each in correlations]
    assert all(later <= earlier + 1e-9 for earlier, later in itertools.pairwise(slowest))
    assert slowest[0] > slowest[6] > slowest[-1] == pytest.approx(np.mean(SPREAD), rel=1e-12)
    shares = [median_slowest(workload(step_spread=SPREAD, step_correlation=each), devices) for each in correlations]
    assert all(later <= earlier + 1e-6 for earlier, later in itertools.pairwise(shares))
    assert shares[-1] == pytest.approx(1.0, abs=0.01) and shares[0] > 1.01


def test_what_the_slowest_takes_is_the_mean_over_steps_of_a_correlated_workload() -> None:
    def waiting_s(correlation: float) -> float:
        trained = workload(step_spread=SPREAD, step_correlation=correlation)
        four = plan(devices=4, global_batch=16, algorithm="ring")
        return predict(trained, machine(link=FREE), four).waiting_for_slowest_s

    ratio = expected_slowest(SPREAD, 4, correlation=0.5) / expected_slowest(SPREAD, 1)
    assert waiting_s(0.5) == pytest.approx(10.5 * (ratio - 1))
    assert waiting_s(0.0) > waiting_s(0.5) > waiting_s(1.0) == pytest.approx(0, abs=1e-12)


def test_a_device_that_is_half_as_fast_doubles_computation() -> None:
    def computed_s(devices: int, *slow: float, **changes: Any) -> float:
        on = machine(link=FREE, slow_devices=slow, **changes)
        ring = plan(devices=devices, global_batch=4 * devices, algorithm="ring")
        predicted = predict(workload(), on, ring)
        assert (predicted.forward_s, predicted.backward_s) == pytest.approx((3.0, 6.0), rel=1e-12) or changes
        assert predicted.step_s - predicted.exposed_communication_s == pytest.approx(predicted.step_s)
        return predicted.step_s

    assert computed_s(2) == pytest.approx(10.5, rel=1e-12) and computed_s(2, 1.0) == pytest.approx(10.5, rel=1e-12)
    for devices in (2, 3, 4, 100):
        assert computed_s(devices, 2.0) == pytest.approx(21.0, rel=1e-12)
        assert computed_s(devices, 1.5, 2.0, 1.2) == pytest.approx(21.0, rel=1e-12)
    assert computed_s(1, 2.0) == pytest.approx(10.5, rel=1e-12)
    slowdown = (ComputeSlowdown(devices=2, factor=1.5),)
    assert computed_s(2, 2.0, compute_slowdown=slowdown) == pytest.approx(31.5, rel=1e-12)


@pytest.mark.parametrize("devices", [2, 8, 9, 64])
def test_devices_that_are_all_equally_slow_wait_for_each_other_as_fast_ones_do(devices: int) -> None:
    slow = expected_slowest(SPREAD, devices, slow_devices=(3.0,) * devices)
    assert slow == pytest.approx(3 * expected_slowest(SPREAD, devices), rel=1e-12)
    one = expected_slowest(SPREAD, devices, slow_devices=(1.05,))
    assert expected_slowest(SPREAD, devices) < one < 1.05 * expected_slowest(SPREAD, devices)


def test_slow_devices_without_a_spread_are_no_extrapolation() -> None:
    on = machine(link=FREE, slow_devices=(2.0,))
    _, summary = predict_points(workload(), on, Grid.of(devices=16, local_batch=4, algorithm="ring"))
    assert not any("waiting for the slowest" in sentence for sentence in summary["cautions"])


def test_the_expected_slowest_grows_with_the_devices_without_a_jump() -> None:
    slowest = [expected_slowest(SPREAD, devices) for devices in (1, 2, 4, 8, 9, 16, 1000)]
    assert slowest == sorted(slowest) and slowest[4] - slowest[3] < 0.02
    assert slowest[5] - slowest[3] == pytest.approx(slowest[3] - slowest[2])
    assert expected_slowest((), 100) == 1.0 and expected_slowest((1.0,), 100) == 1.0


def test_devices_that_were_not_calibrated_wait_for_the_slowest() -> None:
    trained = workload(step_spread=SPREAD)
    alone = predict(trained, machine(link=FREE), plan(devices=1, global_batch=4))
    four = predict(trained, machine(link=FREE), plan(devices=4, global_batch=16, algorithm="ring"))
    ratio = expected_slowest(SPREAD, 4) / expected_slowest(SPREAD, 1)
    assert alone.waiting_for_slowest_s == 0 and four.step_s == pytest.approx(10.5 * ratio)
    assert four.waiting_for_slowest_s == pytest.approx(10.5 * (ratio - 1))
    assert (four.forward_s, four.backward_s, four.update_s) == pytest.approx((3.0, 6.0, 1.0))
    parts = (four.forward_s, four.backward_s, four.update_s, 0.5, four.waiting_for_slowest_s)
    assert sum(parts) + four.exposed_communication_s == pytest.approx(four.step_s)


def test_a_measured_slowdown_contains_the_waiting() -> None:
    slowdowns = (ComputeSlowdown(devices=2, factor=1.2), ComputeSlowdown(devices=4, factor=1.5))
    calibrated = machine(link=FREE, compute_slowdown=slowdowns)
    trained = workload(step_spread=SPREAD)
    waits = [
        predict(trained, calibrated, plan(devices=n, global_batch=4 * n, algorithm="ring")).waiting_for_slowest_s
        for n in (2, 3, 4, 8)
    ]
    assert waits[:3] == [0.0, 0.0, 0.0] and waits[3] > 0


def test_a_wait_that_is_extrapolated_is_said() -> None:
    trained = workload(step_spread=SPREAD)

    def said(devices: int, known: bool) -> bool:
        _, summary = predict_points(
            trained if known else workload(),
            machine(link=FREE),
            Grid.of(devices=devices, local_batch=4, algorithm="ring"),
        )
        return any("waiting for the slowest" in sentence for sentence in summary["cautions"])

    assert said(16, known=True) and not said(8, known=True) and not said(16, known=False)


def test_the_cost_of_communication_is_the_step_less_that_on_a_free_network() -> None:
    off = predict(workload(), machine(), plan())
    assert off.communication_cost_s == off.exposed_communication_s == 10.0
    table = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(10.0,), compute_loss_s=(5.0,)
    )
    beside = predict(workload(), machine(overlap=(table,)), plan(overlap="thread"))
    assert beside.communication_cost_s == pytest.approx(beside.step_s - 10.5)
    assert beside.communication_cost_s is not None
    assert beside.communication_cost_s == pytest.approx(beside.exposed_communication_s + 2.0)  # what overlap takes away
    assert predict(workload(), machine(), plan(devices=1, global_batch=4)).communication_cost_s == 0.0


def test_launches_of_forward_and_backward_may_differ() -> None:
    def step_s(launch_s: float, backward_s: float | None) -> float:
        layers = tuple(
            msgspec.structs.replace(layer, launch_s=launch_s, launch_backward_s=backward_s)
            for layer in workload().layers
        )
        return predict(workload(layers=layers), machine(), plan(devices=1, global_batch=4)).step_s

    assert step_s(5.0, None) == step_s(5.0, 5.0) == 0.5 + 4 * 5.0 + 2.0 + 1.0
    assert step_s(0.0, 5.0) == 0.5 + max(3.0, 5.0) + 5.0 + 2.0 + 1.0
    assert step_s(5.0, 0.0) == 0.5 + 2 * 5.0 + 2.0 + 6.0 + 1.0


def test_a_step_waits_for_its_input_unless_that_is_prefetched() -> None:
    """Four samples of 1 s in a step of 10.5 s; with 5 s a sample the input takes longer than the step."""
    one = plan(devices=1, global_batch=4)
    for cost_s, workers, prefetch, step_s in (
        (1.0, 1, False, 14.5),
        (1.0, 1, True, 10.5),
        (5.0, 1, True, 20.0),
        (5.0, 2, True, 10.5),
    ):
        trained = workload(input_s_per_sample=cost_s, input_workers=workers, input_prefetch=prefetch)
        prediction = predict(trained, machine(), one)
        assert prediction.step_s == step_s and prediction.waiting_for_input_s == step_s - 10.5
    accumulated = plan(devices=1, global_batch=8, accumulate=2)
    waits = predict(workload(input_s_per_sample=1.0), machine(), accumulated).waiting_for_input_s
    assert waits == 8.0


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"input_workers": 4, "input_s_per_sample": 1.0}, "without input_prefetch"),
        ({"input_prefetch": True}, "without input_s_per_sample"),
        ({"input_workers": 0}, "input_workers is 0"),
        ({"input_s_per_sample": -1.0}, "input_s_per_sample is -1"),
        ({"input_s_per_sample": math.inf}, "input_s_per_sample is inf"),
    ],
)
def test_contradictions_about_the_input_are_refused(fields: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        msgspec.structs.replace(workload(), **fields).__post_init__()
