"""What a step waits for: the slowest device, its input, the host's launches; and what all communication costs it."""

from __future__ import annotations

import math

import msgspec
import numpy as np
import pytest
from small_step import machine, plan, workload

from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Link, OverlapCost
from dpsim.predict import predict, predict_points
from dpsim.predict.prices import expected_slowest

SPREAD = tuple(np.quantile(np.random.default_rng(0).lognormal(0, 0.1, 10_000), (np.arange(20) + 0.5) / 20).tolist())
FREE = Link(latency_s=0.0, bandwidth_bytes_per_s=math.inf)


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
def test_the_expected_slowest_is_that_of_independent_draws(devices: int) -> None:
    draws = np.random.default_rng(1).choice(SPREAD, (200_000, devices)).max(axis=1)
    assert expected_slowest(SPREAD, devices) == pytest.approx(draws.mean(), rel=1e-3)


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
            trained if known else workload(), machine(link=FREE), [devices], [], local_batch=4, algorithm="ring"
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
        assert prediction.images_per_s == 4 / step_s
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
