"""Inverse questions: a prediction with the value that is found reaches the target, and one beyond it misses it."""

from __future__ import annotations

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_cases import workloads
from published_files import WORKLOAD

from dpsim import machine as machines
from dpsim import workload as workload_files
from dpsim.errors import ConfigError
from dpsim.machine import AllreduceCost, Link, Machine
from dpsim.model import for_prediction, predict_points
from dpsim.model.inverse import BANDWIDTHS, Answer, Goal, Target, find
from dpsim.model.link_fit import fitted_links
from dpsim.model.other_link import Field, with_link
from dpsim.model.ranking import best_bucket
from dpsim.report.inverse import bucket_sentence, of_tables, sentence
from dpsim.setting import Grid
from dpsim.workload import Workload

GOOGLENET = workload_files.read(WORKLOAD)
ETHERNET = machines.read("10gbe")
RESULT: dict[Goal, tuple[str, str, str]] = {
    "efficiency": ("predicted_speedup_low", "predicted_speedup", "predicted_speedup_high"),
    "speedup": ("predicted_speedup_low", "predicted_speedup", "predicted_speedup_high"),
    "step-time": ("predicted_high_s", "predicted_step_s", "predicted_low_s"),
}
WORSE, PREDICTED, BETTER = range(3)


def reaches(
    workload: Workload, machine: Machine, devices: int | str, target: Target, end: int = PREDICTED, **settings: Any
) -> bool:
    """Whether a plain prediction reaches a target by its step, or by an end of its interval."""
    known = for_prediction(workload, machine)
    (point,), _ = predict_points(workload, known, Grid.of(devices=devices, **settings))
    value = point[RESULT[target.goal][end]]
    if target.goal == "step-time":
        return bool(value <= target.value)
    return bool(value / (point["devices"] if target.goal == "efficiency" else 1) >= target.value)


def with_value(quantity: str, value: float, machine: Machine, devices: int) -> tuple[Machine, int, dict[str, int]]:
    """Machine, devices and settings of a prediction with a value of what was asked for."""
    assert machine.link is not None
    field = {"bandwidth": "bandwidth_bytes_per_s", "latency": "latency_s"}.get(quantity)
    if field is not None:
        link = msgspec.structs.replace(machine.link, **{field: value})
        return msgspec.structs.replace(machine, link=link), devices, {}
    return machine, *((int(value), {}) if quantity == "devices" else (devices, {"local_batch": int(value)}))


@pytest.mark.parametrize("quantity", ["bandwidth", "latency", "devices", "local-batch"])
def test_answers_of_random_workloads_and_machines_hold_in_plain_predictions(quantity: str) -> None:
    outcomes: list[str] = []

    @settings(max_examples=60, deadline=None, derandomize=True)
    @given(
        workload=workloads(launches=False),
        link=st.builds(
            Link,
            latency_s=st.floats(1e-6, 1e-3),
            bandwidth_bytes_per_s=st.floats(1e6, 1e11),
            relative_uncertainty=st.floats(0.01, 0.5),
        ),
        goal=st.sampled_from(["efficiency", "speedup", "step-time"]),
        share=st.floats(0.02, 1.0),
        devices=st.sampled_from([2, 3, 8]),
    )
    def holds(workload: Workload, link: Link, goal: Goal, share: float, devices: int) -> None:
        machine = Machine(name="random", link=link)
        target = Target(goal=goal, value={"efficiency": share, "speedup": 4 * share, "step-time": 0.05 * share}[goal])
        most = 300 if quantity == "devices" else devices
        answer = find(quantity, target, workload, machine, Grid.of(devices=most))
        outcomes.append("none" if answer.value is None else "all" if answer.anything else "some")

        def check(value: float, end: int = PREDICTED) -> bool:
            known, count, more = with_value(quantity, value, machine, devices)
            return reaches(workload, known, count, target, end, **more)

        if answer.value is None:
            assert not check(answer.at) and not check(answer.tried[0]) and not check(answer.tried[1])
            return
        assert check(answer.value)
        certain, possible = (answer.high, answer.low) if answer.least else (answer.low, answer.high)
        assert possible is not None and check(possible, BETTER)
        assert certain is None or check(certain, WORSE)
        if answer.anything:
            assert answer.until is not None or (check(answer.tried[0]) and check(answer.tried[1]))
            return
        harder = -1 if answer.least else 1
        whole = quantity in ("devices", "local-batch")
        assert not check(answer.value + harder if whole else answer.value * (1 + 0.02 * harder))
        if answer.until is not None:
            assert check(answer.until)

    holds()
    assert {"some", "none"} <= {*outcomes}


