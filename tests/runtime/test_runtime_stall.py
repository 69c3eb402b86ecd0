"""The stall report: who waits for whom, in one line a stall, at any number of ranks and with every overlap."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from dpsim.errors import ConfigError
from dpsim.records.train import TrainConfig
from dpsim.runtime import rank_status
from dpsim.runtime.rank_status import Entry, RankStatus
from dpsim.runtime.stall import Labels, ranks, stalled

OnRanks = Callable[..., Any]
SECONDS = r"\d+\.\d s"
WAITERS = {2: "rank 0 waits", 3: "ranks 0 and 1 wait", 4: "ranks 0-2 wait"}
LABELS = Labels([["w"], ["dense2.weight", "dense2.bias"], list("abcde")], ["forward conv1", "loss", "backward conv1"])


def case(how: str, **plan: Any) -> dict[str, Any]:
    return {"name": f"{how} {plan}", "how": how, "plan": plan}


@pytest.mark.parametrize("devices", [3, *(pytest.param(n, marks=pytest.mark.slow) for n in (2, 4))])
def test_a_rank_that_computes_is_stopped_or_rests_is_named_once(devices: int, on_ranks: OnRanks) -> None:
    cases = [case("computing"), case("stopped")]
    if devices == 2:
        cases += [case("between"), case("evaluating")]
    if devices == 3:
        cases += [case("computing", overlap="inline", algorithm="ring")]
        cases += [case("computing", overlap="poll", algorithm="direct")]
        cases += [case("computing", overlap="thread", algorithm="halving-doubling")]
    actual = on_ranks("ranks_stall:stalls", {"cases": cases}, devices=devices)
    late = f"rank {devices - 1}"
    expected = {
        "computing": rf"{late}, which is computing in step 3 since {SECONDS} \(last done: loss\)",
        "stopped": rf"{late}, whose process {actual['pid']} is stopped \(step 2, since {SECONDS}\)",
        "between": rf"{late}, which is between steps 2 and 3 since {SECONDS}",
        "evaluating": rf"{late}, which is between steps 4 and 5 since {SECONDS}",
    }
    for one in cases:
        where, step = (r"in bucket 0 \(dense3\.\w+\)", 3) if one["how"] != "evaluating" else ("in the evaluation", 4)
        stall = rf"dpsim: stalled for {SECONDS} in step {step}: {WAITERS[devices]} {where} for {expected[one['how']]}"
        messages = [
            re.findall(rf"{stall}\ndpsim: going on after {SECONDS}\n", said) for said in actual["said"][one["name"]]
        ]
        assert sum(map(len, messages)) == 1, f"{one['name']}: {actual['said'][one['name']]}"
    assert actual["files"] == []


def test_nothing_is_said_where_nobody_waits_long_or_nobody_asked(on_ranks: OnRanks) -> None:
    quiet = [case("computing") | {"stall_after_s": 0.0}, case("between") | {"stall_after_s": 1e9}]
    assert set(map(tuple, on_ranks("ranks_stall:stalls", {"cases": quiet}, devices=2)["said"].values())) == {("", "")}


def entries(*rows: dict[str, Any]) -> list[Entry]:
    usual = {"pid": 7, "step": 5, "doing": rank_status.WAITING, "since_s": 40.0, "location": 1}
    return [Entry(**(usual | {"rank": rank} | row)) for rank, row in enumerate(rows)]


@pytest.mark.parametrize(
    ("rows", "size", "expected"),
    [
        (
            entries({}, {"doing": rank_status.COMPUTING, "last_done": 2}, {}),
            3,
            "ranks 0 and 2 wait in bucket 1 (dense2.weight, dense2.bias) for rank 1, which is computing in step 5"
            " since 60 s (last done: backward conv1)",
        ),
        (
            entries({}, {"location": 2}, {"doing": rank_status.STARTING}, {"state": "", "pid": 9}),
            4,
            "rank 0 waits in bucket 1 (dense2.weight, dense2.bias), rank 1 waits in bucket 2 (a, b, c and 2 more)"
            " for rank 2, which is starting since 60 s and for rank 3, whose process 9 is gone",
        ),
        (
            entries({}, {}),
            8,
            "ranks 0 and 1 wait in bucket 1 (dense2.weight, dense2.bias); the cause is on another node: ranks 2-7",
        ),
        (
            entries({"location": rank_status.CHECKPOINT}, {"location": rank_status.CHECKPOINT}),
            2,
            "ranks 0 and 1 wait in a checkpoint; no rank computes, so MPI or the network has lost a message, or the"
            " ranks wait for different things",
        ),
        (
            entries({"location": rank_status.UNKNOWN}, *[{"doing": rank_status.EVALUATING}] * 6),
            7,
            "rank 0 waits for "
            + " and for ".join(f"rank {n}, which is evaluating since 60 s" for n in (1, 2, 3, 4))
            + " and for ranks 5 and 6",
        ),
    ],
)
def test_the_line_says_who_waits_where_and_for_whom(rows: Sequence[Entry], size: int, expected: str) -> None:
    assert stalled(rows, size, 100.0, 60.0, LABELS) == f"stalled for 60 s in step 5: {expected}"


def test_ranks_are_listed_as_people_would() -> None:
    listed = {(3,): "rank 3", (0, 2): "ranks 0 and 2", (0, 1, 2, 5): "ranks 0-2 and 5", (1, 3, 4): "ranks 1, 3 and 4"}
    assert {numbers: ranks(numbers) for numbers in listed} == listed


def test_a_note_counts_only_for_what_it_was_taken_from() -> None:
    row = RankStatus()
    row.computes(4)
    row.note(bucket=2, last_done=1)
    assert (row.read(0).last_done, row.read(0).location) == (1, rank_status.UNKNOWN)
    row.waits()
    assert row.read(0).location == rank_status.UNKNOWN
    row.note(bucket=2, last_done=1)
    assert (row.read(0).last_done, row.read(0).location, row.read(0).step) == (rank_status.UNKNOWN, 2, 4)
    row.waits(rank_status.EVALUATION)
    assert row.read(0).location == rank_status.EVALUATION


@pytest.mark.parametrize("stall_after_s", [-1.0, math.nan])
def test_a_time_that_is_none_is_a_mistake(stall_after_s: float) -> None:
    with pytest.raises(ConfigError, match="stall-after is"):
        TrainConfig.of(stall_after_s=stall_after_s)
