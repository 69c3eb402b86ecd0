"""``profile``: a workload with one time a local batch, whose parts add up to a step."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.errors import ConfigError
from dpsim.machine import LEAST_SLOWDOWN, ComputeSlowdown, Network
from dpsim.optimizer import AdamW
from dpsim.plan import Plan
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.study.disturbance import Watcher
from dpsim.study.profile import (
    FORWARD_S,
    PARTS,
    STEP_S,
    ProfileConfig,
    bare_workload,
    joined_slowdown,
    profile,
    profiled_slowdowns,
    profiled_workload,
    sampling_uncertainty,
    slowdown,
)
from dpsim.study.rows import ProfiledBatch, Rows, Series, with_medians
from dpsim.study.runners import profile as profile_ranks
from dpsim.study.steps import train
from dpsim.workload import Workload, overhead_line

BATCHES = (4, 16, 256)


def quiet(_: str) -> None:
    pass


@pytest.fixture(scope="module")
def profiled() -> Workload:
    plan = Plan(devices=1, global_batch=1, fusion_rule="one", optimizer=AdamW())
    config = ProfileConfig(model="mlp:64,32", local_batches=(256, 4, 16, 4), seconds=0.5, plan=plan)
    return profile(config, quiet)


def test_a_workload_tells_how_much_its_optimizer_keeps(profiled: Workload) -> None:
    assert profiled.optimizer_slots == 2


def test_the_loss_has_a_time_of_its_own_and_layers_another_one_among_micro_batches(profiled: Workload) -> None:
    assert len(profiled.loss_s) == len(profiled.local_batches) and min(profiled.loss_s) > 0
    assert 0 < profiled.accumulation_factor != 1


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
    networks = ("node", "paced:20us,1gbit")
    config = ProfileConfig(model="mlp:8", local_batches=(8, 16), concurrent=((2, 8),), networks=networks, seconds=0.2)
    task = "dpsim.study.runners.profile:profile_on_ranks"
    measured = on_ranks(task, codec.to_builtins(config), devices=2)
    rows = Rows(codec.decode(plain, Series, "profile") for plain in measured)
    for network in networks:
        (slowdown,) = profiled_slowdowns(config, rows, network=network)
        assert slowdown.devices == 2 and 0.05 < slowdown.factor < 100
    assert profiled_workload(config, bare_workload(config), rows).local_batches == (8, 16)


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
    def of_step(alone_s: float, together_s: float) -> tuple[float, ComputeSlowdown]:
        return alone_s, ComputeSlowdown(devices=2, factor=together_s / alone_s, half_width=0.02)

    joined = joined_slowdown([of_step(10.0, 12.5), of_step(1.0, 1.7)])
    assert (joined.factor, joined.added_s, joined.half_width) == (pytest.approx(1.2), pytest.approx(0.5), 0.02)
    growing = joined_slowdown([of_step(1.0, 1.1), of_step(10.0, 12.0)])
    assert (growing.factor, growing.added_s) == (1.2, 0.0)
    assert joined_slowdown([of_step(3.0, 3.9)]) == of_step(3.0, 3.9)[1]
    steep = joined_slowdown([of_step(9.0, 12.0), of_step(10.0, 12.0)])
    assert (steep.factor, steep.added_s) == (1.0, pytest.approx(2.0))


@given(factor=st.floats(LEAST_SLOWDOWN, 4.0), alone_s=st.floats(1e-5, 1.0), longer=st.floats(1e-9, 100.0))
def test_two_slowdowns_that_differ_by_rounding_alone_add_no_negative_seconds(
    factor: float, alone_s: float, longer: float
) -> None:
    short = ComputeSlowdown(devices=2, factor=math.nextafter(factor, math.inf))
    joined = joined_slowdown([(alone_s, short), (alone_s * (1 + longer), ComputeSlowdown(devices=2, factor=factor))])
    assert joined.added_s >= 0 and joined.factor <= factor


@pytest.mark.parametrize("alone_s", [1e-9, 1e-3, 5e-3])
def test_one_device_that_was_disturbed_makes_no_slowdown_that_a_machine_refuses(alone_s: float) -> None:
    assert slowdown(2, np.full(4, alone_s), np.full(4, 1e-3)).factor >= LEAST_SLOWDOWN


def test_a_slowdown_is_the_median_ratio_of_visits_that_were_made_back_to_back() -> None:
    """Two devices take 1.2 times as long; the machine is at another speed in each pair of visits."""
    speeds = np.random.default_rng(0).uniform(1.0, 3.0, 40)
    measured = slowdown(2, 3e-3 * speeds, 3.6e-3 * speeds)
    assert measured.factor == pytest.approx(1.2) and measured.half_width == pytest.approx(0.0, abs=1e-9)


@pytest.mark.parametrize("seconds", [0.0, -1e-6])
def test_computing_times_of_zero_or_below_make_a_workload(seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profile_ranks, "computing_times", lambda *_: np.full(3 * 4 + 2, seconds))
    config = ProfileConfig(model="mlp:8", local_batches=(8, 16), seconds=0.0)
    measured = profile_ranks.profile_on_ranks(MPI.COMM_SELF, dict(codec.to_builtins(config)), quiet)
    rows = Rows(codec.decode(plain, Series, "profile") for plain in measured or ())
    workload = profiled_workload(config, bare_workload(config), rows)
    assert all(layer.forward_s == (0.0, 0.0) for layer in workload.layers)


@pytest.mark.parametrize("seconds", [[1e-4, -2e-4, 3e-4], [-1e-4, -2e-4, -3e-4], [-1e-3, 0.0, 1e-3], [0.0, 0.0, 0.0]])
def test_an_overhead_measured_below_zero_makes_no_negative_line(seconds: list[float]) -> None:
    overhead_s, per_sample_s = overhead_line([8, 16, 64], seconds)
    assert overhead_s >= 0 and per_sample_s >= 0


def test_a_training_that_is_timed_begins_anew_before_its_optimizer_state_becomes_subnormal() -> None:
    """Subnormal numbers take some processors several times as long, and a profile does more steps than a sample."""
    data = load_dataset("digits", 0)
    replica = models.load("mlp:8", data.input_shape, data.classes).replica()
    trainer = Trainer(replica, data, Plan(devices=1, global_batch=32), MPI.COMM_SELF, Network())
    first = [outcome.sums.loss for outcome in train(trainer, Watcher([]))]
    visits = [[outcome.sums.loss for outcome in train(trainer, Watcher([]))] for _ in range(40)]
    trainer.close()
    assert first not in visits[:20] and first in visits[20:]


def test_the_same_minutes_are_less_uncertain_the_more_often_they_were_visited() -> None:
    config, rng = ProfileConfig(local_batches=(8,)), np.random.default_rng(5)
    (subject,) = config.subjects()
    found = []
    for visits in (16, 256):
        rows = Rows()
        for number in range(visits):
            rows.add(subject, STEP_S, number, [1e-3 * math.exp(rng.normal(0, 0.1))])
        found.append(sampling_uncertainty(config, rows))
    assert found == pytest.approx([math.sqrt(math.pi) * 0.1 / math.sqrt(visits) for visits in (16, 256)], rel=0.5)
    assert found[1] < found[0] / 2


def test_medians_of_a_series_say_what_its_values_say_before_and_between_the_samples() -> None:
    batch = ProfiledBatch(devices=1, local_batch=8)
    visit, value = (0, 0, 1, *range(2, 9)), (3.0, 1.0, 2.0, *(float(n) for n in range(7)))
    series = Series(subject=batch, quantity=FORWARD_S, part=0, visit=visit, value=value, beforehand=3)
    for beforehand, expected in ((3, (2.0, 3.0)), (0, (2.5,)), (9, (2.0, 2.5))):
        whole = msgspec.structs.replace(series, beforehand=beforehand)
        (medians,) = with_medians([whole], PARTS)
        assert medians.value == expected and medians.late().value == (np.median(whole.late().value),)
        if beforehand:
            assert medians.early().value == (np.median(whole.early().value),)
        assert Rows([medians.late()]).values(batch, FORWARD_S).tolist() == [expected[-1]]
