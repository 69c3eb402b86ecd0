"""The training steps of a trace: what ``ProfilerStep#n``, DDP's forward, autograd and the optimizer marked."""

from __future__ import annotations

import bisect
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from dpsim.errors import FileFormatError
from dpsim.torch.script.kineto.clock import DeviceClock, HostClock, clock_of
from dpsim.torch.script.kineto.marks import Allreduce, Function, Gradient, Marks, Span
from dpsim.torch.script.probe.steps import RecordedStep
from dpsim.units import ITEM_BYTES

S = TypeVar("S", bound=Span)
_OVERLAP, _CLOCK_S = 0.01, 1e-5
"""Of its length, and beside it, a profiler step may overlap the next: times are rounded."""
_COUNTS = ("int", "long", "short", "byte", "bool", "char", "unsigned", "signed")
"""How types begin that no gradient has: DDP sends which parameters were used as whole numbers."""


@dataclass(frozen=True)
class SentBucket:
    """A bucket that DDP sent: its elements and their type on the wire."""

    elements: int
    dtype: str


@dataclass(frozen=True)
class TracedGradient:
    """A gradient in the order in which they became final: its shape (None: not recorded) and type."""

    shape: tuple[int, ...] | None
    dtype: str


@dataclass(kw_only=True)
class TracedStep(RecordedStep):
    """One step whose backward communicated: seconds by part, on the device where there is one, else on the host.

    ``step_s`` is without the time at its end in which it waited for allreduces alone. In the trace's own time the last
    backward began at ``backward_began_s``, and its allreduces had arrived at ``communicated_s``. ``bucket_ready_s`` and
    ``gradient_ready_s`` are seconds from the beginning of the last backward. ``launch_*`` are the host's seconds for
    the same, 0 where the host computes.
    """

    devices: int | None
    buckets: tuple[SentBucket, ...]
    bucket_ready_s: tuple[float, ...]
    gradients: tuple[TracedGradient, ...]
    gradient_ready_s: tuple[float, ...]
    backward_began_s: float = 0.0
    communicated_s: float = 0.0
    launch_forward_s: float = 0.0
    launch_bucket_s: tuple[float, ...] = ()
    launch_gradient_s: tuple[float, ...] = ()


@dataclass
class _MicroBatch:
    """A forward and the functions of the backward after it, with the allreduces that were sent among them."""

    forward: Span
    functions: Sequence[Function]
    sent: Sequence[Allreduce]

    def __post_init__(self) -> None:
        self.start_s = self.functions[0].start_s
        self.end_s = max(function.end_s for function in self.functions)


def steps_of(trace: str, marks: Marks) -> list[TracedStep]:
    """The steps of a trace that communicated in their backward, in their order. Raises ``FileFormatError``."""
    _check_marks(trace, marks)
    clock = clock_of(marks)
    marks.sort()
    sent = _sent_by_ddp(marks)
    steps = [step for number in sorted(marks.steps) if (step := _step(trace, marks, sent, clock, number)) is not None]
    if not steps:
        raise _refuse(
            trace,
            f"none of its {len(marks.steps)} profiler steps has DDP's forward, a backward and an allreduce in it",
            "record it with torch.profiler.profile around whole training steps, and profiler.step() after each",
        )
    return steps


def _check_marks(trace: str, marks: Marks) -> None:
    if not marks.allreduces:
        if marks.transfers:
            remedy = "record it with ProfilerActivity.CPU among the activities, on the rank's own thread"
            what = (
                f"its {len(marks.transfers)} allreduces are only there as what the backend did, and no call of DDP is"
            )
            raise _refuse(trace, what, remedy)
        remedy = (
            "record a script that trains with DistributedDataParallel on 2 ranks or more; one with fully_shard is read"
            " by dpsim profile --torch-script"
        )
        raise _refuse(trace, f"there is no allreduce among its {marks.events} events, but {_seen(marks)}", remedy)
    if marks.annotated and not len(marks.device.launch):
        remedy = "record it with ProfilerActivity.CUDA beside ProfilerActivity.CPU, on a machine that has the devices"
        what = (
            f"it has annotations alone: {marks.annotated} of collectives that GPUs did, and no kernel among its"
            f" {marks.events} events, which would say when"
        )
        raise _refuse(trace, what, remedy)
    if not marks.steps:
        remedy = "give torch.profiler.profile a schedule=, and call profiler.step() after every training step"
        raise _refuse(trace, f"there is no ProfilerStep#n among its {marks.events} events", remedy)
    for number, following in itertools.pairwise(sorted(marks.steps, key=lambda number: marks.steps[number].start_s)):
        step, begin_s = marks.steps[number], marks.steps[following].start_s
        if step.end_s - begin_s > _OVERLAP * (step.end_s - step.start_s) + _CLOCK_S:
            remedy = "it is damaged or was changed: record it again"
            raise _refuse(trace, f"ProfilerStep#{following} begins before ProfilerStep#{number} has ended", remedy)
    if not marks.functions or not marks.forwards:
        missing = "DistributedDataParallel.forward" if marks.functions else "function of autograd's backward"
        remedy = "record it with ProfilerActivity.CPU among the activities, which GPU traces need too"
        what = f"there is no {missing} among its {marks.events} events, but {_seen(marks)}"
        raise _refuse(trace, what, remedy)


