"""``read_trace``: a trace of PyTorch's profiler in, a ``Workload`` out.

Where the trace has the shapes of gradients (``record_shapes=True``) and one bucket cap makes DDP's buckets of them, the
workload has a layer for each gradient. Otherwise it has a layer for each bucket, with one tensor of the bucket's size.
"""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import msgspec

from dpsim.ddp_settings import DdpSettings
from dpsim.errors import FileFormatError
from dpsim.lowering.ddp import Buckets, DdpOptions, DdpParameter, final_buckets
from dpsim.torch.script.kineto.events import open_trace, read_events
from dpsim.torch.script.kineto.marks import collect
from dpsim.torch.script.kineto.others import others_of
from dpsim.torch.script.kineto.steps import SentBucket, TracedGradient, TracedStep, steps_of
from dpsim.torch.script.recorded import Recorded, RecordedParameter, workload_of
from dpsim.units import ITEM_BYTES
from dpsim.workload import Layer, Workload

_FEWEST_FOR_SPREAD = 5
_MOST_RANKS = 10**6
_WORD = re.compile(r"[\w:,]{1,40}", re.ASCII)
_HOOKS = {"float16": "fp16", "bfloat16": "bf16"}
_NOT_IN_A_TRACE = "a trace has no activations, buffers, optimizer state or data loading processes"


@dataclass(frozen=True)
class _Parts:
    """What the layers of the workload stand for: gradients, or whole buckets.

    ``ready_s`` and ``launch_s`` take the seconds of all parts from a step. ``cap_bytes`` is the cap that makes the
    buckets of the gradients; None: DDP's default.
    """

    parameters: tuple[RecordedParameter, ...]
    buckets: Buckets
    ready_s: Callable[[TracedStep], tuple[float, ...]]
    launch_s: Callable[[TracedStep], tuple[float, ...]]
    cap_bytes: int | None
    whole_buckets: bool
    text: str


def read_trace(path: Path, local_batch: int) -> Workload:
    """The workload of the rank whose trace ``path`` is, which trained on ``local_batch`` samples at once.

    Times are medians over the profiler's steps that sent the most common list of buckets. Raises ``FileFormatError``.
    """
    header: dict[str, Any] = {"distributedInfo": None}
    trace = path.name
    marks = collect(trace, read_events(open_trace(path), header))
    steps, others = _alike(steps_of(trace, marks)), others_of(marks)
    distributed = header["distributedInfo"] if isinstance(header["distributedInfo"], dict) else {}
    devices = _devices(trace, steps, distributed)
    parts = _gradients(steps) or _whole_buckets(steps)
    wire_bytes = [bucket.elements * ITEM_BYTES[bucket.dtype] for bucket in steps[0].buckets]
    sizes = [_size_bytes(parameter) for parameter in parts.parameters]
    bucket_bytes = tuple(sum(sizes[index] for index in bucket) for bucket in parts.buckets)
    compressed = bucket_bytes != tuple(wire_bytes)
    backend, rank = distributed.get("backend"), distributed.get("rank")
    recorded = Recorded(
        name=f"trace {trace}",
        source=f"dpsim profile --from {trace}: medians of {len(steps)} steps of a trace of PyTorch's profiler,"
        f" rank {rank if isinstance(rank, int) else 'unknown'} of {devices}"
        + (f" over {backend}" if isinstance(backend, str) and _WORD.fullmatch(backend) else "")
        + f"; times beside communication; {parts.text}; {_NOT_IN_A_TRACE}"
        + (f"; other collectives, which are not priced, took {others.text}" if others.counts else ""),
        parameters=parts.parameters,
        first_parameter={parts.parameters[parts.buckets[-1][-1]].module: parts.buckets[-1][-1]},
        buckets=parts.buckets,
        steps=tuple(
            replace(step, local_batch=local_batch, ready_s=dict(enumerate(parts.ready_s(step)))) for step in steps
        ),
        ddp=DdpSettings(
            torch="",
            devices=devices,
            accumulate=steps[0].micro_batches,
            bucket_cap_bytes=parts.cap_bytes,
            communication_hook=_HOOKS.get(steps[0].buckets[0].dtype, "") if compressed else "",
            bucket_bytes=bucket_bytes,
            whole_buckets=parts.whole_buckets,
            own_collectives=round(sum(others.counts.values())),
        ),
    )
    workload = workload_of(recorded)
    return msgspec.structs.replace(
        workload,
        layers=_launched(workload.layers, steps, parts),
        step_spread=_spread([step.forward_s + step.backward_s + step.update_s for step in steps]),
    )


def _alike(steps: Sequence[TracedStep]) -> list[TracedStep]:
    """The steps with the most common list of buckets and number of micro-batches; of equally common ones the latest."""
    kinds = [(step.buckets, step.micro_batches, len(step.gradients)) for step in steps]
    counts = Counter(reversed(kinds))
    (most, _), *_ = counts.most_common(1)
    return [step for step, kind in zip(steps, kinds, strict=True) if kind == most]


