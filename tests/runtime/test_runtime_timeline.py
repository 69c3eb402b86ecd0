"""What a step records: events in order, bytes that add up, exposed communication; and what recording costs."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.runtime.recorder import StepMarks, exposed_s, seconds_per_event, timeline
from dpsim.schedule import ALLREDUCE_EVENT, COMMUNICATION_LANE, COMPUTE_LANE
from dpsim.timeline import Timeline, TimelineRecord

DEVICES, STEPS, ROUNDING_S = 2, 3, 1.1e-8  # a stored timeline is rounded to 10 ns
OVERLAPS = ["off", "inline", "poll", "thread"]
NETWORKS = {"node": "mpi", "paced:50us,1gbit": "ring"}
CASES = [(network, overlap) for network in NETWORKS for overlap in OVERLAPS]
OnRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def runs() -> dict[tuple[str, str], dict[str, Any]]:
    return {}


@pytest.fixture
def recorded(runs: dict[tuple[str, str], dict[str, Any]], on_ranks: OnRanks) -> dict[tuple[str, str], dict[str, Any]]:
    """The default cnn under every overlap on a real and on an emulated network, all in one job."""
    if not runs:
        cases = []
        for network, overlap in CASES:
            plan = {
                "global_batch": 4,
                "algorithm": NETWORKS[network],
                "overlap": overlap,
                "fusion_rule": "tarantella",
                "fusion_threshold_bytes": 0,
            }
            cases.append({"model": "cnn", "dataset": "digits", "network": network, "plan": plan})
        actual = on_ranks("ranks_runtime:recorded", {"cases": cases, "steps": STEPS}, devices=DEVICES)
        runs.update(zip(CASES, actual, strict=True))
    return runs


def line_of(run: dict[str, Any]) -> Timeline:
    return Timeline.from_record(codec.decode(run["timeline"], TimelineRecord, "timeline"))


def one_step_one_rank(line: Timeline) -> list[tuple[int, int, Timeline]]:
    return [(k, r, line.select(step=k, rank=r)) for k in range(STEPS) for r in range(DEVICES)]


def lane(line: Timeline, which: int) -> tuple[NDArray[np.float64], NDArray[np.float64], list[str]]:
    keep = line.lane == which
    order = np.argsort(line.start_s[keep], kind="stable")
    names = [line.operations[code] for code in line.operation[keep][order]]
    return line.start_s[keep][order], line.end_s[keep][order], names


@pytest.mark.parametrize(("network", "overlap"), CASES)
def test_events_follow_one_another_within_their_step(network: str, overlap: str, recorded: dict[Any, Any]) -> None:
    run = recorded[network, overlap]
    line = line_of(run)
    origin_s = min(begin for begin, _ in run["steps"][0])
    assert line.emulated_network == (network != "node")
    assert (line.end_s >= line.start_s).all() and line.start_s.min() >= 0
    for step, rank, part in one_step_one_rank(line):
        begin_s, end_s = (moment - origin_s for moment in run["steps"][step][rank])
        assert part.start_s.min() >= begin_s - ROUNDING_S and part.end_s.max() <= end_s + ROUNDING_S
        for which in (COMPUTE_LANE, COMMUNICATION_LANE):
            start_s, stop_s, _ = lane(part, which)
            assert (start_s[1:] >= stop_s[:-1] - 2 * ROUNDING_S).all(), "two events of one lane at once"
        _, _, names = lane(part, COMPUTE_LANE)
        whole = [name for i, name in enumerate(names) if i == 0 or name != names[i - 1]]  # pauses cut operations
        kinds = [name.split()[0] for name in whole if name != "step overhead"]
        layers = run["layers"]
        assert kinds == ["forward"] * layers + ["loss"] + ["backward"] * layers + ["update"]


@pytest.mark.parametrize(("network", "overlap"), CASES)
def test_allreduces_come_in_bucket_order_and_carry_the_gradients_once(
    network: str, overlap: str, recorded: dict[Any, Any]
) -> None:
    run = recorded[network, overlap]
    for _, _, part in one_step_one_rank(line_of(run)):
        assert part.size_bytes.sum() == run["gradient_bytes"]
        assert (part.size_bytes[part.lane == COMPUTE_LANE] == 0).all()
        names = [name for name in lane(part, COMMUNICATION_LANE)[2] if name != "wait"]
        assert names == [f"allreduce {bucket}" for bucket in range(run["buckets"])]


@pytest.mark.parametrize(("network", "overlap"), CASES)
def test_exposed_communication_lies_between_nothing_and_all_of_it(
    network: str, overlap: str, recorded: dict[Any, Any]
) -> None:
    run = recorded[network, overlap]
    for step, rank, part in one_step_one_rank(line_of(run)):
        start_s, end_s, _ = lane(part, COMMUNICATION_LANE)
        total_s = float((end_s - start_s).sum())
        exposed = part.exposed_communication_s()
        slack_s = len(start_s) * 2 * ROUNDING_S
        assert 0 <= exposed <= total_s + slack_s
        waited_s = run["exposed_s"][step][rank]
        assert 0 <= waited_s <= run["steps"][step][rank][1] - run["steps"][step][rank][0]
        assert exposed == pytest.approx(waited_s, abs=slack_s)
        if overlap in ("off", "inline"):  # nothing is hidden
            assert exposed == pytest.approx(total_s, abs=slack_s)


@pytest.mark.parametrize("network", list(NETWORKS))
def test_without_overlap_communication_begins_after_backward(network: str, recorded: dict[Any, Any]) -> None:
    for _, _, part in one_step_one_rank(line_of(recorded[network, "off"])):
        _, stop_s, names = lane(part, COMPUTE_LANE)
        last_backward_s = max(end for end, name in zip(stop_s, names, strict=True) if name.startswith("backward"))
        assert lane(part, COMMUNICATION_LANE)[0].min() >= last_backward_s - ROUNDING_S


@pytest.mark.parametrize("overlap", OVERLAPS)
def test_layers_are_announced_once_from_last_to_first(overlap: str, recorded: dict[Any, Any]) -> None:
    for layers in recorded["node", overlap]["ready"]:
        assert layers == sorted(set(layers), reverse=True)


def test_recording_a_step_of_the_default_cnn_costs_less_than_a_hundredth_of_10_ms(recorded: dict[Any, Any]) -> None:
    events = max(run["events"] for run in recorded.values())
    assert 50 < events < 200
    assert events * seconds_per_event() < 0.01 * 10e-3


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ({"step": (2**70,)}, "out of range"),
        ({"lane": (7,)}, "unknown lane"),
        ({"end_s": (math.inf,)}, "not finite"),
        ({"operation": (1,)}, "no name"),
        ({"rank": (0, 0)}, "differ in length"),
    ],
)
def test_a_damaged_stored_timeline_is_refused(damage: dict[str, Any], message: str) -> None:
    one = {"step": (0,), "rank": (0,), "lane": (COMPUTE_LANE,), "operation": (0,), "size_bytes": (0,)}
    times = {"start_s": (0.0,), "end_s": (1.0,)}
    record = TimelineRecord(**({"source": "measured", "operations": ("update",)} | one | times | damage))  # type: ignore[arg-type]
    with pytest.raises(FileFormatError, match=message):
        Timeline.from_record(record)


def test_a_pause_cuts_the_operation_in_which_it_happens() -> None:
    marks = StepMarks(10.0)
    marks.compute = [(0, 11.0), (1, 14.0), (2, 15.0)]
    marks.pauses = [(12.0, 13.0)]
    marks.collectives = [(ALLREDUCE_EVENT, 0, 8, 12.25, 13.0)]
    line = timeline([[marks]], ("forward a", "backward a", "update"), emulated_network=False)
    names = [line.operations[code] for code in line.operation]
    assert list(zip(names, line.start_s.tolist(), line.end_s.tolist(), strict=True)) == [
        ("forward a", 0.0, 1.0),
        ("backward a", 1.0, 2.0),
        ("wait", 2.0, 2.25),
        ("allreduce 0", 2.25, 3.0),
        ("backward a", 3.0, 4.0),
        ("update", 4.0, 5.0),
    ]
    assert line.exposed_communication_s() == exposed_s(marks) == 1.0
