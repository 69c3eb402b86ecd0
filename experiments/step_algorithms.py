"""``python -m dpsim.experiments.step_algorithms`` times a training step with several allreduces, in turn in one run.

Every algorithm trains a replica of its own. They take turns of a few steps in random order, and the first steps of a
turn do not count. A step lasts from the slowest rank's end to the next one's. The first algorithm runs twice (A/A).
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.data import load_dataset
from dpsim.errors import DpsimError
from dpsim.experiments.turns import steps_in_turn
from dpsim.harness.measurement.statistics import median_ratio
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer
from dpsim.units import parse_size

_COUNTED = 6


def measure(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """The task: median step of each round in seconds, by algorithm (the repeated one has an apostrophe)."""
    dataset = load_dataset(argument["dataset"])
    first, *others = argument["algorithms"]
    trainers = {}
    for name in (first, *others, f"{first}'"):
        replica = build_model(argument["model"], dataset.input_shape, dataset.classes)
        plan = Plan(
            devices=comm.size,
            global_batch=argument["global_batch"],
            algorithm=name.rstrip("'"),
            fusion_threshold_bytes=argument["threshold_bytes"],
        )
        trainers[name] = Trainer(replica, dataset, plan, comm, Network())
    steps_s = steps_in_turn(comm, trainers, seconds=argument["seconds"], counted=_COUNTED)
    for trainer in trainers.values():
        trainer.close()
    return steps_s


def main() -> int:
    """Print the median step of each algorithm and its ratio to the first one's, paired by round."""
    parser = argparse.ArgumentParser(prog="python -m dpsim.experiments.step_algorithms", description=__doc__)
    parser.add_argument("--model", default="mlp:64x20")
    parser.add_argument("--dataset", default="digits")
    parser.add_argument("--devices", type=int, default=2)
    parser.add_argument("--global-batch", type=int, default=512)
    parser.add_argument("--fusion-threshold", default="32KiB")
    parser.add_argument("--algorithm", nargs="+", default=["mpi", "auto"])
    parser.add_argument("--seconds", type=float, default=20.0)
    arguments = parser.parse_args()
    try:
        task = {
            "model": arguments.model,
            "dataset": arguments.dataset,
            "global_batch": arguments.global_batch,
            "seconds": arguments.seconds,
            "algorithms": arguments.algorithm,
            "threshold_bytes": parse_size(arguments.fusion_threshold),
        }
        results = on_ranks("dpsim.experiments.step_algorithms:measure", task, devices=arguments.devices, pin=True)
    except DpsimError as error:
        print(f"step_algorithms: {error}", file=sys.stderr)
        return 2
    base = results[arguments.algorithm[0]]
    for name, steps_s in results.items():
        ratio = median_ratio(steps_s, base)
        print(
            f"{name:>20}: {np.median(steps_s) * 1e3:8.3f} ms a step, {ratio.median:.3f} of {arguments.algorithm[0]}'s"
            f" ({ratio.low:.3f} to {ratio.high:.3f}), {len(steps_s)} rounds"
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
