"""Which samples count as disturbed by other processes, what is kept of that, and of which samples medians are."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import report_factory

from dpsim import codec
from dpsim.errors import FileFormatError
from dpsim.harness.sweep.compare import compare
from dpsim.records.sweep import MeasuredPoint, Results, clean_values, enough_clean, share_clean
from dpsim.report.sweep.facts import run_facts
from dpsim.report.sweep.verdict import verdict
from dpsim.report.sweep.warnings import warnings
from dpsim.setting import setting_of
from dpsim.study.core_ticks import TICKS_PER_S, CoreTicks, read_ticks
from dpsim.study.disturbance import (
    MOST_OTHERS,
    Judge,
    RowMarks,
    RunQueue,
    Seen,
    Watcher,
    ancestors,
    cpu_s,
    run_queue_marks,
)
from dpsim.study.profile import FORWARD_S, STEP_S
from dpsim.study.rows import CLEAN, ProfiledBatch, Rows, with_medians
from dpsim.study.setting_samples import SettingSamples

BATCH = ProfiledBatch(devices=1, local_batch=8)
SETTING = setting_of({"model": "mlp", "devices": 2, "global_batch": 64})


def seen(*waited_s: float | None, stolen: int | None = 0, others_s: float | None = 0.0, wall_s: float = 1.0) -> Seen:
    return Seen(list(waited_s), stolen, others_s, wall_s)


@pytest.mark.parametrize(
    ("ranks", "step_s", "mark"),
    [
        ([seen(0.0), seen(0.0)], 1e-3, True),
        ([seen(49e-6), seen(49e-6)], 1e-3, True),  # waking up takes as long
        ([seen(0.0), seen(51e-6)], 1e-3, False),
        ([seen(0.9e-3)], 0.1, True),  # less than 1 % of a long step
        ([seen(1.1e-3)], 0.1, False),
        ([seen(0.0, stolen=1)], 1e-3, True),
        ([seen(0.0), seen(0.0, stolen=2)], 1e-3, False),
        ([seen(0.0), seen(None)], 1e-3, None),
        ([seen(0.0, stolen=None)], 1e-3, None),
        ([seen(1.0), seen(None, stolen=None)], 1e-3, False),
    ],
)
def test_a_step_is_disturbed_where_a_rank_waited_for_its_core(
    ranks: list[Seen], step_s: float, mark: bool | None
) -> None:
    assert run_queue_marks(ranks, {0: step_s}) == [mark]
    assert Judge(crowded=False).marks(ranks, {0: step_s}) == [mark]


def test_where_threads_outnumber_the_cores_a_block_of_visits_is_judged_by_other_processes() -> None:
    for share, mark in ((0.9 * MOST_OTHERS, True), (1.1 * MOST_OTHERS, False)):
        judge = Judge(crowded=True, cores=2)
        visit_s = judge.block_s / 2.5
        ranks = [seen(0.5, 0.5, others_s=each * 2 * visit_s, wall_s=visit_s) for each in (0.0, share)]
        assert judge.block_s >= 0.2
        assert [judge.marks(ranks, {0: 1.0, 1: 1.0}) for _ in range(4)] == [[], [], [mark] * 6, []]
    judge = Judge(crowded=True, cores=2)
    assert judge.marks([seen(0.0, others_s=None, wall_s=9.0)], {0: 1.0}) == [None]
    assert judge.marks([seen(0.0, stolen=2, wall_s=9.0)], {0: 1.0}) == [False]


def test_the_run_queue_adds_up_threads_that_come_and_go(tmp_path: Path) -> None:
    queue = RunQueue(tmp_path)

    def thread(name: str, waited_ns: int) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "schedstat").write_text(f"9999 {waited_ns} 7\n")

    queue.refresh()
    assert queue.waited_s() is None
    thread("1", 0)
    queue.refresh()
    assert queue.waited_s() is None  # a kernel that does not count
    thread("1", 1000)
    thread("2", 500)
    queue.refresh()
    assert queue.waited_s() == pytest.approx(1.5e-6)
    (tmp_path / "2" / "schedstat").unlink()
    (tmp_path / "2").rmdir()
    thread("1", 4000)
    queue.refresh()
    assert queue.waited_s() == pytest.approx(4.5e-6)  # what an ended thread waited stays


def test_the_node_tells_stolen_and_busy_time_and_nothing_without_its_file(tmp_path: Path) -> None:
    stat = tmp_path / "stat"
    assert read_ticks(stat) is None
    stat.write_text("cpu  100 20 30 4000 500 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\nprocs_running 3\n")
    assert read_ticks(stat) == ((163, 8, 13), {0: (19, 8, 13)}, 3)
    stat.write_text("cpu  1 2\n")
    assert read_ticks(stat) is None
    assert cpu_s([2**22 + 1]) is None and ancestors(2**22 + 1) == [2**22 + 1]


def test_a_watcher_tells_what_was_waited_in_each_sample_and_what_others_used(tmp_path: Path) -> None:
    (tmp_path / "1").mkdir()
    file = tmp_path / "1" / "schedstat"
    file.write_text("0 1000 0")
    times, cpus = iter([CoreTicks(10 * TICKS_PER_S, 5), CoreTicks(12 * TICKS_PER_S, 7)]), iter([1.0, 2.5])
    watcher = Watcher([1], RunQueue(tmp_path), lambda: next(times), lambda _: next(cpus))
    watcher.begin()
    file.write_text("0 3000 0")
    watcher.sample_ends()
    file.write_text("0 9000 0")
    watcher.sample_begins()
    file.write_text("0 9500 0")
    watcher.sample_ends()
    found = watcher.seen()
    assert found.waited_s == pytest.approx([2e-6, 5e-7])
    assert (found.stolen_ticks, found.others_s) == (2, 0.5)


def test_steps_beside_a_process_on_the_core_of_a_rank_are_disturbed(on_ranks: Any) -> None:
    if not COUNTED:
        pytest.skip("this system does not count how long threads wait for a core")
    plan = {"overlap": "poll", "fusion_rule": "tarantella", "fusion_threshold_bytes": 65536.0}
    before, beside = on_ranks("ranks_disturbed:marked", {"plan": plan}, devices=2)
    assert len(before) == len(beside) and {*before, *beside} <= {True, False}
    assert beside.count(False) >= 3


def _known() -> bool:
    queue = RunQueue()
    queue.refresh()
    return queue.waited_s() is not None


COUNTED = _known()
"""Whether this system counts how long threads wait for a core."""


def point(clean: list[bool | None], step_s: list[float] | None = None) -> MeasuredPoint:
    samples = step_s or [2.0 if mark is False else 1.0 for mark in clean]
    zeros = (0.0,) * len(samples)
    return MeasuredPoint(
        setting=SETTING,
        buckets=1,
        step_s=tuple(samples),
        exposed_communication_s=zeros,
        round=tuple(range(len(samples))),
        losses=zeros,
        clean=tuple(clean),
    )


def test_medians_are_of_clean_samples_and_never_join_those_of_which_nothing_is_known() -> None:
    known, earlier = point([True] * 6 + [False] * 20), point([], [9.0] * 30)
    assert clean_values([known]) == (1.0,) * 6 and enough_clean([known])
    assert clean_values([earlier]) == (9.0,) * 30 and enough_clean([earlier]) and share_clean([earlier]) is None
    assert clean_values([known, earlier]) == (1.0,) * 6
    assert clean_values([point([None] * 9 + [True] * 6)], "round") == tuple(range(9, 15))
    few = point([True] * 5 + [False] * 5 + [None] * 3)
    assert not enough_clean([few]) and clean_values([few]) == (1.0,) * 5 + (2.0,) * 5 and share_clean([few]) == 0.5


def test_a_setting_is_measured_until_enough_of_its_clean_samples_agree() -> None:
    samples = SettingSamples(SETTING, None, Judge(crowded=False))

    def visit(step_s: float, waited_s: float) -> None:
        for _ in range(3):
            samples.add({"step_s": step_s, "exposed_communication_s": 0.0, "round": 0, "losses": 0.0})
        samples.mark([seen(*[waited_s] * 3)], dict.fromkeys(range(3), step_s))

    for _ in range(4):
        visit(5e-3, 1e-3)
    assert not samples.narrow(0.02)
    visit(1e-3, 0.0)
    assert not samples.narrow(0.02)
    visit(1e-3, 0.0)
    assert samples.narrow(0.02) and samples.clean_step_s() == (1e-3,) * 6
    again = SettingSamples(SETTING, samples.point(buckets=1), Judge(crowded=False))
    assert again.clean == samples.clean and again.clean_step_s() == samples.clean_step_s()


def test_samples_of_an_earlier_version_stay_out_of_the_median_once_there_are_marked_ones() -> None:
    samples = SettingSamples(SETTING, point([], [9.0] * 10), Judge(crowded=True, cores=2))
    assert samples.clean_step_s() == (9.0,) * 10
    samples.add({"step_s": 1.0, "exposed_communication_s": 0.0, "round": 10, "losses": 0.0})
    samples.mark([seen(0.0, wall_s=0.01)], {0: 1.0})
    assert samples.clean[-1] is None
    samples.add({"step_s": 1.0, "exposed_communication_s": 0.0, "round": 11, "losses": 0.0})
    samples.mark([seen(0.0, wall_s=9.0)], {0: 1.0})
    assert samples.clean == [None] * 10 + [True] * 2


def test_rows_are_of_clean_values_where_enough_visits_have_some() -> None:
    rows, marks = Rows(), RowMarks(BATCH, Judge(crowded=False))
    for visit in range(8):
        disturbed = visit % 2 == 1
        rows.add(BATCH, STEP_S, visit, [1.0, 5.0] if not disturbed else [7.0, 7.0])
        rows.add(BATCH, FORWARD_S, visit, [0.5 if not disturbed else 3.0], part=2)
        marks.add(rows, visit, [seen(1e-3 * disturbed, 1e-3)], {0: 1e-3, 1: 1e-3})
        whole = rows.values(BATCH, STEP_S)
        assert (whole.max() == 1.0) == (visit >= 4)  # three clean visits
    assert rows.values(BATCH, FORWARD_S, 2).tolist() == [0.5] * 4
    assert rows.visit_medians(BATCH, STEP_S).tolist() == [1.0] * 4
    kept = Rows(with_medians(rows.series(), [FORWARD_S]))
    assert np.unique(kept.values(BATCH, FORWARD_S, 2)).tolist() == [0.5]
    assert len(next(each for each in rows.series() if each.quantity == STEP_S).value) == 16  # all are kept


def test_rows_without_any_mark_are_all_used() -> None:
    rows, marks = Rows(), RowMarks(BATCH, Judge(crowded=False))
    for visit in range(6):
        rows.add(BATCH, STEP_S, visit, [1.0])
        marks.add(rows, visit, [seen(None)], {0: 1e-3})
    assert not rows.parts(BATCH, CLEAN) and len(rows.values(BATCH, STEP_S)) == 6


def _marked(results: Results, share: float) -> Results:
    """The results with the last samples of every point disturbed, twice as long as they were."""
    points = []
    for each in results.points:
        clean = math.floor(share * len(each.step_s))
        marks = tuple(number < clean for number in range(len(each.step_s)))
        step_s = tuple(value * (1 if mark else 2) for value, mark in zip(each.step_s, marks, strict=True))
        points.append(msgspec.structs.replace(each, step_s=step_s, clean=marks, disturbance_rule="run-queue/1"))
    return msgspec.structs.replace(results, points=tuple(points))


def test_a_report_is_of_clean_samples_and_says_how_many_there_were() -> None:
    predictions, results = report_factory.sweep()
    plain, marked = compare(predictions, results), compare(predictions, _marked(results, 0.6))
    for before, after in zip(plain.points, marked.points, strict=True):
        assert after.measured_step_s < 1.1 * before.measured_step_s and after.share_clean is not None
    assert plain.share_clean is None and marked.share_clean == pytest.approx(0.6, abs=0.05)
    assert "clean samples" in dict(run_facts(marked, predictions, results))
    assert "clean samples" not in dict(run_facts(plain, predictions, results))
    (busy,) = (each for each in warnings(marked) if each.kind == "busy")
    assert busy.text.startswith("other processes took a core in 4")
    assert not any(verdict(marked, group).reason for group in marked.groups)


def test_no_verdict_is_spoken_of_too_few_clean_samples() -> None:
    predictions, results = report_factory.sweep()
    marked = compare(predictions, _marked(results, 2.5 / len(results.points[0].step_s)))
    assert all("samples were clean" in verdict(marked, group).reason for group in marked.groups)
    assert marked.points[0].too_few_clean.startswith("2 of ")


def test_marks_for_other_samples_are_refused_and_marks_are_packed_small() -> None:
    predictions, results = report_factory.sweep()
    first = msgspec.structs.replace(results.points[0], clean=(True,))
    with pytest.raises(FileFormatError, match="says of 1 whether they are clean"):
        compare(predictions, msgspec.structs.replace(results, points=(first, *results.points[1:])))
    sizes = [len(codec.columns_text(codec.to_builtins(each))) for each in (results, _marked(results, 0.8))]
    assert sizes[1] < 1.15 * sizes[0]
