"""The kernel against a plain Python simulation written from the statement of the model alone."""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from predict_cases import machines, plans, workloads

from dpsim.fusion_rules import FUSION_RULES
from dpsim.machine import Machine
from dpsim.model import compute_slowdown, predict, scheduled, step_times, timeline
from dpsim.model.cost import cost, overlapped_curve
from dpsim.model.curve import at
from dpsim.model.formulas import rounds
from dpsim.model.prices import local_share
from dpsim.plan import OVERLAPS, Plan
from dpsim.schedule import COMMUNICATION_LANE
from dpsim.workload import Workload

EASY = settings(max_examples=150)
STATIC = tuple(name for name, rule in FUSION_RULES.items() if not rule.while_running)


@dataclass
class Message:
    """One allreduce: solo and beside seconds, compute seconds it takes, the layer that completes it."""

    solo: float
    beside: float
    loss: float
    layer: int
    left: float = 1.0
    start: float = -1.0
    end: float = -1.0


@dataclass
class Witness:
    """A clock, a queue of messages that may start, and the rules of one overlap mechanism."""

    overlap: str
    poll_s: float
    stages: int
    now: float = 0.0
    queue: list[Message] = field(default_factory=list)
    current: Message | None = None
    stage: int = 0
    stage_end: float = 0.0

    def spend(self, work: float, computing: bool = True) -> None:
        """Compute (or idle) for ``work`` seconds of work."""
        if self.overlap != "thread":
            self.now += work
            return
        while True:
            if self.current is None and self.queue:
                self.current = self.queue.pop(0)
                self.current.start = self.now
            m = self.current
            if m is None:
                self.now += work
                return
            length = m.beside if computing else m.solo
            speed = max(0.0, 1 - m.loss / length) if computing and length else 1.0
            until_message = m.left * length
            until_work = 0.0 if work == 0 else work / speed if speed else float("inf")
            if until_message <= until_work:
                self.now += until_message
                work = max(0.0, work - speed * until_message)
                m.end, self.current = self.now, None
            else:
                self.now += until_work
                m.left -= until_work / length
                return

    def poll(self) -> None:
        if self.current is not None:
            self.now += self.poll_s
        while True:
            if self.current is None:
                if not self.queue:
                    return
                self.current = self.queue.pop(0)
                self.current.start, self.stage = self.now, 1
                self.stage_end = self.now + self.current.solo / self.stages
                self.now += self.current.loss
            if self.stage_end > self.now:
                return
            if self.stage == self.stages:
                self.current.end, self.current = self.now, None
            else:
                self.stage += 1
                self.stage_end = self.now + self.current.solo / self.stages

    def finish(self) -> None:
        """Everything that is left, computation being over."""
        if self.current is not None:
            if self.overlap == "thread":
                self.now += self.current.left * self.current.solo
            else:
                self.now = max(self.now, self.stage_end)
                self.now += (self.stages - self.stage) * self.current.solo / self.stages
            self.current.end = self.now
        for m in self.queue:
            m.start = self.now
            self.now += m.solo
            m.end = self.now
        self.queue = []


