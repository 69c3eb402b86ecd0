"""A caption names an element only where the figure draws it; tested with charts of the figures' own kinds."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from report_factory import sweep

from dpsim.harness.sweep.compare import compare
from dpsim.report import bench
from dpsim.report.charts import Bars, Chart, Lines, Series, Steps
from dpsim.report.quality import CAPTIONS
from dpsim.report.sweep.charts import step_chart
from dpsim.report.sweep.timelines import Timelines
from dpsim.report.sweep.write import parts_caption, steps_caption
from dpsim.schedule import LOSS_EVENT, OTHER_EVENT, OVERHEAD_EVENT
from dpsim.timeline import Timeline, kind_of
from dpsim.validation.page import scores_table


def test_the_other_part_of_a_step_is_explained_only_where_a_bar_has_it() -> None:
    def bars(other: float) -> Chart:
        stack = {"forward": 1.0, "other": other}
        panel = Bars(title="", subtitle="", x_label="", bars=[("1", stack, stack)])
        return Chart(panels=[panel], height_in=3.0)

    assert "Other: the loss" in parts_caption(bars(0.1))
    assert "Other" not in parts_caption(bars(0.0))


def test_a_step_without_other_events_buckets_or_waits_has_no_words_on_them() -> None:
    predictions, results = sweep()
    chart = step_chart(compare(predictions, results), Timelines.of(predictions, results))
    assert chart is not None
    assert "Other: the loss" in steps_caption(chart)

    others = (OVERHEAD_EVENT, LOSS_EVENT, OTHER_EVENT)

    def without(step: Timeline) -> Timeline:
        names = [f"forward {name}" if kind_of(name) in others else name for name in step.operations]
        return replace(step, operations=tuple(names))

    panels = [
        replace(panel, measured=without(panel.measured), predicted=without(panel.predicted), buckets=((), ()))
        for panel in chart.panels
        if isinstance(panel, Steps)
    ]
    plain = steps_caption(replace(chart, panels=[replace(panel, waits_s=()) for panel in panels]))
    assert not [word for word in ("Other", "A bucket", "Dotted") if word in plain]
    assert "Dotted" in steps_caption(replace(chart, panels=[replace(panel, waits_s=[(0.0, 1.0)]) for panel in panels]))


@pytest.mark.parametrize("sizes", [(), (1.0,), (1.0, 2.0)])
def test_the_bound_is_called_dashed_only_where_it_is_a_line(
    sizes: tuple[float, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    bound = Series(name="the bound", x=sizes, y=sizes, look="ideal")
    panel = Lines(title="", subtitle="", x_label="size", series=[bound] if sizes else [])
    monkeypatch.setattr(bench, "bandwidth_chart", lambda _: Chart(panels=[panel], height_in=3.0))
    result: Any = SimpleNamespace()
    assert ("Dashed" in bench.bandwidth_figure(result).caption) is (len(sizes) > 1)


def test_the_baseline_of_the_divergence_whose_dots_stand_out_is_not_called_faint() -> None:
    assert "Faint" not in CAPTIONS["divergence"][1] and "independent rows" in CAPTIONS["divergence"][1]


def test_no_column_of_a_validation_needs_its_neighbour_to_be_understood() -> None:
    heads = [column.head for column in scores_table([], "a title").columns]
    assert not [head for head in heads if head.split()[-1] == "it" or head.endswith("'s")]
