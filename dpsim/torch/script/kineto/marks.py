"""What is kept of a trace's events: those that tell its steps, phases, gradients and allreduces apart."""

from __future__ import annotations

import math
import re
from array import array
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

from dpsim.errors import FileFormatError
from dpsim.torch.script.kineto.events import Event

_STEP = re.compile(r"ProfilerStep\*?#([0-9]{1,15})")
_FORWARD = "DistributedDataParallel.forward"
_UPDATE = "Optimizer.step#"
_LOAD = "enumerate(DataLoader)#_SingleProcess"
_FUNCTION = "autograd::engine::evaluate_function: "
_ACCUMULATE = "torch::autograd::AccumulateGrad"
_BACKEND_SPAN = re.compile(r"(?:gloo|nccl|mpi|ucc|xccl|hccl):(\w+)")
_OF_GPUS = ("nccl:", "xccl:", "hccl:")
_WORD = re.compile(r"\w{1,40}", re.ASCII)
_ALLREDUCES = ("allreduce", "all_reduce", "allreduce_", "allreduce_coalesced", "allreduce_coalesced_")
_OTHERS = ("all_to_all", "all_gather", "reduce_scatter", "broadcast", "scatter", "gather", "reduce", "send", "recv")
"""Other collectives, which c10d, backends and NCCL's kernels call so, but for case and underscores."""
_MOST_EXTENTS = 64
_MOST_COLLECTIVES = 100
MOST_SPANS, MOST_KERNELS = 2_000_000, 20_000_000
"""At about 250 bytes for each span, and 40 for each kernel and its launch."""
_CHECKED_EVERY = 1000
_DEVICE_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver", "runtime", "driver")
_TYPES = {"float": "float32", "double": "float64", "half": "float16"}
"""The types of gradients, by their names in traces: in lower case, without ``c10::``."""


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a thread of the host did, from one second of the trace to another."""

    start_s: float
    end_s: float
    thread: str


@dataclass(frozen=True, slots=True)
class Function(Span):
    """A function of a backward pass; ``accumulates``: it adds to the gradient of a parameter."""

    accumulates: bool


@dataclass(frozen=True, slots=True)
class Gradient(Span):
    """The adding to a gradient; without shapes in the trace, ``shape`` is None and ``dtype`` empty."""

    shape: tuple[int, ...] | None
    dtype: str


@dataclass(frozen=True, slots=True)
class Allreduce(Span):
    """One of the events that tell of an allreduce; ``elements``, ``dtype`` and ``ranks`` where it says them.

    ``done_s`` is when it had finished, where that is known: a call ends when the allreduce was begun.
    """

    elements: int | None
    dtype: str
    ranks: int | None
    done_s: float | None


@dataclass(frozen=True, slots=True)
class OtherCollective(Span):
    """A call of a collective that is no allreduce, what a backend of the host did for it, or a kernel of a device."""

    name: str
    by: Literal["call", "backend", "device"]


@dataclass
class DeviceWork:
    """Columns of what ran on a device: seconds of start and end, the number of its launch, whether it communicates."""

    start_s: array[float] = field(default_factory=lambda: array("d"))
    end_s: array[float] = field(default_factory=lambda: array("d"))
    launch: array[int] = field(default_factory=lambda: array("q"))
    communicates: array[int] = field(default_factory=lambda: array("b"))


@dataclass
class Marks:
    """What was kept of a trace. ``steps`` are the marks ``ProfilerStep#n`` by n; ``launched_s`` are host seconds.

    ``allreduces`` are calls and what is nested in them, ``transfers`` what a backend of the host then did.
    ``collectives`` counts the names of all collectives that were seen; ``annotated`` are those that the host's marks
    say a backend of GPUs was asked for.
    """

    events: int = 0
    steps: dict[int, Span] = field(default_factory=dict)
    forwards: list[Span] = field(default_factory=list)
    updates: list[Span] = field(default_factory=list)
    loads: list[Span] = field(default_factory=list)
    functions: list[Function] = field(default_factory=list)
    gradients: list[Gradient] = field(default_factory=list)
    allreduces: list[Allreduce] = field(default_factory=list)
    transfers: list[Allreduce] = field(default_factory=list)
    device: DeviceWork = field(default_factory=DeviceWork)
    launch: array[int] = field(default_factory=lambda: array("q"))
    launched_s: array[float] = field(default_factory=lambda: array("d"))
    others: list[OtherCollective] = field(default_factory=list)
    collectives: Counter[str] = field(default_factory=Counter)
    annotated: int = 0

    @property
    def spans(self) -> tuple[list[Any], ...]:
        """All lists of spans."""
        host = (self.forwards, self.updates, self.loads, self.functions, self.gradients)
        return (*host, self.allreduces, self.transfers, self.others)

    def sort(self) -> None:
        """Order everything by its beginning; of two that begin at once the longer goes first."""
        for spans in self.spans:
            spans.sort(key=lambda span: (span.start_s, -span.end_s))


def collect(name: str, events: Iterable[Event]) -> Marks:
    """The marks among the events of the trace ``name``. Raises ``FileFormatError`` for one that is not as it should be.

    Device work and its launches are kept as columns of numbers: 40 bytes for each kernel.
    """
    marks = Marks()
    for event in events:
        marks.events = event.number
        fields = event.fields
        if fields.get("ph") == "X" and isinstance(fields.get("name"), str):
            _keep(marks, name, event, fields["name"], _text(fields.get("cat")).lower())
        if event.number % _CHECKED_EVERY == 0:
            _check_size(marks, name)
    return marks


def _check_size(marks: Marks, trace: str) -> None:
    """Raises ``FileFormatError`` where so much of a trace is kept that it may not fit into memory."""
    spans, kernels = len(marks.steps) + sum(map(len, marks.spans)), max(len(marks.launch), len(marks.device.launch))
    if spans > MOST_SPANS or kernels > MOST_KERNELS:
        raise FileFormatError(
            f"{trace} has {spans:,} events of steps, layers and allreduces and {kernels:,} kernels up to event"
            f" {marks.events:,}",
            allowed=f"{MOST_SPANS:,} and {MOST_KERNELS:,}",
            remedy="record fewer steps: torch.profiler.schedule(wait=5, warmup=2, active=20)",
        )


def _keep(marks: Marks, trace: str, event: Event, name: str, category: str) -> None:
    if category in _DEVICE_WORK or category in _LAUNCHES:
        _keep_device_work(marks, trace, event, name, category in _LAUNCHES)
    elif category.startswith("gpu_"):
        return  # what the host says it does, once more on the device's line
    elif name.startswith(_FUNCTION):
        marks.functions.append(Function(*_span(trace, event), accumulates=name.endswith(_ACCUMULATE)))
    elif name == _ACCUMULATE:
        shapes, dtype = _inputs(_arguments(event))
        marks.gradients.append(Gradient(*_span(trace, event), shape=shapes[0] if shapes else None, dtype=dtype))
    elif (kept := _plain_spans(marks, name)) is not None:
        kept.append(Span(*_span(trace, event)))
    elif match := _STEP.fullmatch(name):
        marks.steps[int(match[1])] = Span(*_span(trace, event))
    else:
        _keep_collective(marks, trace, event, name)


def _plain_spans(marks: Marks, name: str) -> list[Span] | None:
    if name == _FORWARD:
        return marks.forwards
    return marks.updates if name.startswith(_UPDATE) else marks.loads if name.startswith(_LOAD) else None


def _keep_device_work(marks: Marks, trace: str, event: Event, name: str, is_launch: bool) -> None:
    number = _whole(_arguments(event).get("correlation"))
    start_s, end_s, _ = _span(trace, event)
    if not is_launch:
        marks.device.start_s.append(start_s)
        marks.device.end_s.append(end_s)
        marks.device.launch.append(-1 if number is None else number)
        communicates = "nccl" in name.lower()
        marks.device.communicates.append(communicates)
        if communicates and "allreduce" not in _plain(name):
            _keep_other(marks, trace, event, name, "device")
    elif number is not None:
        marks.launch.append(number)
        marks.launched_s.append(start_s)


def _keep_collective(marks: Marks, trace: str, event: Event, name: str) -> None:
    """Keep ``c10d::allreduce_``, ``record_param_comms`` and ``gloo:all_reduce``, which tell of the same allreduce.

    The last of them, and those of other backends on the host, last until it has finished, on a thread of the backend.
    """
    span = _BACKEND_SPAN.fullmatch(name)
    arguments = _arguments(event)
    marks.annotated += span is not None and name.startswith(_OF_GPUS)
    if name == "record_param_comms":
        collective = _text(arguments.get("Collective name"))
    elif span or name.startswith("c10d::"):
        collective = span[1] if span else name.removeprefix("c10d::")
    else:
        return
    if collective not in _ALLREDUCES:
        if _WORD.fullmatch(collective) and len(marks.collectives) < _MOST_COLLECTIVES:
            marks.collectives[collective.strip("_")] += 1
        backend = span is not None and not name.startswith("nccl")
        if name != "record_param_comms":  # it lies within a call that c10d marks
            _keep_other(marks, trace, event, collective, "backend" if backend else "call")
        return
    marks.collectives["allreduce"] += 1
    shapes, dtype = _inputs(arguments)
    start_s, end_s, thread = _span(trace, event)
    asynchronous = span is not None and not name.startswith("nccl")  # it ends with the allreduce, not with the call
    elements = _whole(arguments.get("In msg nelems"))
    if elements is None and shapes and not name.startswith("record"):
        elements = sum(map(math.prod, shapes))
    (marks.transfers if asynchronous else marks.allreduces).append(
        Allreduce(
            start_s,
            end_s,
            thread,
            elements=elements,
            dtype=_dtype(arguments.get("dtype")) or dtype,
            ranks=_whole(arguments.get("Group size")),
            done_s=end_s if asynchronous else None,
        )
    )


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


def _keep_other(marks: Marks, trace: str, event: Event, name: str, by: Literal["call", "backend", "device"]) -> None:
    found = next((each for each in _OTHERS if _plain(each) in _plain(name)), None)
    if found is not None:
        marks.others.append(OtherCollective(*_span(trace, event), name=found, by=by))


def _span(trace: str, event: Event) -> tuple[float, float, str]:
    """Start and end in seconds, and the thread. Raises ``FileFormatError`` unless both are finite."""
    seconds = []
    for key in ("ts", "dur"):
        value = event.fields.get(key)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value <= 1e18:
            shown = str(value)[:30] if isinstance(value, (int, float)) else f"of type {type(value).__name__}"
            raise FileFormatError(
                f"{trace}, event {event.number} at byte {event.byte}: {key} of {event.fields['name'][:60]!r}"
                f" is {shown}",
                allowed="microseconds of 0 or more",
                remedy="the file is damaged or was changed: record it again",
            )
        seconds.append(value * 1e-6)
    process, thread = (_text(event.fields.get(key)) for key in ("pid", "tid"))
    return seconds[0], seconds[0] + seconds[1], f"{process}/{thread}"


def _text(value: Any) -> str:
    """A text or a number as a text; empty for anything else."""
    return str(value) if isinstance(value, (str, int)) else ""


def _arguments(event: Event) -> dict[str, Any]:
    arguments = event.fields.get("args")
    return arguments if isinstance(arguments, dict) else {}


def _whole(value: Any) -> int | None:
    """A whole number that 63 bits hold, or None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63 else None


def _dtype(value: Any) -> str:
    name = _text(value).removeprefix("c10::").lower()
    return _TYPES.get(name, name)


def _inputs(arguments: dict[str, Any]) -> tuple[list[tuple[int, ...]], str]:
    """The shapes of the first input, which may be a list of tensors, and its type, as ``record_shapes`` records them.

    Nothing where the trace has none.
    """
    dims, types = arguments.get("Input Dims"), arguments.get("Input type")
    if not (isinstance(dims, list) and dims and isinstance(types, list) and types):
        return [], ""
    first = dims[0]
    many = isinstance(first, list) and first and all(isinstance(each, list) for each in first)
    shapes = first if many else [first]
    if not all(isinstance(s, list) and len(s) <= _MOST_EXTENTS and None not in map(_whole, s) for s in shapes):
        return [], ""
    return [tuple(shape) for shape in shapes], "" if types[0] == "TensorList" else _dtype(types[0])
