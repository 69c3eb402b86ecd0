"""``python -m dpsim.experiments.staleness`` compares the predicted speed and staleness of asynchronous runs with them.

Parameter servers and gossip. In rounds, each worker's computation is timed alone, with nothing shared (the profile),
and then all train: asynchronously, and synchronously with the same code. One worker is made slower by a factor that the
prediction is told. The prediction is made twice: before the first training, and from the profiles of all rounds; it
never sees a training. The guesses beside it: a staleness of one less than the workers, or of one where a copy is
averaged with one other, and the speed at which every step waits for the slowest worker. With four workers on two cores
these wait instead of computing.
"""

from __future__ import annotations

import functools
import itertools
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

import msgspec
import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.clock import now, sleep_until
from dpsim.comm.group import quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.experiments import command
from dpsim.experiments.cases import Measured, Record, Study
from dpsim.harness import models
from dpsim.machine import Network
from dpsim.model.asynchronous import AccessTimes, AsynchronousRun, distance, mean, simulate
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.replica import Batch, BatchSums, Replica, StepEvents
from dpsim.runtime import asynchronous
from dpsim.runtime.describe import describe
from dpsim.runtime.emulated import EmulatedReplica
from dpsim.runtime.shared_updates import SharedUpdates
from dpsim.runtime.trainer import Trainer
from dpsim.strategy import Asynchronous, parse_strategy

_DATA = "synthetic:16x16x3,classes=10,train=2048,test=8"
_STEPS, _PROFILED, _FIRST, _ROUNDS = 60, 20, 2, 8
_EMULATED_S, _SPREAD = 4e-3, tuple(np.linspace(0.9, 1.2, 21).tolist())
_UNBOUNDED = 10**6
_MODELS = {2: "mlp:256x4", 4: "mlp:64x4"}
_SEED, _OPTIMIZER = 0, Sgd(learning_rate=1e-3)


class Case(Noun, frozen=True):
    """Workers of which the last is ``slow`` times as slow; ``emulated``: they wait instead of computing."""

    workers: int
    slow: float
    strategy: str
    emulated: bool = False
    model: str = "mlp:256x4"
    local_batch: int = 64

    @property
    def devices(self) -> int:
        return self.workers

    @property
    def title(self) -> str:
        strategy = self.asynchronous
        bound = "no bound" if strategy.staleness == _UNBOUNDED else f"bound {strategy.staleness}"
        how = "emulated" if self.emulated else self.model
        return f"{strategy.name}, {self.workers} workers, {how}, the last {self.slow:g} times as slow, {bound}"

    @property
    def asynchronous(self) -> Asynchronous:
        return cast(Asynchronous, parse_strategy(self.strategy))

    def plan(self, strategy: str, leaves: int = 0) -> Plan:
        """The plan of a strategy."""
        return Plan(
            devices=self.workers,
            global_batch=self.local_batch * self.workers,
            strategy=strategy,
            optimizer=_OPTIMIZER,
            leaves=leaves,
            batch_norm=Plan.default_batch_norm(leaves),
            algorithm="two-shot",
        )


