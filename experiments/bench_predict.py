"""How fast the model is: ``python -m dpsim.experiments.bench_predict`` prints medians over five runs.

The workload has ResNet-50's 161 gradient tensors on 107 layers; every plan has a threshold of its own.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from dpsim.experiments import command
from dpsim.lowering.computation import ready_times
from dpsim.lowering.fusion import fuse
from dpsim.machine import AllreduceCost, Machine, OverlapCost
from dpsim.model import predict, step_times
from dpsim.plan import Plan
from dpsim.workload import Layer, Tensor, Workload

PLANS = 10_000
REPEATS = 5


def resnet50_shapes() -> list[tuple[str, tuple[tuple[int, ...], ...]]]:
    """Return (layer, shapes of its tensors) of ResNet-50, in forward order: convolutions with norms, a dense layer."""
    layers: list[tuple[str, tuple[tuple[int, ...], ...]]] = []

    def convolution(name: str, out: int, into: int, kernel: int) -> None:
        layers.append((name, ((out, into, kernel, kernel),)))
        layers.append((f"{name}.bn", ((out,), (out,))))

    convolution("stem", 64, 3, 7)
    into = 64
    for stage, (blocks, width) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            name = f"stage{stage}.{block}"
            convolution(f"{name}.conv1", width, into, 1)
            convolution(f"{name}.conv2", width, width, 3)
            convolution(f"{name}.conv3", 4 * width, width, 1)
            if block == 0:
                convolution(f"{name}.shortcut", 4 * width, into, 1)
            into = 4 * width
    layers.append(("dense", ((1000, 2048), (1000,))))
    return layers


def resnet50() -> Workload:
    """Return ResNet-50's tensors with made-up times (1 ms a forward, 2 ms a backward), for speed alone."""
    layers = [
        Layer(
            name=name,
            forward_s=(1e-3,),
            backward_s=(2e-3,),
            tensors=tuple(Tensor(name=f"{name}.{i}", shape=shape) for i, shape in enumerate(shapes)),
        )
        for name, shapes in resnet50_shapes()
    ]
    return Workload(name="resnet50 shapes", local_batches=(32,), layers=tuple(layers), update_s=1e-3, overhead_s=1e-3)


def machine(devices: int = 8) -> Machine:
    """Return a table of 25 sizes, 20 us + 1 ns a byte, and an overlap table of the same."""
    sizes = tuple(4 * 2**i for i in range(25))
    times = tuple(2e-5 + 1e-9 * size for size in sizes)
    return Machine(
        name="bench",
        allreduce=(AllreduceCost(algorithm="mpi", devices=devices, sizes_bytes=sizes, time_s=times),),
        overlap=(
            OverlapCost(
                algorithm="mpi",
                devices=devices,
                overlap="thread",
                sizes_bytes=sizes,
                time_s=times,
                compute_loss_s=tuple(0.2 * t for t in times),
            ),
        ),
    )


def _median_s(run: Callable[[], object]) -> float:
    run()
    samples = []
    for _ in range(REPEATS):
        begin = time.perf_counter()
        run()
        samples.append(time.perf_counter() - begin)
    return statistics.median(samples)


def main() -> None:
    command.parser("bench_predict", __doc__).parse_args()
    workload, bench = resnet50(), machine()
    print(f"{len(workload.tensors)} tensors, {len(workload.layers)} layers, {PLANS} plans, medians of {REPEATS} runs")
    for rule, overlap in (("tarantella", "off"), ("tarantella", "thread"), ("ddp", "thread"), ("mg-wfbp", "thread")):
        plans = [
            Plan(
                devices=8,
                global_batch=256,
                fusion_rule=rule,
                overlap=overlap,  # type: ignore[arg-type]
                fusion_threshold_bytes=None if rule == "mg-wfbp" else float(1000 * i),
            )
            for i in range(PLANS)
        ]
        times_s = _median_s(lambda plans=plans: step_times(workload, bench, plans))  # type: ignore[misc]
        predict_s = _median_s(lambda plans=plans: [predict(workload, bench, plan) for plan in plans])  # type: ignore[misc]
        print(f"{rule:10} {overlap:6}  step_times {times_s:.3f} s   predict {predict_s:.3f} s")
    sizes = workload.ready_order.size_bytes
    ready = ready_times(workload, 32.0)
    options = {"ready_s": ready, "alpha_s": 2e-5, "beta_s_per_byte": 1e-9, "dtype_code": np.zeros(len(sizes), np.int64)}
    fuse_s = _median_s(lambda: [fuse(sizes, "mg-wfbp", 0.0, **options) for _ in range(1000)])  # type: ignore[arg-type]
    print(f"mg-wfbp merge of {len(sizes)} tensors: {fuse_s * 1e3:.1f} us a call")


if __name__ == "__main__":
    main()
