"""``python -m dpsim.experiments.bench_predict`` times 10,000 predictions, each with a threshold of its own.

It decides whether predictions are as fast as they were; run it again after a change of ``dpsim.model`` or
``dpsim.lowering`` (``golden --speed`` does, old and new in turns). ResNet-50 has 161 gradient tensors on 107 layers.
"""

from __future__ import annotations

import statistics
import timeit
from collections.abc import Callable
from functools import partial
from typing import Any

from dpsim.experiments import command
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.model import predict, step_times
from dpsim.plan import Plan
from dpsim.workload import Layer, Tensor, Workload

PLANS = 10_000
STAGES = ((3, 64), (4, 128), (6, 256), (3, 512))
"""Blocks and width of each."""


def resnet50() -> Workload:
    """Return ResNet-50's tensors with made-up times (1 ms a forward, 2 ms a backward), for speed alone."""
    layers: list[Layer] = []

    def layer(name: str, *shapes: tuple[int, ...]) -> None:
        tensors = tuple(Tensor(name=f"{name}.{i}", shape=shape) for i, shape in enumerate(shapes))
        layers.append(Layer(name=name, forward_s=(1e-3,), backward_s=(2e-3,), tensors=tensors))

    def convolution(name: str, out: int, into: int, kernel: int) -> None:
        layer(name, (out, into, kernel, kernel))
        layer(f"{name}.bn", (out,), (out,))

    convolution("stem", into := 64, 3, 7)
    for stage, (blocks, width) in enumerate(STAGES, 1):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.conv1", width, into, 1)
            convolution(f"{name}.conv2", width, width, 3)
            convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, into, 1)
            into = 4 * width
    layer("dense", (1000, 2048), (1000,))
    return Workload(name="resnet50 shapes", local_batches=(32,), layers=tuple(layers), update_s=1e-3, overhead_s=1e-3)


def machine(devices: int = 8) -> Machine:
    """Return a table of 25 sizes, 20 us + 1 ns a byte, and an overlap table of the same."""
    sizes = tuple(4 * 2**i for i in range(25))
    times = tuple(2e-5 + 1e-9 * size for size in sizes)
    table: dict[str, Any] = {"algorithm": "mpi", "devices": devices, "sizes_bytes": sizes, "time_s": times}
    overlap = OverlapCost(**table, overlap="thread", compute_loss_s=tuple(0.2 * t for t in times))
    return Machine(name="bench", allreduce=(AllreduceCost(**table),), overlap=(overlap,))


def median_s(run: Callable[[], object]) -> float:
    """Return the median seconds of five runs, after one that does not count."""
    return statistics.median(timeit.repeat(run, number=1, repeat=6)[1:])


if __name__ == "__main__":
    command.parser("bench_predict", __doc__).parse_args()
    workload, bench = resnet50(), machine()
    for rule, overlap in (("tarantella", "off"), ("tarantella", "thread"), ("ddp", "thread"), ("mg-wfbp", "thread")):
        setting: dict[str, Any] = {"devices": 8, "global_batch": 256, "fusion_rule": rule, "overlap": overlap}
        thresholds = [None if rule == "mg-wfbp" else float(1000 * i) for i in range(PLANS)]
        plans = [Plan(**setting, fusion_threshold_bytes=threshold) for threshold in thresholds]
        times_s = median_s(partial(step_times, workload, bench, plans))
        predict_s = median_s(lambda plans=plans: [predict(workload, bench, plan) for plan in plans])  # type: ignore[misc]
        print(f"{rule:10} {overlap:6}  step_times {times_s:.3f} s   predict {predict_s:.3f} s")