def asked(quantity: str, goal: Goal, value: float, devices: int | str = 8, **settings: Any) -> Answer:
    return find(quantity, Target(goal=goal, value=value), GOOGLENET, ETHERNET, Grid.of(devices=devices, **settings))


def test_what_no_bandwidth_reaches_is_told_with_the_limit_and_what_is_left() -> None:
    answer = asked("bandwidth", "efficiency", 0.99)
    assert answer.value is None and answer.at == math.inf
    assert answer.point["predicted_speedup"] / 8 < 0.99
    text = sentence(answer, weak=True)
    assert "no bandwidth reaches 99% scaling efficiency: even an infinite bandwidth gives 93.3% (" in text
    assert text.endswith("27.9 ms are computation beyond one device's share.")


def test_what_is_left_of_too_many_devices_is_mostly_communication() -> None:
    text = sentence(asked("devices", "efficiency", 0.9, local_batch=16), weak=True)
    assert "no number of devices reaches 90% scaling efficiency: even 2 devices give" in text
    assert 0 < text.index("exposed communication") < text.index("computation beyond")


def test_a_bandwidth_has_an_interval_and_the_interval_of_a_doubtful_link_is_wider() -> None:
    def width(doubt: float) -> float:
        assert ETHERNET.link is not None
        link = msgspec.structs.replace(ETHERNET.link, relative_uncertainty=doubt)
        machine = msgspec.structs.replace(ETHERNET, link=link)
        answer = find(
            "bandwidth", Target(goal="efficiency", value=0.6), GOOGLENET, machine, Grid.of(devices=8, local_batch=16)
        )
        assert answer.low is not None and answer.value is not None and answer.high is not None
        assert answer.low < answer.value < answer.high
        assert f"interval: {answer.low / 1e9:.3g} GB/s" in sentence(answer, weak=True)
        return answer.high / answer.low

    assert width(0.4) > 1.3 * width(0.1)


def test_an_end_of_the_interval_that_no_value_reaches_is_said_to_be_uncertain() -> None:
    text = sentence(asked("bandwidth", "efficiency", 0.9), weak=True)
    assert " on it may be reached, but no bandwidth makes it certain)" in text


def test_under_strong_scaling_the_fewest_devices_are_named_and_those_beyond_which_it_is_missed() -> None:
    answer = asked("devices", "speedup", 5.0, 512, global_batch=512)
    assert answer.least and answer.value is not None and answer.until is not None
    target = answer.target
    machine = ETHERNET
    for devices, expected in ((answer.value - 1, False), (answer.value, True), (answer.until, True)):
        assert reaches(GOOGLENET, machine, int(devices), target, global_batch=512) is expected
    assert not reaches(GOOGLENET, machine, int(answer.until) + 1, target, global_batch=512)
    text = sentence(answer, weak=False)
    assert text.startswith("global batch 512, tarantella with threshold 32 KiB, ring: a speedup of 5 is reached with")
    assert f"or more, but not beyond {answer.until:.0f} devices" in text


def test_in_a_layout_whole_nodes_are_tried_and_the_link_between_the_devices_is_varied() -> None:
    both = machines.read("nvlink3-8gpu+10gbe")
    target = Target(goal="efficiency", value=0.6)
    nodes = find("devices", target, GOOGLENET, both, Grid.of(devices="64x8", algorithm="hierarchical"))
    assert nodes.value is not None and nodes.value % 8 == 0 and nodes.tried == (8, 512)
    inside = find("bandwidth", target, GOOGLENET, both, Grid.of(devices="1x8", algorithm="ring"))
    assert both.link is not None
    other = msgspec.structs.replace(both, link=msgspec.structs.replace(both.link, bandwidth_bytes_per_s=1e3))
    assert find("bandwidth", target, GOOGLENET, other, Grid.of(devices="1x8", algorithm="ring")).value == inside.value


def test_a_target_within_reach_of_everything_is_said_to_be() -> None:
    answer = asked("bandwidth", "step-time", 1e5)
    assert answer.anything and answer.value == BANDWIDTHS[0]
    assert sentence(answer, weak=True).startswith("8 devices, local batch 64, tarantella with threshold ")
    assert " us: any bandwidth reaches a step of " in sentence(answer, weak=True)


