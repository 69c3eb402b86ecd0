"""The map of a joint grid: a cell for each setting, with what was measured above what was predicted."""

from __future__ import annotations

import msgspec
from report_factory import sweep

from dpsim.harness.sweep.compare import compare
from dpsim.report.figures import draw
from dpsim.report.sweep.charts import map_chart, map_fields


def test_the_map_has_a_cell_for_every_setting_and_marks_the_best() -> None:
    comparison = compare(*sweep(networks=("node",)))
    assert map_chart(comparison) is None, "one field is no map"
    group = comparison.groups[0]
    joint = msgspec.structs.replace(comparison, compared=("fusion_threshold_bytes", "overlap"))
    members = joint.members(group)
    halves = []
    for point, overlap in zip(members, ["poll", "off"] * len(members), strict=False):
        plan = msgspec.structs.replace(point.setting.plan, overlap=overlap)
        halves.append(point.replaced(setting=msgspec.structs.replace(point.setting, plan=plan)))
    joint = msgspec.structs.replace(joint, points=tuple(halves))
    assert map_fields(joint) == ("fusion_threshold_bytes", "overlap")
    chart = map_chart(joint)
    assert chart is not None
    figure = draw(chart, narrow=True)
    (axis,) = figure.axes
    texts = [text.get_text() for text in axis.texts]
    assert [label.get_text() for label in axis.get_yticklabels()] == ["off", "poll"]
    for point in joint.members(group):
        for step_s in (point.measured_step_s, point.predicted_step_s):
            assert any(text.startswith(f"{point.global_batch / step_s:,.0f}") for text in texts)
    assert sum("★" in text for text in texts) == 1 and sum("◆" in text for text in texts) == 1
