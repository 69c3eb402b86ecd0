import json
from pathlib import Path

import numpy as np
import pytest
from report_factory import timeline

from dpsim.report.trace import trace_events, write_trace
from dpsim.schedule import COMMUNICATION_LANE, COMPUTE_LANE
from dpsim.timeline import Timeline

MEASURED = Timeline.from_record(timeline("measured", 6e-3, 1e-3, 4, True, 2))
PREDICTED = Timeline.from_record(timeline("predicted", 6e-3, 1e-3, 4, True, 2))


def test_every_event_of_the_kept_steps_is_there_in_microseconds() -> None:
    actual = [e for e in trace_events([MEASURED])["traceEvents"] if e["ph"] == "X"]
    assert len(actual) == len(MEASURED.start_s)
    assert min(e["ts"] for e in actual) == 0
    total = sum(e["dur"] for e in actual)
    assert total == pytest.approx(float(np.sum(MEASURED.end_s - MEASURED.start_s)) * 1e6, rel=1e-6)


def test_only_the_first_steps_are_kept() -> None:
    actual = trace_events([MEASURED], steps=1)["traceEvents"]
    assert {e["args"]["step"] for e in actual if e["ph"] == "X"} == {0}


def test_a_process_is_a_rank_and_a_thread_a_lane_with_names() -> None:
    events = trace_events([MEASURED, PREDICTED])["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert list(names.values()) == [
        "measured (emulated network), rank 0",
        "measured (emulated network), rank 1",
        "predicted (emulated network), rank 0",
        "predicted (emulated network), rank 1",
    ]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert set(lanes) == {(pid, lane) for pid in names for lane in (COMPUTE_LANE, COMMUNICATION_LANE)}
    assert lanes[0, COMMUNICATION_LANE] == "communication"
    assert {e["pid"] for e in events} == set(names)


def test_the_file_is_json_that_a_viewer_opens(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, [MEASURED, PREDICTED])
    raw = json.loads(path.read_text())
    assert isinstance(raw["traceEvents"], list)
    for event in raw["traceEvents"]:
        assert event["ph"] in ("X", "M")
        assert {"name", "pid", "tid"} <= set(event)


def test_an_empty_timeline_gives_an_empty_trace() -> None:
    assert trace_events([MEASURED.select(step=99)])["traceEvents"] == []
