"""Predictions for a machine whose speed changes: the mean over its speeds of what the slowest rank takes."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from predict_cases import machines, plans, workloads
from small_step import machine, plan, workload

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.machine import ComputeSlowdown, Link, Machine, OverlapCost, Speed
from dpsim.plan import Plan
from dpsim.predict import choose_overlap, nulls, predict, price, scheduled, step_times
from dpsim.predict.speed import slow_share
from dpsim.workload import Workload


def speed(devices: int, share: float, factor: float = 1.5) -> Speed:
    return Speed(devices=devices, reference_s=1e-3, slow_reference_s=1.4e-3, slow_share=share, compute_factor=factor)


def test_a_step_is_the_mean_over_both_speeds() -> None:
    """Computation 1.5 times as long at the slow speed, the allreduces of 400 bytes each (5 s) twice as long."""
    changing = machine(speed=(speed(2, 0.25),))
    table = msgspec.structs.replace(changing.allreduce[0], slow_factor=2.0)
    changing = msgspec.structs.replace(changing, allreduce=(table,))
    full_s, slow_s = price(scheduled(workload(), changing, plan()), changing).speed_steps_s
    assert full_s == predict(workload(), machine(), plan()).step_s == 10.5 + 10
    assert slow_s == 1.5 * 10.5 + 20
    assert predict(workload(), changing, plan()).step_s == pytest.approx(0.75 * full_s + 0.25 * slow_s)
    assert step_times(workload(), changing, [plan()])[0] == pytest.approx(0.75 * full_s + 0.25 * slow_s)


def test_one_device_is_predicted_for_its_own_speeds() -> None:
    changing = machine(speed=(speed(1, 0.5, 2.0), speed(2, 0.75)))
    alone = msgspec.structs.replace(plan(), devices=1, global_batch=4)
    assert predict(workload(), changing, alone).step_s == pytest.approx(1.5 * 10.5)


@pytest.mark.parametrize(("devices", "share"), [(1, 0.3), (2, 0.51), (4, 1 - 0.7**4), (8, 1 - 0.7**8)])
def test_beyond_the_calibrated_counts_the_slowest_of_independent_ranks_is_expected(devices: int, share: float) -> None:
    actual, factor = slow_share(machine(speed=(speed(1, 0.3, 1.2), speed(2, 0.51, 1.6))), devices)
    assert actual == pytest.approx(share)
    assert factor == (1.2 if devices == 1 else 1.6)


def test_a_machine_that_says_nothing_of_its_speed_is_steady() -> None:
    assert slow_share(machine(), 2) == (0.0, 1.0)
    steady = machine(speed=(speed(2, 0.0, 1.0),))
    assert predict(workload(), steady, plan()) == predict(workload(), machine(), plan())


def test_what_communication_takes_from_computation_takes_longer_at_the_slow_speed() -> None:
    beside = OverlapCost(
        algorithm="mpi", devices=2, overlap="thread", sizes_bytes=(400,), time_s=(6.0,), compute_loss_s=(1.0,)
    )
    slowdown = ComputeSlowdown(devices=2, factor=2.0)
    changing = machine(overlap=(beside,), speed=(speed(2, 0.5),), compute_slowdown=(slowdown,))
    slow = machine(
        overlap=(msgspec.structs.replace(beside, compute_loss_s=(1.5,)),),
        compute_slowdown=(msgspec.structs.replace(slowdown, factor=3.0),),
    )
    threaded = msgspec.structs.replace(plan(), overlap="thread")
    assert (
        price(scheduled(workload(), changing, threaded), changing).speed_steps_s[1]
        == predict(workload(), slow, threaded).step_s
    )


@given(workloads(), machines(), plans())
def test_a_step_lies_between_those_at_either_speed(drawn: Workload, steady: Machine, run: Plan) -> None:
    changing = msgspec.structs.replace(steady, speed=(speed(run.devices, 0.4),))
    full_s, slow_s = price(scheduled(drawn, changing, run), changing).speed_steps_s
    step_s = predict(drawn, changing, run).step_s
    assert full_s <= slow_s * (1 + 1e-9)
    assert min(full_s, slow_s) * (1 - 1e-9) <= step_s <= max(full_s, slow_s) * (1 + 1e-9)


def test_the_nulls_and_the_choice_of_overlap_are_for_the_mean_speed_too() -> None:
    changing = machine(speed=(speed(2, 0.5), speed(1, 0.5)))
    steady, actual = nulls(workload(), machine(), plan()), nulls(workload(), changing, plan())
    assert actual["perfect_scaling"][0] == pytest.approx(1.25 * steady["perfect_scaling"][0])
    assert (
        choose_overlap(workload(), changing, [plan()], ["off"])[1]["off"]
        == predict(workload(), changing, plan()).step_s
    )


def test_a_machine_file_of_an_earlier_version_is_read_and_keeps_its_digest() -> None:
    plain = Machine(name="m", link=Link(latency_s=1e-5, bandwidth_bytes_per_s=1e9))
    old = {name: value for name, value in codec.to_builtins(plain).items() if name != "speed"}
    read = codec.decode(old, Machine, "machine")
    assert read == plain and read.speed == ()
    assert codec.digest(plain) == codec.digest(read)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"slow_share": 1.5}, "from 0 to 1"), ({"reference_s": 0.0}, "reference_s 0"), ({"devices": 0}, "0 devices")],
)
def test_impossible_speeds_are_refused(changes: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Speed(**{**msgspec.structs.asdict(speed(2, 0.5)), **changes})  # type: ignore[arg-type]
