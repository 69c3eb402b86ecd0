"""``python -m dpsim.experiments.staleness``: speed and staleness of asynchronous runs, predicted and measured.

It decides whether ``dpsim.model.asynchronous`` may be believed; run it again after a change of that, of
``dpsim.runtime.asynchronous`` or of ``shared_updates.py``. The computations and accesses of two workers, the second
slowed down, are timed, the run is predicted, and then both train.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim.comm.clock import now, sleep_until
from dpsim.comm.group import quiet_barrier
from dpsim.data import load_dataset
from dpsim.experiments import command
from dpsim.launch.jobs import on_ranks
from dpsim.model.asynchronous import AccessTimes, distance, mean, simulate
from dpsim.nn import build_model
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.runtime.asynchronous import training
from dpsim.runtime.asynchronous.shared_updates import SharedUpdates

WORKERS, LOCAL_BATCH, STEPS, PROFILED = 2, 64, 500, 200
STRATEGIES = ("parameter-server:staleness=1000000", "parameter-server", "gossip:staleness=1000000")
CASES = [{"strategy": strategy, "slow": slow} for strategy in STRATEGIES for slow in (1.0, 2.0)]


def timed(call: Callable[..., object], *arguments: object) -> float:
    """Return the seconds that a call takes."""
    begin_s = now()
    call(*arguments)
    return now() - begin_s


def train_on_ranks(comm: MPI.Intracomm, case: dict[str, Any], report: Progress) -> str:
    """Return a line on a ``strategy`` with a second worker that takes ``slow`` times as long."""
    data = load_dataset("synthetic:16x16x3,classes=10,train=2048,test=8")
    plan: Any = Plan(devices=WORKERS, global_batch=WORKERS * LOCAL_BATCH, strategy=case["strategy"])
    replica: Any = build_model("mlp:256x4", data.input_shape, data.classes)
    worker, compute = training.Worker(replica, data, plan, WORKERS, 0, comm), replica.forward_backward

    def slower(*batch: Any) -> Any:
        begin_s, sums = now(), compute(*batch).fetch()
        sleep_until(begin_s + (case["slow"] if comm.rank else 1.0) * (now() - begin_s))
        return sums

    replica.forward_backward = slower
    shared, access_s = SharedUpdates(comm, worker.parameters, plan.parallelism, plan.optimizer, WORKERS * PROFILED), []
    quiet_barrier(comm)
    compute_s = [timed(worker.compute, ticket) for ticket in range(comm.rank, WORKERS * PROFILED, WORKERS)]
    for ticket in range(WORKERS * PROFILED):
        quiet_barrier(comm)
        if ticket % WORKERS == comm.rank:  # in turns: the other worker has written what is pulled
            pull_s = timed(shared.pull, ticket, worker.parameters)
            access_s.append((pull_s, timed(shared.push, ticket, worker.gradients, 0.0, 0.0, 1.0)))
    quiet_barrier(comm)
    shared.close()
    computing = [iter(np.random.default_rng(0).choice(of_rank, 10**5)) for of_rank in comm.allgather(compute_s)]
    each_s = np.median(np.concatenate(comm.allgather(access_s)), axis=0) / len(plan.parallelism.groups(0, WORKERS, 0))
    run = simulate(computing, AccessTimes(*each_s.tolist()), plan.parallelism, STEPS * WORKERS)
    trained, order = comm.bcast(training.train(comm, worker, plan, STEPS, lambda step: 1e-3))
    over = STEPS * plan.global_batch / run.seconds / trained.images_per_s
    speeds = f"{trained.images_per_s:,.0f} images/s, predicted {over - 1:+.1%}"
    ages = f"staleness {mean(order.staleness):.2f}, predicted {mean(run.staleness):.2f}"
    return f"{case}: {speeds}; {ages}; distributions {distance(order.staleness, run.staleness):.1%} apart"


def main() -> None:
    command.parser("staleness", __doc__).parse_args()
    for case in CASES:
        print(on_ranks("dpsim.experiments.staleness:train_on_ranks", case, devices=WORKERS, pin=True), flush=True)


if __name__ == "__main__":
    raise SystemExit(command.ended("staleness", main))