def _devices(trace: str, steps: Sequence[TracedStep], distributed: dict[str, Any]) -> int:
    devices = next((step.devices for step in steps if step.devices), distributed.get("world_size"))
    if not isinstance(devices, int) or isinstance(devices, bool) or devices < 1:
        raise FileFormatError(
            f"{trace} does not say how many ranks trained",
            allowed="a trace with Group size at its collectives, or with distributedInfo",
            remedy="record it with PyTorch 2.2 or newer, after init_process_group",
        )
    if devices > _MOST_RANKS:
        raise FileFormatError(
            f"{trace} says that {devices} ranks trained",
            allowed=f"1 to {_MOST_RANKS}",
            remedy="its Group size or distributedInfo is damaged: record it again",
        )
    return devices


def _size_bytes(parameter: RecordedParameter) -> int:
    return math.prod(parameter.shape) * ITEM_BYTES[parameter.dtype]


def _whole_buckets(steps: Sequence[TracedStep]) -> _Parts:
    buckets = steps[0].buckets
    names = [f"bucket {number}" for number in range(1, len(buckets) + 1)]
    return _Parts(
        parameters=tuple(
            RecordedParameter(name=name, module=name, shape=(bucket.elements,), dtype=bucket.dtype)
            for name, bucket in zip(names, buckets, strict=True)
        ),
        buckets=tuple((index,) for index in range(len(buckets))),
        ready_s=lambda step: step.bucket_ready_s,
        launch_s=lambda step: step.launch_bucket_s,
        cap_bytes=None,
        whole_buckets=True,
        text="each tensor is one whole bucket, as the trace has no shapes of gradients that make its buckets",
    )


def _gradients(steps: Sequence[TracedStep]) -> _Parts | None:
    """The gradients with their shapes, where all steps have the same and one bucket cap makes the buckets of them."""
    gradients, buckets = steps[0].gradients, steps[0].buckets
    if any(step.gradients != gradients for step in steps) or any(
        gradient.shape is None or gradient.dtype not in ITEM_BYTES for gradient in gradients
    ):
        return None
    names = [f"gradient {number}" for number in range(1, len(gradients) + 1)]
    parameters = tuple(
        RecordedParameter(name=name, module=name, shape=gradient.shape or (), dtype=gradient.dtype)
        for name, gradient in zip(names, gradients, strict=True)
    )
    members = _members(parameters, gradients, buckets)
    if members is None:
        return None
    sizes = [_size_bytes(parameter) for parameter in parameters]
    smallest = min(sum(sizes[index] for index in bucket) for bucket in members[:-1] or members)
    reduced = [DdpParameter(size_bytes=size, dtype=each.dtype) for size, each in zip(sizes, gradients, strict=True)]
    for cap_bytes in (None, smallest):
        if final_buckets(reduced, range(len(reduced)), DdpOptions(bucket_cap_bytes=cap_bytes)) == members:
            return _Parts(
                parameters=parameters,
                buckets=members,
                ready_s=lambda step: step.gradient_ready_s,
                launch_s=lambda step: step.launch_gradient_s,
                cap_bytes=cap_bytes,
                whole_buckets=False,
                text="gradients in the order in which they became final, without their names; "
                + ("DDP's default bucket cap" if cap_bytes is None else "the bucket cap is inferred from the buckets"),
            )
    return None


def _members(
    parameters: Sequence[RecordedParameter], gradients: Sequence[TracedGradient], buckets: Sequence[SentBucket]
) -> Buckets | None:
    """The positions of the gradients of each bucket, where sizes in order add up to those of the buckets; or None.

    A bucket has gradients of one type, which is its own unless a hook sends all in another.
    """
    kinds = {gradient.dtype for gradient in gradients}
    hooked = len(kinds) == 1 and len({bucket.dtype for bucket in buckets}) == 1
    waiting = {kind: deque(i for i, gradient in enumerate(gradients) if gradient.dtype == kind) for kind in kinds}
    members = []
    for bucket in buckets:
        queue = waiting.get(gradients[0].dtype if hooked else bucket.dtype, deque())
        member, elements = [], 0
        while queue and elements < bucket.elements:
            member.append(queue.popleft())
            elements += math.prod(parameters[member[-1]].shape)
        if elements != bucket.elements or not member:
            return None
        members.append(tuple(member))
    return None if any(waiting.values()) else tuple(members)


def _launched(layers: tuple[Layer, ...], steps: Sequence[TracedStep], parts: _Parts) -> tuple[Layer, ...]:
    """The layers with the host's seconds to launch them; as they are where the host computes.

    The first layer has the launching of the whole forward, as it has its time.
    """
    columns = [parts.launch_s(step) for step in steps]
    if not columns[0]:
        return layers
    launched, before_s, latest_s = [], 0.0, 0.0
    for index, layer in zip([i for bucket in parts.buckets for i in bucket], reversed(layers), strict=True):
        latest_s = max(latest_s, statistics.median(column[index] for column in columns))
        launched.append(msgspec.structs.replace(layer, launch_s=0.0, launch_backward_s=latest_s - before_s))
        before_s = latest_s
    forward_s = statistics.median(step.launch_forward_s for step in steps)
    launched[-1] = msgspec.structs.replace(launched[-1], launch_s=forward_s)
    return tuple(reversed(launched))


def _spread(seconds: Sequence[float]) -> tuple[float, ...]:
    """The seconds over their median, ascending, which are their own quantiles; nothing of fewer than 5 steps."""
    middle = statistics.median(seconds)
    if len(seconds) < _FEWEST_FOR_SPREAD or min(seconds) <= 0:
        return ()
    return tuple(sorted(each / middle for each in seconds))
