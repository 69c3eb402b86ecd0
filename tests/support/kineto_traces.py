"""Traces in the format of PyTorch's profiler, with times chosen by hand. Those of a GPU follow its documented format.

A step lasts 10 ms and has two gradients in the first bucket and one in the second. Its parts begin and end, in ms:
input 0-1, forward 1-3, backward 3.2-7.2, allreduces until 7.8, update 8-8.9.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

Events = list[dict[str, Any]]
STEP_US = 10000
GRADIENTS = ((5200, 5300, [8, 2]), (6900, 7000, [8]), (7000, 7200, [4, 8]))
"""Start, end, shape of each adding to a gradient."""
SENT = ((6950, 6990, 24, 7460), (7100, 7180, 32, 7800))
"""Start and end of the call, elements, end of each allreduce."""


def event(
    name: str, start_us: float, end_us: float, category: str = "cpu_op", thread: object = 7, **arguments: Any
) -> dict[str, Any]:
    return {
        "ph": "X",
        "cat": category,
        "name": name,
        "pid": 41,
        "tid": thread,
        "ts": start_us,
        "dur": end_us - start_us,
        "args": arguments,
    }


def accumulate(start_us: float, end_us: float, shape: Sequence[int] | None, dtype: str = "float") -> Events:
    """Autograd's function that adds to a gradient; ``shape`` None: recorded without shapes."""
    recorded = {} if shape is None else {"Input Dims": [shape], "Input type": [dtype]}
    return [
        event("autograd::engine::evaluate_function: torch::autograd::AccumulateGrad", start_us, end_us),
        event("torch::autograd::AccumulateGrad", start_us + 1, start_us + 20, **recorded),
    ]


def gloo(start_us: float, end_us: float, elements: int, done_us: float, dtype: str = "float") -> Events:
    shape: dict[str, Any] = {"Input Dims": [[elements]], "Input type": [dtype]}
    return [
        event(
            "c10d::allreduce_", start_us, end_us, **{"Input Dims": [[[elements]], [], []], "Input type": ["TensorList"]}
        ),
        event("gloo:all_reduce", start_us + 60, done_us, "user_annotation", 9, **shape),
    ]


def marks(number: int, at_us: float) -> Events:
    spans = (
        (f"ProfilerStep#{number}", 0, STEP_US),
        ("enumerate(DataLoader)#_SingleProcessDataLoaderIter.__next__", 0, 1000),
        ("DistributedDataParallel.forward", 1000, 3000),
        ("Optimizer.step#SGD.step", 8000, 8900),
    )
    return [event(name, at_us + start, at_us + end, "user_annotation") for name, start, end in spans]


def host_step(number: int, at_us: float, *, shapes: bool = True, dtype: str = "float", scale: float = 1.0) -> Events:
    """A step over gloo; ``dtype`` is the type on the wire, ``scale`` makes everything take longer."""
    events = marks(number, 0)
    events.append(event("autograd::engine::evaluate_function: AddmmBackward0", 3200, 5190))
    for start, end, shape in GRADIENTS:
        events += accumulate(start, end, shape if shapes else None)
    for start, end, elements, done in SENT:
        events += gloo(start, end, elements, done, dtype)
    return [each | {"ts": at_us + scale * each["ts"], "dur": scale * each["dur"]} for each in events]


def device_step(number: int, at_us: float) -> Events:
    """A step over NCCL, whose host launches in the first 3 ms what a GPU does until 9 ms.

    On the device: forward 1-3, backward 3-7, where the gradients are final at 5.3, 6.9 and 7; allreduces 6.9-7.4 and
    7.4-7.8, update 8-8.9.
    """
    host = (
        event(f"ProfilerStep#{number}", 0, STEP_US, "user_annotation"),
        event(f"ProfilerStep#{number}", 900, STEP_US, "gpu_user_annotation"),
        event("DistributedDataParallel.forward", 800, 1300, "user_annotation"),
        event("Optimizer.step#SGD.step", 2600, 2900, "user_annotation"),
        event("autograd::engine::evaluate_function: AddmmBackward0", 1500, 1590, thread=8),
        *(each | {"tid": 8} for each in accumulate(1600, 1700, None)),
        *(each | {"tid": 8} for each in accumulate(1900, 2000, None)),
        *(each | {"tid": 8} for each in accumulate(2100, 2300, None)),
    )
    events = list(host)
    sent = ((1950, 24, 6900, 7400), (2200, 32, 7400, 7800))
    first = number * 100
    for count, (call, elements, start, end) in enumerate(sent):
        comms = {"Collective name": "allreduce", "dtype": "Float", "In msg nelems": elements, "Group size": 4}
        events += [
            event("c10d::allreduce_", call, call + 40, thread=8),
            event("record_param_comms", call + 5, call + 30, thread=8, **comms),
            event("nccl:all_reduce", call + 6, call + 20, "user_annotation", thread=8),
            event("nccl:all_reduce", start, end, "gpu_user_annotation", thread=20),
        ]
        name = "ncclDevKernel_AllReduce_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
        events += kernel(name, first + 50 + count, call + 10, start, end, 8, 20, **comms)
    computed = ((900, 1000, 3000), (1550, 3000, 5300), (1920, 5300, 6900), (2150, 6900, 7000), (2700, 8000, 8900))
    for count, (launched, start, end) in enumerate(computed):
        events += kernel("ampere_sgemm_128x64_tn", first + count, launched, start, end, 7, 7)
    return [each | {"ts": each["ts"] + at_us} for each in events]


def kernel(
    name: str,
    correlation: int,
    launched_us: float,
    start_us: float,
    end_us: float,
    thread: int,
    stream: int,
    **arguments: Any,
) -> Events:
    """A kernel and the call that launched it."""
    return [
        event("cudaLaunchKernel", launched_us, launched_us + 5, "cuda_runtime", thread, correlation=correlation),
        event(name, start_us, end_us, "kernel", stream, correlation=correlation, stream=stream, device=0, **arguments),
    ]


def trace(events: Events, **header: Any) -> dict[str, Any]:
    metadata = {"ph": "M", "name": "process_name", "pid": 41, "tid": 0, "ts": 0, "args": {"name": "python"}}
    flow = {"ph": "f", "cat": "ac2g", "name": "ac2g", "pid": 41, "tid": 7, "ts": 1, "id": 1, "bp": "e"}
    about = {"backend": "gloo", "rank": 1, "world_size": 2} | header
    return {"schemaVersion": 1, "distributedInfo": about, "traceEvents": [metadata, flow, *events], "traceName": "t"}


def write(path: Path, events: Events, **header: Any) -> Path:
    """Write a trace; packed if its name ends in .gz."""
    data = json.dumps(trace(events, **header)).encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path
