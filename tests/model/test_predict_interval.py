"""The interval of a prediction: what widens it, what it is made of, and which thresholds it cannot tell apart."""

from __future__ import annotations

import importlib
import itertools
import math
from typing import Any

import msgspec
import pytest
from small_step import machine, plan, workload

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, ComputeSlowdown, Link, Machine, OverlapCost
from dpsim.model import predict, predict_on_machines, predict_points, step_times
from dpsim.model.interval import COMMON_MODEL_ERROR, OWN_MODEL_ERROR
from dpsim.model.step import price
from dpsim.plan import Plan
from dpsim.setting import Grid
from dpsim.workload import Workload

step, interval = (importlib.import_module(f"dpsim.model.{name}") for name in ("step", "interval"))
DEVIATIONS = 1.6449


def certain(**changes: Any) -> tuple[Workload, Machine]:
    """A workload and a machine that state uncertainties of 0, with some values changed."""
    stated = msgspec.structs.replace(workload(), relative_uncertainty=changes.pop("compute", 0.0))
    table = AllreduceCost(
        algorithm="mpi",
        devices=2,
        sizes_bytes=(4, 400),
        time_s=(4.0, 5.0),
        relative_uncertainty=changes.pop("table", 0.0),
    )
    fields: dict[str, Any] = {
        "allreduce": (table,),
        "compute_slowdown": (ComputeSlowdown(devices=2, factor=1.0, half_width=changes.pop("half_width", 1e-12)),),
        "relative_uncertainty": changes.pop("speed", 0.0),
        "link": Link(latency_s=1.0, bandwidth_bytes_per_s=100.0),
    }
    return stated, Machine(name="certain", **(fields | changes))


def width(workload: Workload, machine: Machine, of: Plan) -> float:
    """Half the width of the interval, as a logarithm."""
    prediction = predict(workload, machine, of)
    assert prediction.low_s is not None and prediction.high_s is not None
    assert prediction.low_s <= prediction.step_s <= prediction.high_s and prediction.interval_level is None
    return math.log(prediction.high_s / prediction.low_s) / 2


def test_only_the_models_own_error_is_left_where_everything_is_certain() -> None:
    floor = DEVIATIONS * math.hypot(COMMON_MODEL_ERROR, OWN_MODEL_ERROR)
    assert width(*certain(), plan()) == pytest.approx(floor, rel=1e-4)


@pytest.mark.parametrize("name", ["compute", "speed", "table", "half_width"])
def test_every_stated_uncertainty_widens_the_interval(name: str) -> None:
    widths = [width(*certain(**{name: value}), plan()) for value in (1e-12, 0.05, 0.1, 0.3)]
    assert widths == sorted(widths) and widths[0] < 0.9 * widths[-1] and len(set(widths)) == 4


def test_one_standard_error_of_the_speed_is_carried_through_as_a_factor() -> None:
    """All of a step on one device scales with the speed: 1.645 standard errors, with the model's own error."""
    alone = plan(devices=1, global_batch=4)
    expected = DEVIATIONS * math.hypot(0.1, COMMON_MODEL_ERROR, OWN_MODEL_ERROR)
    assert width(*certain(speed=0.1), alone) == pytest.approx(expected, rel=1e-4)


def test_an_emulated_link_does_not_slow_down_with_the_machine() -> None:
    node, emulated = (width(*certain(speed=0.1, emulated_network=flag), plan()) for flag in (False, True))
    assert emulated < 0.9 * node


def test_a_file_that_states_no_uncertainty_gets_a_wider_interval() -> None:
    stated, known = certain(compute=0.02, speed=0.02, table=0.02)
    unknown = msgspec.structs.replace(stated, relative_uncertainty=None)
    assert width(unknown, known, plan()) > 1.1 * width(stated, known, plan())
    without = msgspec.structs.replace(known, relative_uncertainty=None)
    assert width(stated, without, plan()) > width(stated, known, plan())
    table = msgspec.structs.replace(known.allreduce[0], relative_uncertainty=None)
    assert width(stated, msgspec.structs.replace(known, allreduce=(table,)), plan()) > width(stated, known, plan())


def test_every_step_outside_the_profile_widens_the_interval() -> None:
    """The profile is at a local batch of 4."""
    trained, known = certain()
    larger = [width(trained, known, plan(devices=1, global_batch=batch)) for batch in (4, 8, 16, 64)]
    smaller = [width(trained, known, plan(devices=1, global_batch=batch)) for batch in (4, 2, 1)]
    for widths in (larger, smaller):
        assert all(b > a for a, b in itertools.pairwise(widths))