def _seen(marks: Marks) -> str:
    """The collectives of a trace, the most frequent first."""
    return ", ".join(f"{count} {name}" for name, count in marks.collectives.most_common(4)) or "no collective"


def _refuse(trace: str, what: str, remedy: str) -> FileFormatError:
    return FileFormatError(f"{trace}: {what}", allowed="the trace of one rank of a training with DDP", remedy=remedy)


def _within(spans: Sequence[S], start_s: float, end_s: float) -> Sequence[S]:
    """The spans that begin in a time; they are sorted by their beginning."""
    first = bisect.bisect_left(spans, start_s, key=lambda span: span.start_s)
    return spans[first : bisect.bisect_left(spans, end_s, key=lambda span: span.start_s)]


def _sent_by_ddp(marks: Marks) -> list[Allreduce]:
    """The allreduces that DDP sent, each once, with all that the events nested in one another say of it.

    DDP sends them as it adds to a gradient. Others, such as those of a synchronised batch norm, are not among them.
    """
    sent: list[Allreduce] = []
    for event in marks.allreduces:
        if sent and _holds(sent[-1], event):
            sent[-1] = _merged(sent[-1], event)
        else:
            sent.append(event)
    _attach(sent, marks.transfers)
    accumulating = [function for function in marks.functions if function.accumulates]

    def begun_before(event: Span) -> Sequence[Function]:
        """The last few of them that began before an event, on any thread."""
        count = bisect.bisect_right(accumulating, event.start_s, key=lambda function: function.start_s)
        return accumulating[max(count - 4, 0) : count]

    return [each for each in sent if any(_holds(function, each) for function in begun_before(each))]


def _attach(calls: list[Allreduce], transfers: Sequence[Allreduce]) -> None:
    """Merge into each call what the backend's threads did for it: the first of its size that begins after it."""
    waiting, of_size = deque[int](), defaultdict[int | None, deque[int]](deque)
    attached, begun = set[int](), 0
    for transfer in transfers:
        while begun < len(calls) and calls[begun].start_s <= transfer.start_s:
            waiting.append(begun)
            of_size[calls[begun].elements].append(begun)
            begun += 1
        fitting = [waiting] if transfer.elements is None else [of_size[transfer.elements], of_size[None]]
        for numbers in fitting:
            while numbers and numbers[0] in attached:
                numbers.popleft()
        first = min((numbers[0] for numbers in fitting if numbers), default=None)
        if first is not None:
            attached.add(first)
            calls[first] = _merged(calls[first], transfer)


def _merged(call: Allreduce, event: Allreduce) -> Allreduce:
    """A call with what another event says of the same allreduce."""
    said = {name: getattr(event, name) for name in ("elements", "dtype", "ranks", "done_s")}
    return replace(call, **{name: value for name, value in said.items() if value not in (None, "")})


def _holds(outer: Span, inner: Span) -> bool:
    return outer.thread == inner.thread and outer.start_s <= inner.start_s <= outer.end_s


def _by_thread(spans: Sequence[S]) -> dict[str, list[S]]:
    threads: dict[str, list[S]] = {}
    for span in spans:
        threads.setdefault(span.thread, []).append(span)
    return threads


def _first_held(outer: Span, spans: Mapping[str, Sequence[S]]) -> S | None:
    """The first of the spans on its thread, sorted by their beginning, that begins within a span."""
    own = spans.get(outer.thread, ())
    first = bisect.bisect_left(own, outer.start_s, key=lambda span: span.start_s)
    return own[first] if first < len(own) and own[first].start_s <= outer.end_s else None


