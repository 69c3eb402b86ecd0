"""``profile``: a workload with one time a local batch, whose parts add up to a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.profile.profile import Profile, ProfileConfig, profile
from dpsim.harness.profile.slowdown import joined_slowdown
from dpsim.machine import ComputeSlowdown
from dpsim.optimizer import AdamW
from dpsim.workload import Workload, overhead_line

BATCHES = (4, 16, 256)


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def profiled() -> Workload:
    config = ProfileConfig(model="mlp:64,32", local_batches=(256, 4, 16, 4), seconds=0.5, optimizer=AdamW())
    return profile(config, quiet)


def test_a_workload_tells_how_much_its_optimizer_keeps(profiled: Workload) -> None:
    assert profiled.optimizer_slots == 2


def test_a_workload_tells_how_much_its_steps_vary_around_their_median(profiled: Workload) -> None:
    spread = profiled.step_spread
    assert len(spread) == 20 and list(spread) == sorted(spread)
    assert spread[0] < spread[-1] and spread[9] <= 1.02 and spread[10] >= 0.98


def test_every_layer_has_one_time_a_local_batch(profiled: Workload) -> None:
    assert profiled.local_batches == BATCHES
    assert [layer.name for layer in profiled.layers] == ["flatten", "dense1", "relu1", "dense2", "relu2", "dense3"]
    for layer in profiled.layers:
        assert layer.gradient_ready_s is not None
        for times in (layer.forward_s, layer.backward_s, layer.gradient_ready_s):
            assert len(times) == len(BATCHES) and all(t >= 0 for t in times)
        assert all(r <= b * (1 + 1e-9) for r, b in zip(layer.gradient_ready_s, layer.backward_s, strict=True))


def test_the_sums_are_plausible(profiled: Workload) -> None:
    sums = [sum(layer.forward_s[i] + layer.backward_s[i] for layer in profiled.layers) for i in range(len(BATCHES))]
    assert min(sums) > 0
    assert profiled.update_s > 0 and profiled.overhead_s >= 0
    assert profiled.gradient_bytes == 4 * (64 * 64 + 64 + 64 * 32 + 32 + 32 * 10 + 10)
    assert not profiled.emulated_compute and "dpsim profile" in profiled.source


def test_several_devices_at_once_are_compared_with_one_at_the_same_batch(on_ranks: Callable[..., Any]) -> None:
    config = ProfileConfig(model="mlp:8", local_batches=(8, 16), concurrent=((2, 8),), seconds=0.2)
    task = "dpsim.harness.profile.on_ranks:profile_on_ranks"
    actual = codec.decode(on_ranks(task, codec.to_builtins(config), devices=2), Profile, "profile")
    (slowdown,) = actual.compute_slowdown
    assert slowdown.devices == 2 and 0.05 < slowdown.factor < 100
    assert actual.workload.local_batches == (8, 16)


@pytest.mark.parametrize("batches", [(), (0, 4)])
def test_impossible_local_batches_are_refused(batches: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError, match="local batches"):
        ProfileConfig(local_batches=batches)


def test_a_local_batch_above_the_data_set_is_refused() -> None:
    """Its time would be that of a smaller batch."""
    config = ProfileConfig(
        model="mlp:4", dataset="synthetic:2x2x1,classes=2,train=20,test=4", local_batches=(32,), seconds=0.1
    )
    with pytest.raises(ConfigError, match="32"):
        profile(config, quiet)


def test_a_slowdown_at_two_lengths_of_a_step_is_a_factor_and_seconds() -> None:
    def slowdown(alone_s: float, together_s: float) -> tuple[float, ComputeSlowdown]:
        return alone_s, ComputeSlowdown(devices=2, factor=together_s / alone_s, half_width=0.02)

    joined = joined_slowdown([slowdown(10.0, 12.5), slowdown(1.0, 1.7)])
    assert (joined.factor, joined.added_s, joined.half_width) == (pytest.approx(1.2), pytest.approx(0.5), 0.02)
    growing = joined_slowdown([slowdown(1.0, 1.1), slowdown(10.0, 12.0)])
    assert (growing.factor, growing.added_s) == (1.2, 0.0)
    assert joined_slowdown([slowdown(3.0, 3.9)]) == slowdown(3.0, 3.9)[1]
    steep = joined_slowdown([slowdown(9.0, 12.0), slowdown(10.0, 12.0)])
    assert (steep.factor, steep.added_s) == (1.0, pytest.approx(2.0))


@pytest.mark.parametrize("seconds", [[1e-4, -2e-4, 3e-4], [-1e-4, -2e-4, -3e-4], [-1e-3, 0.0, 1e-3], [0.0, 0.0, 0.0]])
def test_an_overhead_measured_below_zero_makes_no_negative_line(seconds: list[float]) -> None:
    overhead_s, per_sample_s = overhead_line([8, 16, 64], seconds)
    assert overhead_s >= 0 and per_sample_s >= 0
