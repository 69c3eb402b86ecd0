"""A step in the memory of a device, as the host sees it: it asks for everything, and waits once."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest
from queued_device import QueuedMemory, QueuedTransport

from dpsim import codec
from dpsim.kernels import update as on_host
from dpsim.lowering import lower
from dpsim.nn import build_model
from dpsim.nn.device_ops import DeviceOps
from dpsim.plan import Plan
from dpsim.replica import Batch
from dpsim.report.trace import trace_events
from dpsim.runtime.describe import describe
from dpsim.runtime.recorder import AskedTimes, StepMarks, exposed_s, timeline
from dpsim.runtime.step import StepRunner
from dpsim.schedule import KINDS
from dpsim.timeline import Timeline, TimelineRecord


def runner(memory: QueuedMemory, monkeypatch: pytest.MonkeyPatch, **plan: Any) -> StepRunner:
    """The step of a multilayer perceptron on the first of two devices, with a bucket a tensor."""
    monkeypatch.setattr("dpsim.runtime.shard_update._kernels", lambda _: on_host)
    replica = build_model("mlp:4,4", (3, 1, 1), 2, ops=DeviceOps(memory))
    lowered = lower(describe(replica, "model"), Plan(devices=2, global_batch=4, fusion_threshold_bytes=1.0, **plan))
    opened = StepRunner(replica, lowered, QueuedTransport(memory))
    opened.warm_up()
    opened.initialise(0)
    memory.log.clear()
    return opened


def batch() -> Batch:
    x = np.random.default_rng(0).standard_normal((2, 3, 1, 1)).astype(np.float32)
    return Batch(x=x, labels=np.array([0, 1]), leaves=(0, 2))


@pytest.mark.parametrize("overlap", ["off", "inline", "poll", "thread"])
def test_the_host_asks_for_all_allreduces_and_then_waits_once(overlap: str, monkeypatch: pytest.MonkeyPatch) -> None:
    memory = QueuedMemory()
    step = runner(memory, monkeypatch, overlap=overlap)
    for number in range(2):
        memory.log.clear()
        outcome = step.run(batch(), 4)
        log = [entry for entry in memory.log if entry != "mark"]
        assert log.count("allreduce") == step.schedule.buckets and log[-1] == "fetch" and log.count("fetch") == 1
        assert log[-2] == "follow allreduce"  # the update comes after the last allreduce by itself
        assert log.count("follow allreduce") == (4 if overlap == "inline" else 1)
        assert step.steps == number + 1 and outcome.sums.samples == 2
    step.close()


@pytest.mark.parametrize("overlap", ["off", "inline", "poll", "thread"])
def test_the_times_of_a_step_are_read_when_the_device_has_come_to_them(
    overlap: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = QueuedMemory()
    step = runner(memory, monkeypatch, overlap=overlap)
    marks = step.run(batch(), 4).marks
    assert marks.clock == "device" and marks.pauses and exposed_s(marks) > 0
    assert marks.compute == [] and marks.collectives == [] and marks.asked_times is not None
    with pytest.raises(AssertionError, match="the host waits for mark"):  # the update is under way
        pickle.dumps(marks)
    marks = step.run(batch(), 4).marks
    memory.fetch([])
    step.close()
    names = step.program.names
    kept: StepMarks = pickle.loads(pickle.dumps(marks))
    assert kept == marks.settle() and kept.unread is None
    computed = [names[operation].split()[0] for operation, _ in kept.compute]
    layers = len(step.replica.layers)
    assert computed == ["step", *["forward"] * layers, "loss", *["backward"] * layers, "step", "update"]
    ends = [end_s for _, end_s in kept.compute]
    assert ends == sorted(ends) and len(set(ends)) == len(ends)
    assert [bucket for _, bucket, *_ in kept.collectives] == [each.bucket for each in step.program.queue]
    assert kept.last_operation == step.program.update


def test_rows_of_a_timeline_say_by_which_clock_and_when_the_host_asked() -> None:
    """Forward 1 to 3 s, a pause to 4 s, update to 6 s on the device; the host asked for all within a second."""
    asked_times = AskedTimes(compute=[(0, 0.1), (1, 0.3), (2, 0.5)], collectives=[0.35], pauses=[0.4])
    first, second = (
        StepMarks(
            begin_s,
            compute=[(0, begin_s + 1.0), (1, begin_s + 4.0), (2, begin_s + 6.0)],
            collectives=[(KINDS.index("allreduce"), 0, 8, begin_s + 2.0, begin_s + 3.5)],
            pauses=[(begin_s + 3.0, begin_s + 4.0)],
            end_s=begin_s + 0.5,
            asked_times=asked_times,
        )
        for begin_s in (0.0, 5.0)
    )
    line = timeline([[first], [second]], ["step overhead", "forward a", "update"], emulated_network=False)
    assert line.clock == "device" and line.asked_s is not None
    rows = zip([line.operations[i] for i in line.operation], line.start_s, line.end_s, line.asked_s, strict=True)
    assert list(rows)[:5] == [
        ("step overhead", 0.0, 1.0, 0.1),
        ("forward a", 1.0, 3.0, 0.3),
        ("allreduce 0", 2.0, 3.5, 0.35),
        ("wait", 3.5, 4.0, 0.4),
        ("update", 4.0, 6.0, 0.5),
    ]
    begins_s = line.select(step=1).start_s[0]
    assert begins_s == 6.0  # where the host began at 5 s, the device was still updating
    again = Timeline.from_record(codec.decode(codec.to_builtins(line.to_record()), TimelineRecord, "timeline"))
    assert again.clock == "device" and again.asked_s is not None and again.asked_s.tolist() == line.asked_s.tolist()
    event = next(event for event in trace_events([again])["traceEvents"] if event["name"] == "allreduce 0")
    assert event["args"] == {"step": 0, "size_bytes": 8, "asked_us": 0.35e6}
    host = timeline([[StepMarks(0.0, compute=[(0, 1.0)])]], ["forward a"], emulated_network=False)
    assert host.clock == "host" and host.to_record().asked_s == ()
