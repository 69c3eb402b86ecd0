import dataclasses
import re
from pathlib import Path

import msgspec
import numpy as np
import pytest
from report_factory import sweep, timeline

from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.sweep import read_swept
from dpsim.records.sweep import MeasuredPoint
from dpsim.report.charts import Steps
from dpsim.report.figures import draw
from dpsim.report.sweep.charts import step_chart
from dpsim.report.sweep.timelines import (
    Timelines,
    buckets,
    length_s,
    nearest_step,
    parts_s,
    ready_last,
    waits_for_ranks_s,
)
from dpsim.report.trace import fastest
from dpsim.schedule import COMPUTE_LANE
from dpsim.timeline import Timeline, TimelineRecord


def _timeline(compute: float, exposed: float = 1e-3, source: str = "measured") -> Timeline:
    return Timeline.from_record(timeline(source, compute, exposed, 4, True, 2))


def _late_rank(step: Timeline, late_s: float) -> Timeline:
    """The step with a rank 1 that computes ``late_s`` longer before its first collective."""
    of_late = (step.rank == 1) & (step.lane != COMPUTE_LANE)
    return dataclasses.replace(step, start_s=step.start_s + late_s * of_late)


def test_the_step_nearest_to_the_median_is_chosen_among_all_runs() -> None:
    runs = [_timeline(6e-3), _timeline(9e-3)]
    assert length_s(nearest_step(runs, 9.5e-3)) == pytest.approx(10e-3)
    assert length_s(nearest_step(runs, 7.5e-3)) == pytest.approx(7e-3)


def test_parts_add_up_to_the_step_and_a_change_of_speed_is_in_each_of_them() -> None:
    step = _timeline(6e-3).select(step=0)
    usual, slow = parts_s(step, 7e-3, 1e-3), parts_s(step, 13e-3, 1e-3)
    assert sum(usual.values()) == pytest.approx(7e-3)
    assert sum(slow.values()) == pytest.approx(13e-3)
    assert usual["other"] == pytest.approx(6e-3 / 17)
    for part in ("forward", "backward", "update", "other"):
        assert slow[part] == pytest.approx(2 * usual[part])


def test_a_rank_that_begins_a_collective_first_waits_for_the_other() -> None:
    step = _late_rank(_timeline(6e-3).select(step=0), 1e-4)
    assert waits_for_ranks_s(step, 1) == []
    waits = waits_for_ranks_s(step, 0)
    assert len(waits) == 4
    assert [high - low for low, high in waits] == pytest.approx([1e-4] * 4)


def test_the_rank_that_was_ready_last_has_the_least_exposed_communication() -> None:
    step = _timeline(6e-3).select(step=0)
    assert ready_last(_late_rank(step, 1e-4)).rank[0] == 1


_GRADIENTS = {"dense2": 4096, "dense1": 4096, "conv3": 4096, "conv2": 2048, "conv1": 2048}


def test_buckets_fill_as_backward_reaches_their_gradients_and_wait_for_the_link() -> None:
    step = _timeline(6e-3).select(step=0, rank=0)
    filled = buckets(step, _GRADIENTS)
    begin_s, unit_s = 5 * 6e-3 / 17, 2 * 6e-3 / 17
    ends_s = [begin_s + unit_s * layers for layers in (0, 1, 2, 3, 5)]
    assert [bucket.begin_s for bucket in filled] == pytest.approx(ends_s[:-1])
    assert [bucket.full_s for bucket in filled] == pytest.approx(ends_s[1:])
    assert [bucket.sent_s for bucket in filled] == pytest.approx(list(step.start_s[step.lane != COMPUTE_LANE]))
    assert all(bucket.size_bytes == 4096 for bucket in filled)


def test_buckets_are_not_drawn_where_collectives_sum_something_else_or_cannot_have_the_gradients() -> None:
    step = _timeline(6e-3).select(step=0, rank=0)
    assert buckets(step, _GRADIENTS | {"conv1": 4096}) == []
    assert buckets(step, {"conv1": 4 * 4096}) == []
    assert buckets(step, {}) == []