def _step(trace: str, marks: Marks, sent: list[Allreduce], clock: HostClock, number: int) -> TracedStep | None:
    """A step of the trace; None where its backward sends no gradients. Raises ``FileFormatError``."""
    mark = marks.steps[number]
    micro_batches = _micro_batches(marks, sent, mark)
    sending = [each for each in micro_batches if each.sent]
    if not sending:
        return None
    if len(sending) > 1:
        raise _refuse(
            trace,
            f"ProfilerStep#{number} has {len(sending)} backward passes that send gradients",
            "call profiler.step() after each of them, or let all but the last of a step run under no_sync()",
        )
    last = sending[0]
    for each in last.sent:
        _check_sent(trace, number, each)
    buckets = [each for each in last.sent if each.dtype in ITEM_BYTES]
    gradients = [f for f in last.functions if f.accumulates]
    inner = _by_thread(_within(marks.gradients, last.start_s, last.end_s))
    sent_on = _by_thread(last.sent)
    final_s = [f.end_s if (held := _first_held(f, sent_on)) is None else held.start_s for f in gradients]
    backward_start_s, done_s = clock.done_s(last.start_s), clock.done_s(last.end_s)
    if not buckets or done_s <= backward_start_s:
        return None
    updates = _within(marks.updates, mark.start_s, mark.end_s)
    communicated_s = max(_communicated(clock, last, updates), done_s)
    on_host = not isinstance(clock, DeviceClock)
    return TracedStep(
        mode="gradients",
        start_s=0.0,
        step_s=_length(marks, clock, number) - (communicated_s - done_s),
        forward_s=sum(
            clock.done_s(each.forward.end_s) - clock.begun_s(each.forward.start_s, each.forward.end_s)
            for each in micro_batches
        ),
        backward_s=sum(clock.done_s(each.end_s) - clock.done_s(each.start_s) for each in micro_batches),
        last_backward_s=done_s - backward_start_s,
        update_s=sum(clock.done_s(each.end_s) - clock.begun_s(each.start_s, each.end_s) for each in updates),
        input_s=sum(e.end_s - e.start_s for e in _within(marks.loads, mark.start_s, mark.end_s)) if on_host else 0.0,
        micro_batches=len(micro_batches),
        devices=max((each.ranks for each in last.sent if each.ranks), default=None),
        buckets=tuple(SentBucket(each.elements or 0, each.dtype) for each in buckets),
        bucket_ready_s=tuple(clock.done_s(each.start_s) - backward_start_s for each in buckets),
        gradients=tuple(_traced(function, inner) for function in gradients),
        gradient_ready_s=tuple(clock.done_s(moment_s) - backward_start_s for moment_s in final_s),
        backward_began_s=backward_start_s,
        communicated_s=communicated_s,
        launch_forward_s=0.0 if on_host else last.forward.end_s - last.forward.start_s,
        launch_bucket_s=() if on_host else tuple(each.start_s - last.start_s for each in buckets),
        launch_gradient_s=() if on_host else tuple(moment_s - last.start_s for moment_s in final_s),
    )


def _micro_batches(marks: Marks, sent: list[Allreduce], mark: Span) -> list[_MicroBatch]:
    """The forwards of a step that have a backward; those of evaluation have none."""
    forwards = _within(marks.forwards, mark.start_s, mark.end_s)
    ends_s = [*(forward.start_s for forward in forwards), mark.end_s][1:]
    return [
        _MicroBatch(forward, functions, _within(sent, forward.end_s, end_s))
        for forward, end_s in zip(forwards, ends_s, strict=True)
        if (functions := _within(marks.functions, forward.end_s, end_s))
    ]


def _check_sent(trace: str, number: int, allreduce: Allreduce) -> None:
    if allreduce.elements is None or not allreduce.dtype:
        raise _refuse(
            trace,
            f"the allreduces of ProfilerStep#{number} have no sizes",
            "record it with record_shapes=True: torch.profiler.profile(..., record_shapes=True)",
        )
    if allreduce.dtype not in ITEM_BYTES and not allreduce.dtype.startswith(_COUNTS):
        raise FileFormatError(
            f"{trace}: an allreduce of ProfilerStep#{number} has type {allreduce.dtype!r}",
            allowed=", ".join(ITEM_BYTES),
            remedy="record it without the communication hook that sends this type",
        )


def _length(marks: Marks, clock: HostClock, number: int) -> float:
    """Seconds of a step: to the next step's first forward work on a device, or as the host marked it."""
    mark, following = marks.steps[number], marks.steps.get(number + 1)
    if following is not None and isinstance(clock, DeviceClock):
        starts = [
            clock.begun_s(forwards[0].start_s, forwards[0].end_s)
            for each in (mark, following)
            if (forwards := _within(marks.forwards, each.start_s, each.end_s))
        ]
        if len(starts) == 2:
            return starts[1] - starts[0]
    return mark.end_s - mark.start_s


def _communicated(clock: HostClock, last: _MicroBatch, updates: Sequence[Span]) -> float:
    """When the last bucket had arrived: as its kernel or its backend marked it, else when the update began."""
    marked = [each.done_s for each in last.sent if each.done_s is not None]
    latest = max([*marked, clock.communicated_s(last.start_s, last.end_s)])
    if latest == -math.inf and updates:
        return updates[0].start_s
    return latest


def _traced(function: Function, inner: Mapping[str, Sequence[Gradient]]) -> TracedGradient:
    gradient = _first_held(function, inner)
    return TracedGradient(None, "") if gradient is None else TracedGradient(gradient.shape, gradient.dtype)