CASES = tuple(
    Case(workers=workers, slow=slow, strategy=strategy, emulated=workers > 2, model=_MODELS[workers])
    for workers in (2, 4)
    for slow in (1.0, 2.0)
    for strategy in (f"parameter-server:staleness={_UNBOUNDED}", "parameter-server", f"gossip:staleness={_UNBOUNDED}")
)
STUDY: Study[Case] = Study(
    name="staleness",
    schema="dpsim.staleness/2",
    record=Record[Case],
    samples=("images_per_s", "staleness", "synchronous_images_per_s", "consensus_distance"),
    task="dpsim.experiments.staleness:train_on_ranks",
)


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, list[float]]:
    """Return the samples of a ``Case``; a distribution of staleness is a list of counts for 0, 1 and so on."""
    case, data = codec.decode(argument["case"], Case, "case"), load_dataset(_DATA)
    plan = case.plan(case.strategy)
    profiled = asynchronous.Worker(_replica(comm, case, data), data, plan, case.workers, _SEED, comm)
    slowed = asynchronous.Worker(_replica(comm, case, data), data, plan, case.workers, _SEED, comm)
    synchronous = case.plan("data-parallel", leaves=0 if case.emulated else case.workers)
    trainer = Trainer(_replica(comm, case, data), data, synchronous, comm, Network())
    if comm.rank == comm.size - 1:
        _slow_down(slowed.replica, case.slow)
        _slow_down(trainer.replica, case.slow)
    compute_s: list[list[float]] = [[] for _ in range(comm.size)]
    times: list[AccessTimes] = []

    def profile() -> None:
        for worker, taken_s in enumerate(comm.allgather(_computing_s(comm, profiled))):
            compute_s[worker] += taken_s
        times.append(_access_times(comm, profiled, case))

    for _ in range(_FIRST):
        profile()
        asynchronous.train(comm, slowed, plan, 4, _rate)  # warms up
        trainer.step()
    predictions = {"beforehand": _predicted(case, compute_s, times)}
    samples: dict[str, list[float]] = {name: [] for name in STUDY.samples}
    counts: Counter[int] = Counter()
    for _ in range(_ROUNDS):
        profile()
        quiet_barrier(comm)
        trained = comm.bcast(asynchronous.train(comm, slowed, plan, _STEPS, _rate))
        samples["images_per_s"].append(trained[0].images_per_s)
        samples["consensus_distance"].append(trained[0].consensus_distance)
        counts += trained[1].staleness
        quiet_barrier(comm)
        begin_s = now()
        for _ in range(_STEPS // 3):
            trainer.step()
        comm.Barrier()
        samples["synchronous_images_per_s"].append(synchronous.global_batch * (_STEPS // 3) / (now() - begin_s))
    trainer.close()
    samples["staleness"] = _counts(counts)
    predictions["blind"] = _predicted(case, compute_s, times)
    slowest_s = [factor * np.mean(own) for factor, own in zip(_factors(case), compute_s, strict=True)]
    samples["null_images_per_s"] = [synchronous.global_batch / float(max(slowest_s))]
    for name, run in predictions.items():
        samples[f"{name}_images_per_s"] = [case.local_batch * case.workers * _STEPS / run.seconds]
        samples[f"{name}_staleness"] = _counts(run.staleness)
    return samples


def _replica(comm: MPI.Intracomm, case: Case, data: Dataset) -> Replica:
    replica: Replica = models.load(case.model, data.input_shape, data.classes).replica()
    if not case.emulated:
        return replica
    bare = describe(replica, case.model)
    each_s = (_EMULATED_S / (2 * len(bare.layers)),)
    layers = tuple(msgspec.structs.replace(layer, forward_s=each_s, backward_s=each_s) for layer in bare.layers)
    timed = msgspec.structs.replace(bare, layers=layers, local_batches=(case.local_batch,), step_spread=_SPREAD)
    return EmulatedReplica(replica, timed, seed=_SEED, rank=comm.rank)


def _slow_down(replica: Any, factor: float) -> None:
    """Let a replica sleep after each pass, so that it takes ``factor`` times as long."""
    compute = replica.forward_backward

    def slower(batch: Batch, events: StepEvents) -> BatchSums:
        begin_s = now()
        sums: BatchSums = compute(batch, events).fetch()
        sleep_until(begin_s + factor * (now() - begin_s))
        return sums

    replica.forward_backward = slower


def _computing_s(comm: MPI.Intracomm, worker: asynchronous.Worker) -> list[float]:
    """The seconds of some computations, while the other workers compute too."""
    quiet_barrier(comm)
    taken_s = []
    for ticket in range(comm.rank, _PROFILED * comm.size, comm.size):
        begin_s = now()
        worker.compute(ticket)
        taken_s.append(now() - begin_s)
    return taken_s


def _access_times(comm: MPI.Intracomm, worker: asynchronous.Worker, case: Case) -> AccessTimes:
    """The median seconds of a pull and a push, by workers in turn: another one has written what is pulled."""
    shared = SharedUpdates(comm, worker.parameters, case.asynchronous, _OPTIMIZER, _PROFILED)
    taken_s = []
    for ticket in range(_PROFILED):
        quiet_barrier(comm)
        if ticket % comm.size == comm.rank:
            begin_s = now()
            shared.pull(ticket, worker.parameters)
            pulled_s = now()
            shared.push(ticket, worker.gradients, 0.0, 0.0, 1.0)
            taken_s.append((pulled_s - begin_s, now() - pulled_s))
    quiet_barrier(comm)
    shared.close()
    every_s = [times for of_rank in comm.allgather(taken_s) for times in of_rank]
    groups = len(case.asynchronous.groups(0, comm.size, 0))
    pull_s, push_s = (np.median(every_s, axis=0) / groups).tolist()
    return AccessTimes(pull_s=pull_s, push_s=push_s)


def _predicted(case: Case, compute_s: Sequence[Sequence[float]], times: Sequence[AccessTimes]) -> AsynchronousRun:
    """The run of as many updates as are trained in a round, with times drawn from the profile; a mean of many."""
    random = np.random.default_rng(_SEED)
    pull_s, push_s = (float(np.median([getattr(each, name) for each in times])) for name in ("pull_s", "push_s"))
    access = AccessTimes(pull_s=pull_s, push_s=push_s)

    def drawn(factor: float, own: Sequence[float]) -> Iterator[float]:
        while True:
            yield factor * float(random.choice(own))

    runs = [
        simulate(
            [drawn(factor, own) for factor, own in zip(_factors(case), compute_s, strict=True)],
            access,
            case.asynchronous,
            _STEPS * case.workers,
        )
        for _ in range(20)
    ]
    counts: Counter[int] = Counter()
    for run in runs:
        counts += Counter(run.staleness)
    return AsynchronousRun(seconds=float(np.mean([run.seconds for run in runs])), staleness=dict(counts))


def _factors(case: Case) -> tuple[float, ...]:
    return (1.0,) * (case.workers - 1) + (case.slow,)


def _rate(step: int) -> float:
    return 1e-3


def _counts(counts: Mapping[int, int]) -> list[float]:
    return [float(counts.get(age, 0)) for age in range(max(counts) + 1)]


def _mean_and_distance(counts: Sequence[float], of: Sequence[float]) -> tuple[float, float]:
    one, other = dict(enumerate(map(int, counts))), dict(enumerate(map(int, of)))
    return mean(one), distance(one, other)


def lines(record: Record[Case]) -> list[str]:
    """Return lines for each case: samples a second and staleness, measured, predicted and guessed."""
    return list(itertools.chain.from_iterable(map(_lines, record.measured)))


def _lines(measured: Measured[Case]) -> Iterator[str]:
    samples, case = measured.samples, measured.case
    speed, seen = float(np.median(samples["images_per_s"])), samples["staleness"]
    synchronous = float(np.median(samples["synchronous_images_per_s"]))
    yield (
        f"{case.title}: {speed:,.0f} images/s, {speed / synchronous:.2f} times synchronous training; mean staleness "
        f"{_mean_and_distance(seen, seen)[0]:.2f}"
    )
    if case.asynchronous.copies(case.workers) > 1:
        apart = float(np.median(samples["consensus_distance"]))
        yield f"  copies are {apart:.1e} of their norm apart when a worker averages them"
    null = [0.0] * (1 if case.asynchronous.copies(case.workers) > 1 else case.workers - 1) + [1.0]
    for name, staleness in (
        *((name, samples[f"{name}_staleness"]) for name in ("beforehand", "blind")),
        ("null", null),
    ):
        error = samples[f"{name}_images_per_s"][0] / speed - 1
        average, apart = _mean_and_distance(staleness, seen)
        yield f"  {name:<10} images/s {error:+6.1%}, staleness {average:.2f}, distance of distributions {apart:.1%}"


def main() -> int:
    return command.recorded("staleness", __doc__, functools.partial(STUDY.measure, CASES), lines)


if __name__ == "__main__":
    raise SystemExit(main())
