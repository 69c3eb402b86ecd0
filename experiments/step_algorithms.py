"""``python -m dpsim.experiments.step_algorithms`` times a training step with several allreduces, in turn in one run.

Every algorithm trains a replica of its own. They take turns of a few steps in random order, and the first steps of a
turn do not count. It prints medians and ratios to the first algorithm, which runs twice (A/A: ``mpi'``).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.experiments import command
from dpsim.experiments.turns import in_turns, ratio_lines
from dpsim.harness.measurement.loop import LEAST_ROUNDS, StopRule
from dpsim.harness.measurement.steps import COUNTED_STEPS, WARM_UP_STEPS, step_times_s
from dpsim.launch.jobs import on_ranks
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.trainer import Trainer
from dpsim.units import parse_size

_VISIT_S = 0.3


def step_times(model: str, dataset: str, plans: Mapping[str, Plan], seconds: float) -> dict[str, tuple[float, ...]]:
    """Return the median step of each round in seconds, by plan, measured on pinned ranks. Raises ``DpsimError``.

    All plans have as many devices, and take turns for ``seconds``.
    """
    devices = next(iter(plans.values())).devices
    argument = {"model": model, "dataset": dataset, "plans": codec.to_builtins(plans), "seconds": seconds}
    task = "dpsim.experiments.step_algorithms:measure_on_ranks"
    taken: dict[str, list[float]] = on_ranks(task, argument, devices=devices, pin=True)
    return {name: tuple(steps_s) for name, steps_s in taken.items()}


def measure_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Time the plans: the median step of each round in seconds, by name; every plan trains a replica of its own.

    A visit has two steps that do not count and one to six that do. A step lasts from the slowest rank's end to the
    next one's.
    """
    plans = {name: codec.decode(plain, Plan, "plan") for name, plain in argument["plans"].items()}
    dataset = load_dataset(argument["dataset"])
    trainers = {
        name: Trainer(
            build_model(argument["model"], dataset.input_shape, dataset.classes), dataset, plan, comm, Network()
        )
        for name, plan in plans.items()
    }
    first = next(iter(trainers.values()))
    first.step()
    marks = first.step().marks
    counted = comm.bcast(max(1, min(COUNTED_STEPS, int(_VISIT_S / (marks.end_s - marks.begin_s)))))

    def visit(trainer: Trainer) -> float:
        comm.Barrier()
        ends_s = [trainer.step().marks.end_s for _ in range(WARM_UP_STEPS + counted)]
        return float(np.median(step_times_s(comm.allgather(ends_s))))

    visits = {name: lambda trainer=trainer: visit(trainer) for name, trainer in trainers.items()}
    step_s = in_turns(visits, StopRule(least_rounds=LEAST_ROUNDS, most_s=argument["seconds"]), comm=comm)
    for trainer in trainers.values():
        trainer.close()
    return step_s


def main() -> int:
    options = command.parser("step_algorithms", __doc__)
    options.add_argument("--model", default="mlp:64x20")
    options.add_argument("--dataset", default="digits")
    options.add_argument("--devices", type=int, default=2)
    options.add_argument("--global-batch", type=int, default=512)
    options.add_argument("--fusion-threshold", default="32KiB")
    options.add_argument("--algorithm", nargs="+", default=["mpi", "auto"])
    options.add_argument("--seconds", type=float, default=20.0)
    given = options.parse_args()
    first = given.algorithm[0]

    def run() -> None:
        plans = {
            name: Plan(
                devices=given.devices,
                global_batch=given.global_batch,
                algorithm=name.rstrip("'"),
                fusion_threshold_bytes=parse_size(given.fusion_threshold),
            )
            for name in (*given.algorithm, f"{first}'")
        }
        step_s = step_times(given.model, given.dataset, plans, given.seconds)
        print(f"{given.model} on {given.devices} ranks, {len(step_s[first])} rounds, over {first}")
        print("\n".join(ratio_lines(step_s, first, {})))

    return command.ended("step_algorithms", run)


if __name__ == "__main__":
    raise SystemExit(main())