def test_every_step_beyond_the_largest_message_widens_the_interval() -> None:
    """One bucket of 800 bytes, by tables that go up to ever smaller sizes at the same cost a byte."""
    widths = []
    for last in (800, 400, 200, 100):
        table = AllreduceCost(
            algorithm="mpi", devices=2, sizes_bytes=(4, last), time_s=(0.04, last / 100), relative_uncertainty=0.0
        )
        widths.append(width(*certain(allreduce=(table,)), plan(fusion_rule="one")))
    assert all(b > a for a, b in itertools.pairwise(widths))


def test_every_doubling_of_the_devices_beyond_the_calibration_widens_the_interval() -> None:
    widths = [width(*certain(), plan(devices=n, global_batch=4 * n, algorithm="ring")) for n in (4, 8, 16)]
    assert widths[0] > width(*certain(), plan()) and all(b > a for a, b in itertools.pairwise(widths))


def test_an_uncertain_overlap_widens_what_overlaps() -> None:
    widths = []
    for uncertain in (0.0, 0.3, None):
        table = OverlapCost(
            algorithm="mpi",
            devices=2,
            overlap="thread",
            sizes_bytes=(400,),
            time_s=(5.0,),
            compute_loss_s=(2.0,),
            relative_uncertainty=uncertain,
            loss_relative_uncertainty=uncertain,
        )
        widths.append(width(*certain(overlap=(table,)), plan(overlap="thread")))
    assert widths[0] < widths[1] and widths[0] < widths[2]


def test_the_interval_is_wider_above_than_below() -> None:
    prediction = predict(*certain(speed=0.2), plan())
    assert prediction.low_s is not None and prediction.high_s is not None
    assert prediction.high_s - prediction.step_s > prediction.step_s - prediction.low_s > 0


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf])
def test_an_uncertainty_that_is_no_standard_error_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match=r"relative_uncertainty[\s\S]*one standard error"):
        msgspec.structs.replace(workload(), relative_uncertainty=value).__post_init__()


def test_files_with_and_without_uncertainty_are_read() -> None:
    trained, known = certain(compute=0.02)
    for value, kind in ((trained, Workload), (known, Machine), (workload(), Workload), (machine(), Machine)):
        assert codec.decode(codec.to_builtins(value), kind, "file") == value
    plain = codec.to_builtins(workload())
    del plain["relative_uncertainty"]
    assert codec.decode(plain, Workload, "file") == workload()


def test_thresholds_whose_difference_is_uncertain_are_named_and_others_are_not() -> None:
    """Two buckets cost 10 s of 20.5, one costs 9 of 19.5; what makes all of them slower cancels."""

    def best(**given: Any) -> dict[str, Any]:
        trained, known = certain(**given)
        table = msgspec.structs.replace(known.allreduce[0], sizes_bytes=(100, 800), time_s=(2.0, 9.0))
        known = msgspec.structs.replace(known, allreduce=(table,))
        _, summary = predict_points(
            trained,
            known,
            Grid.of(devices=2, fusion_threshold_bytes=[0.0, 100.0, math.inf], global_batch=8, overlap="off"),
        )
        actual: dict[str, Any] = summary["best"][0]
        return actual

    assert best()["equally_fast_bytes"] == []
    assert best(speed=0.5, compute=0.1)["equally_fast_bytes"] == []
    rough = best(table=1.0)
    assert rough["equally_fast_bytes"] == [0.0, 100.0] and rough["any_threshold"]


@pytest.mark.parametrize(
    ("others", "apart"),
    [({"fusion_threshold_bytes": math.inf}, True), ({"global_batch": 16, "accumulate": 2}, False)],
    ids=["another cap", "more micro-batches"],
)
def test_prices_of_other_sizes_are_wrong_apart_and_those_of_the_same_sizes_alike(
    others: dict[str, Any], apart: bool
) -> None:
    trained, known = certain(table=0.2)
    table = msgspec.structs.replace(known.allreduce[0], sizes_bytes=(100, 800), time_s=(2.0, 9.0))
    known = msgspec.structs.replace(known, allreduce=(table,))
    rule = {"fusion_rule": "tarantella", "fusion_threshold_bytes": 0.0, "algorithm": "mpi"}
    plans = [plan(overlap="off", **rule | changes) for changes in ({}, others)]
    one, other = (interval.predict_with_interval(trained, known, each) for each in plans)
    assert (one[1].sizes_bytes != other[1].sizes_bytes) == apart
    shifts = [float(ends.shifts[0, interval.Uncertainty._fields.index("network")]) for _, ends in (one, other)]
    assert min(shifts) > 0.02
    _, high = interval.ratio_interval(one, other)
    expected = shifts if apart else [shifts[0] - shifts[1]]
    above = DEVIATIONS * math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR, *expected)
    assert math.log(high * other[0].step_s / one[0].step_s) == pytest.approx(above, rel=0.01)


