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
    given = parser.parse_args()
    names, samples = given.model.split(","), [int(number) for number in given.samples.split(",")]
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
        if not given.json:
            print(f"{where}, one thread; milliseconds, medians; the fastest of dpsim's over PyTorch's last")
        for problem in dict.fromkeys(every):
            rows.append(row(problem, given.seconds))
            if not given.json:
                print(_line(rows[-1]), flush=True)
        passes = [measure(case) for case in (*activations(), *updates())]
    if given.json:
        points = [asdict(one) for one in rows]
        report = {"schema": 2, "command": "bench_kernels", "machine": where, "points": points}
        print(json.dumps(report | {"passes": [asdict(one) for one in passes]}))
        return
    for one in passes:
        times = f"{one.time_s * 1e3:8.3f} ms   numpy {one.numpy_s * 1e3:8.3f} ms"
        print(f"{one.operation:26} {one.shape:22} {times} {one.rate:7.1f} {one.unit}/s")


def _line(one: Row) -> str:
    times = "  ".join(f"{name} {time_s * 1e3:.4f}" for name, time_s in one.time_s.items())
    beside = f"   {one.over_torch:.2f}" if one.over_torch is not None else ""
    return f"{one.problem:52} {times}   best: {one.fastest}{beside}"


if __name__ == "__main__":
    main()