def _of_two_batches(points: tuple[MeasuredPoint, ...]) -> tuple[MeasuredPoint, ...]:
    """The points, and the same with 4 times the batch in twice the time."""
    large = []
    for point in points:
        plan = msgspec.structs.replace(point.setting.plan, global_batch=256)
        setting = msgspec.structs.replace(point.setting, plan=plan)
        large.append(msgspec.structs.replace(point, setting=setting, step_s=tuple(2 * s for s in point.step_s)))
    return (*points, *large)


def test_a_trace_is_of_the_setting_that_trains_fastest_and_not_of_the_shortest_step() -> None:
    points = _of_two_batches(sweep(rounds=2)[1].points)
    assert fastest(list(points), {}).plan.global_batch == 256
    assert fastest(list(points), {"local_batch": 32}).plan.global_batch == 64


def test_the_step_is_drawn_of_the_point_that_trains_fastest_and_named_with_its_batch() -> None:
    predictions, results = sweep(networks=("node",), rounds=4)
    comparison = compare(predictions, results)
    slowest = max((p for p in comparison.scored if p.devices > 1), key=lambda p: p.measured_step_s)
    points = tuple(p.replaced(global_batch=p.global_batch * 100) if p == slowest else p for p in comparison.points)
    chart = step_chart(msgspec.structs.replace(comparison, points=points), Timelines.of(predictions, results))
    assert chart is not None
    figure = draw(chart)
    (title,) = [axis.get_title(loc="left") for axis in figure.axes]
    assert f"fusion threshold {slowest.setting.text('fusion_threshold_bytes')}" in title
    assert "local batch 32" in title
    labels = [text.get_text() for axis in figure.axes for text in axis.texts]
    assert any(f"{slowest.measured_step_s * 1e3:.2f} ms" in label for label in labels)


REPORTS = Path(__file__).parents[2] / "reports"


@pytest.mark.parametrize("name", sorted(path.parent.name for path in REPORTS.glob("*/timeline.svg")))
def test_a_step_that_is_drawn_is_as_long_as_its_label_says_and_is_the_scored_prediction(name: str) -> None:
    swept = read_swept(REPORTS / name)
    chart = step_chart(swept.comparison, Timelines.of(swept.scored, swept.results))
    assert chart is not None and chart.panels
    for panel in chart.panels:
        assert isinstance(panel, Steps)
        for drawn, label in zip((panel.measured, panel.predicted), panel.labels, strict=True):
            said_ms = float(re.findall(r"([\d.]+) ms", label)[0])
            assert length_s(drawn) * 1e3 == pytest.approx(said_ms, rel=0.006, abs=0.006)
        predicted = re.findall(r"[\d.]+ ms", panel.labels[1])[-1]
        of_label = [point for point in swept.comparison.points if f"{point.predicted_step_s * 1e3:.2f} ms" == predicted]
        assert length_s(panel.predicted) == pytest.approx(of_label[0].predicted_step_s, rel=0.03)
        assert panel.exposed in [
            (
                point.exposed_communication_s / point.measured_step_s,
                point.predicted_exposed_communication_s / point.predicted_step_s,
            )
            for point in of_label
        ]


def _with_an_early_rank(record: TimelineRecord, early_s: float) -> TimelineRecord:
    """The timeline with a rank 1 that begins each step so much earlier."""
    step = Timeline.from_record(record)
    first = np.zeros(len(step.start_s), bool)
    for number in np.unique(step.step):
        of_rank = np.flatnonzero((step.step == number) & (step.rank == 1))
        first[of_rank[step.start_s[of_rank].argmin()]] = True
    return dataclasses.replace(step, start_s=step.start_s - early_s * first).to_record()


def test_the_length_of_a_rank_that_began_late_stands_beside_that_of_the_step() -> None:
    predictions, results = sweep(devices=(1, 2))
    late = [
        msgspec.structs.replace(point, timeline=_with_an_early_rank(point.timeline, 2e-3))
        if point.timeline is not None and point.setting.plan.devices == 2
        else point
        for point in results.points
    ]
    results = msgspec.structs.replace(results, points=tuple(late))
    chart = step_chart(compare(predictions, results), Timelines.of(predictions, results))
    assert chart is not None
    for panel in chart.panels:
        assert isinstance(panel, Steps)
        drawn, step = (float(each) for each in re.findall(r"([\d.]+) ms", panel.labels[0])[:2])
        assert panel.labels[0].startswith("drawn ") and step == pytest.approx(drawn + 2, abs=0.02)