def test_no_threshold_is_faster_than_the_best_bucket() -> None:
    known = for_prediction(GOOGLENET, ETHERNET)
    best = best_bucket(GOOGLENET, known, Grid.of(devices=64, local_batch=16))
    thresholds = [0.0, *(2.0**power for power in range(10, 27)), math.inf]
    points, _ = predict_points(GOOGLENET, known, Grid.of(devices=64, fusion_threshold_bytes=thresholds, local_batch=16))
    assert best.row.step_s <= min(point["predicted_step_s"] for point in points)
    default = next(point for point in points if point["fusion_threshold_bytes"] == 2.0**15)
    assert best.default.step_s == default["predicted_step_s"] > best.row.step_s
    assert best.row.gain.low < best.row.gain.value < best.row.gain.high
    text = bucket_sentence(best, Target(goal="efficiency", value=0.99), weak=True)
    assert "the best bucket of tarantella is" in text and "It misses 99% scaling efficiency" in text


def test_a_rule_that_no_threshold_beats_is_left_without_one() -> None:
    known = for_prediction(GOOGLENET, ETHERNET)
    best = best_bucket(GOOGLENET, known, Grid.of(devices=64, fusion_rule="ddp", local_batch=16))
    assert best.row.gain.value < 1 and best.default.step_s < best.row.step_s
    assert "no bucket size beats ddp without one, " in bucket_sentence(best, weak=True)


@pytest.mark.parametrize("value", [0.0, -0.5, 1.01, math.inf, math.nan])
def test_an_impossible_efficiency_is_refused(value: float) -> None:
    with pytest.raises(ConfigError, match="scaling efficiency"):
        Target(goal="efficiency", value=value)


@pytest.mark.parametrize(
    ("quantity", "devices", "fields", "said"),
    [
        ("bandwith", 8, {}, "did you mean 'bandwidth'"),
        ("latency", 1, {}, "sends nothing"),
        ("local-batch", 8, {"global_batch": 64}, "leave the global batch out"),
        ("devices", 8, {"global_batch": 1}, "2 or more"),
    ],
)
def test_questions_without_an_answer_are_refused(
    quantity: str, devices: int, fields: dict[str, int], said: str
) -> None:
    with pytest.raises(ConfigError, match=said):
        asked(quantity, "efficiency", 0.9, devices, **fields)


@pytest.mark.parametrize(("quantity", "field"), [("bandwidth", "bandwidth_bytes_per_s"), ("latency", "latency_s")])
def test_tables_change_with_the_link_that_is_asked_for(quantity: str, field: Field) -> None:
    tables, target = machines.read(WORKLOAD.with_name("k80_10gbe.toml")), Target(goal="efficiency", value=0.62)
    answer = find(quantity, target, GOOGLENET, tables, Grid.of(devices=4, local_batch=64))
    assert answer.value is not None and answer.link is not None and answer.has_tables
    assert reaches(GOOGLENET, with_link(tables, 4, field, answer.value), 4, target, local_batch=64)
    worse = answer.value * (0.99 if answer.least else 1.01)
    assert not reaches(GOOGLENET, with_link(tables, 4, field, worse), 4, target, local_batch=64)
    same = with_link(tables, 4, field, getattr(answer.link, field))
    for before, after in zip(tables.allreduce, same.allreduce, strict=True):
        assert after.time_s == pytest.approx(before.time_s)
    assert "the machine's tables change with its link" in of_tables(answer)


def test_only_the_tables_of_the_level_that_is_asked_for_change() -> None:
    tables = [
        AllreduceCost(algorithm="nccl", devices=n, layout=layout, sizes_bytes=(1024, 2**20), time_s=times)
        for n, layout, times in ((8, "1x8", (1e-5, 2e-5)), (16, "2x8", (1e-4, 1e-3)))
    ]
    link, in_node = fitted_links(tables)
    machine = Machine(name="m", allreduce=tuple(tables), link=link, link_in_node=in_node)
    inside, across = (with_link(machine, devices, "bandwidth_bytes_per_s", 1e13) for devices in ("1x8", "2x8"))
    assert inside.allreduce[1] == tables[1] and across.allreduce[0] == tables[0]
    assert inside.allreduce[0].time_s[1] < 1.2e-5 and across.allreduce[1].time_s[1] < 1.2e-4


def test_the_best_bucket_of_a_rule_without_a_threshold_is_refused() -> None:
    with pytest.raises(ConfigError, match="has no threshold"):
        best_bucket(GOOGLENET, ETHERNET, Grid.of(devices=8, fusion_rule="mg-wfbp"))