def test_a_link_that_is_not_known_well_is_wrong_alike_at_all_sizes() -> None:
    link = Link(latency_s=1e-9, bandwidth_bytes_per_s=100.0, relative_uncertainty=0.3)
    known = certain(allreduce=(), link=link)
    of_rule = {"fusion_rule": "tarantella", "algorithm": "ring", "overlap": "off"}
    plans = [plan(fusion_threshold_bytes=each, **of_rule) for each in (0.0, math.inf)]
    low, high = interval.ratio_interval(*(interval.predict_with_interval(*known, each) for each in plans))
    floor = DEVIATIONS * math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR)
    assert math.log(high / low) / 2 == pytest.approx(floor, rel=0.05)


def test_what_makes_one_device_as_uncertain_does_not_widen_the_interval_of_a_speedup() -> None:
    """Where communication takes no time, all of both steps scales with the layer times and the speed."""

    def ends(**given: Any) -> tuple[float, float]:
        link, grid = Link(latency_s=1e-12, bandwidth_bytes_per_s=1e30), Grid.of(devices=2, local_batch=4, overlap="off")
        (point,), _ = predict_points(*certain(allreduce=(), link=link, **given), grid)
        low, middle, high = (point[f"predicted_speedup{end}"] for end in ("_low", "", "_high"))
        assert low < middle < high
        return math.log(middle / low), math.log(high / middle)

    floor = DEVIATIONS * math.hypot(OWN_MODEL_ERROR, OWN_MODEL_ERROR)
    assert ends() == pytest.approx((floor, floor), rel=1e-3)
    assert ends(compute=0.3, speed=0.3) == pytest.approx((floor, floor), rel=1e-3)
    assert min(ends(half_width=0.3)) > 1.5 * floor


def test_a_second_machine_is_held_against_the_first_by_what_the_two_do_not_share() -> None:
    def upgrade(**given: Any) -> dict[str, Any]:
        trained, slow = certain(**given)
        fast = msgspec.structs.replace(slow.allreduce[0], time_s=(0.4, 0.5))
        machines = {"slow": slow, "fast": msgspec.structs.replace(slow, allreduce=(fast,))}
        options: dict[str, Any] = {"global_batch": 8, "overlap": "off", "algorithm": "mpi"}
        points, summary = predict_on_machines(
            trained, machines, Grid.of(devices=[1, 2], fusion_threshold_bytes=[0.0, math.inf], **options)
        )
        assert [point["machine"] for point in points] == ["slow"] * 3 + ["fast"] * 3
        assert [best["machine"] for best in summary["best"]] == ["slow", "slow", "fast", "fast"]
        (actual,) = summary["upgrades"]
        steps = {name: [p["predicted_step_s"] for p in points if p["machine"] == name][1:] for name in machines}
        assert actual["ratio"] == pytest.approx(min(steps["slow"]) / min(steps["fast"]))
        assert actual["ratio_low"] < actual["ratio"] < actual["ratio_high"] and actual["machine"] == "fast"
        return dict(actual)

    assert upgrade()["ratio_low"] > 1
    certainly, roughly = (upgrade(table=error) for error in (0.0, 0.4))
    assert roughly["ratio_high"] / roughly["ratio_low"] > 1.2 * certainly["ratio_high"] / certainly["ratio_low"]


def test_step_times_price_each_plan_once_and_no_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    trained, known = certain()
    plans = [plan(fusion_rule="tarantella", fusion_threshold_bytes=float(i)) for i in range(4)]
    priced: list[Any] = []

    def counted(*arguments: Any) -> Any:
        priced.append(arguments)
        return price(*arguments)

    monkeypatch.setattr(step, "price", counted)
    monkeypatch.setattr(interval, "price", counted)
    step_times(trained, known, plans)
    assert len(priced) == len(plans)
    predict(trained, known, plans[0])
    assert len(priced) > len(plans) + 1
