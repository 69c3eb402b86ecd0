"""``python -m dpsim.experiments.bench_kernels``: every candidate for every operation of the built-in networks.

Each is checked against NumPy's before it is timed; all take turns in one process of one thread. The second table has
what is done between products and convolutions, which has one implementation besides NumPy's. ``--json`` prints one
object.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict

from threadpoolctl import threadpool_limits

from dpsim import processor
from dpsim.experiments.bench_kernels.passes import activations, measure, updates
from dpsim.experiments.bench_kernels.products import NETWORKS, Row, row, torch_version
from dpsim.nn import build_model


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.bench_kernels", description=__doc__)
    parser.add_argument("--model", default=",".join(NETWORKS), help=f"built-in networks (all: {', '.join(NETWORKS)})")
    parser.add_argument("--samples", default="1,8,64,256", help="samples at once (1,8,64,256)")
    parser.add_argument("--seconds", type=float, default=0.25, help="time for each operation (0.25)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    names, samples = arguments.model.split(","), [int(number) for number in arguments.samples.split(",")]
    if unknown := [name for name in names if name not in NETWORKS]:
        parser.error(f"unknown network {unknown[0]!r}; allowed: {', '.join(NETWORKS)}")
    every = [
        problem
        for name in names
        for rows in samples
        for problem in build_model(*NETWORKS[name], 10).problems(rows, training=True)
    ]
    rows = []
    with threadpool_limits(1):
        where = f"{processor.model()} ({processor.family()}), {processor.blas()}, PyTorch {torch_version()}"
        if not arguments.json:
            print(f"{where}, one thread; milliseconds, medians; the fastest of dpsim's over PyTorch's last")
        for problem in dict.fromkeys(every):
            rows.append(row(problem, arguments.seconds))
            if not arguments.json:
                print(_line(rows[-1]), flush=True)
        passes = [measure(case) for case in (*activations(), *updates())]
    if arguments.json:
        points = [asdict(result) for result in rows]
        report = {"schema": 2, "command": "bench_kernels", "machine": where, "points": points}
        print(json.dumps(report | {"passes": [asdict(result) for result in passes]}))
        return
    for result in passes:
        times = f"{result.time_s * 1e3:8.3f} ms   numpy {result.numpy_s * 1e3:8.3f} ms"
        print(f"{result.operation:26} {result.shape:22} {times} {result.rate:7.1f} {result.unit}/s")


def _line(result: Row) -> str:
    times = "  ".join(f"{name} {time_s * 1e3:.4f}" for name, time_s in result.time_s.items())
    ratio = f"   {result.over_torch:.2f}" if result.over_torch is not None else ""
    return f"{result.problem:52} {times}   best: {result.fastest}{ratio}"


if __name__ == "__main__":
    main()