def witness(workload: Workload, machine: Machine, plan: Plan) -> tuple[float, float]:
    """(step, exposed communication) by the statement of the model."""
    schedule = scheduled(workload, machine, plan)
    n, factor = plan.devices, compute_slowdown(machine, plan.devices)[0]
    times = workload.times(local_share(plan))
    collective = machine.priced(plan.collective)
    poll_s, messages = 0.0, []
    for bucket in range(schedule.buckets if n > 1 else 0):
        size = int(schedule.bucket_size_bytes[bucket])
        solo = cost(machine, collective, size)[0]
        beside, loss = solo, 0.0
        if plan.overlap in ("poll", "thread"):
            curve, poll_s = overlapped_curve(machine, collective, plan.overlap)
            beside, loss = float(at(curve.points, 1, float(size))), float(at(curve.points, 2, float(size)))
        last = schedule.tensor_order[schedule.bucket_start[bucket + 1] - 1]
        layer = next(i for i, one in enumerate(workload.layers) if workload.tensors[last] in one.tensors)
        messages.append(Message(solo, beside, loss, layer))
    w = Witness(plan.overlap, poll_s, rounds(collective), now=workload.overhead_s * factor)
    busy = [(0.0, w.now)]
    host = w.now

    def wait_for_host(layer: int) -> None:
        nonlocal host
        host += workload.layers[layer].launch_s
        if host > w.now:
            target = host
            w.spend(host - w.now, computing=False)
            w.now = target

    count = len(workload.layers)
    for micro_batch in range(plan.accumulate):
        for i in range(count):
            wait_for_host(i)
            begin = w.now
            w.spend(times.forward_s[i] * factor)
            busy.append((begin, w.now))
        for i in reversed(range(count)):
            wait_for_host(i)
            begin = w.now
            w.spend(times.gradient_ready_s[i] * factor)
            complete = [m for m in messages if m.layer == i] if micro_batch == plan.accumulate - 1 else []
            if plan.overlap == "inline":
                busy.append((begin, w.now))
                for m in complete:
                    m.start = w.now
                    w.now += m.solo
                    m.end = w.now
                if w.now > busy[-1][1]:
                    host = max(host, w.now)
                begin = w.now
            else:
                w.queue += complete
            if plan.overlap == "poll" and workload.layers[i].tensors:
                w.poll()
            w.spend(times.backward_s[i] * factor - times.gradient_ready_s[i] * factor)
            if plan.overlap == "poll":
                w.poll()
            busy.append((begin, w.now))
    w.finish()
    hidden = sum(max(0.0, min(e, m.end) - max(b, m.start)) for b, e in busy for m in messages)
    exposed = sum(m.end - m.start for m in messages) - hidden
    return w.now + workload.update_s * factor, exposed


@EASY
@given(workloads(), machines(), plans(STATIC))
def test_the_kernel_agrees_with_the_witness(workload: Workload, machine: Machine, plan: Plan) -> None:
    step_s, exposed_s = witness(workload, machine, plan)
    predicted = predict(workload, machine, plan)
    assert predicted.step_s == pytest.approx(step_s, rel=1e-9, abs=1e-12)
    assert predicted.exposed_communication_s == pytest.approx(exposed_s, rel=1e-6, abs=1e-12)


@EASY
@given(workloads(), machines(), plans())
def test_prediction_step_times_and_timeline_are_the_same_numbers(
    workload: Workload, machine: Machine, plan: Plan
) -> None:
    predicted = predict(workload, machine, plan)
    assert step_times(workload, machine, [plan, plan]).tolist() == [predicted.step_s] * 2
    events = timeline(workload, machine, plan)
    assert events.source == "predicted"
    assert float(events.end_s.max()) == pytest.approx(predicted.step_s, abs=1e-15)
    assert events.exposed_communication_s() == pytest.approx(predicted.exposed_communication_s, rel=1e-9, abs=1e-12)
    messages = events.lane == COMMUNICATION_LANE
    assert events.size_bytes[messages].sum() == (workload.gradient_bytes if plan.devices > 1 else 0)
    assert np.all(events.end_s >= events.start_s)
    for lane in (0, 1):
        of_lane = events.lane == lane
        assert np.all(events.start_s[of_lane][1:] >= events.end_s[of_lane][:-1] - 1e-15)


@EASY
@given(workloads(launches=False), machines(), plans(), st.sampled_from(OVERLAPS))
def test_a_step_is_the_sum_of_its_parts(workload: Workload, machine: Machine, plan: Plan, overlap: str) -> None:
    plan = msgspec.structs.replace(plan, overlap=overlap)
    p = predict(workload, machine, plan)
    overhead = workload.overhead_s * compute_slowdown(machine, plan.devices)[0]
    parts = overhead + p.forward_s + p.backward_s + p.update_s + p.exposed_communication_s
    assert p.step_s == pytest.approx(parts, rel=1e-9, abs=1e-12)
