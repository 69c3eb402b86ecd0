"""Tasks of the runtime's tests: many training runs in one job; what they came to comes back."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec
from dpsim.data import Dataset, load_dataset
from dpsim.lowering import lower
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.nn.ops import Ops
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.describe import describe
from dpsim.runtime.recorder import StepMarks, exposed_s, timeline
from dpsim.runtime.trainer import Trainer
from dpsim.schedule import Schedule
from dpsim.timeline import Timeline


def open_trainer(
    comm: MPI.Intracomm, case: dict[str, Any], dataset: Dataset | None = None, ops: Ops | None = None
) -> Trainer:
    """A trainer of ``case``: model, dataset, network, seed, the fields of a plan, and the rates of its steps."""
    dataset = dataset or load_dataset(case["dataset"])
    replica = build_model(case["model"], dataset.input_shape, dataset.classes, ops=ops)
    plan = codec.decode(case["plan"] | {"devices": comm.size}, Plan, "plan")
    lowered = lower(describe(replica, "model"), plan, alpha_s=case.get("alpha_s", 1e-4), beta_s_per_byte=1e-8)
    network = Network.parse(case.get("network", "node"))
    rates = case.get("rates")
    rate = None if rates is None else rates.__getitem__
    return Trainer(
        replica,
        dataset,
        plan,
        comm,
        network,
        seed=case.get("seed", 0),
        schedule=edited(lowered, case.get("edit", ())),
        rate=rate,
        backend=case.get("backend", "cpu"),
    )


def train(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Every case trained for some steps: parameters, losses, whether all ranks agree, what the memory looks like."""
    actual = []
    for case in argument["cases"]:
        report(case["name"])
        trainer = open_trainer(comm, case)
        arena, schedule = trainer.runner.arena, trainer.schedule
        losses, empty = [], False
        for _ in range(argument["steps"]):
            share, samples = trainer.next_share()
            outcome = trainer.runner.run(share, samples)
            losses.append(float(comm.allreduce(outcome.sums.loss)) / samples)
            empty = empty or len(share.labels) == 0
        kept = (arena.parameters, *arena.optimizer_state.values())
        bits = comm.allgather(hashlib.sha256(b"".join(flat.tobytes() for flat in kept)).hexdigest())
        digests = comm.allgather(trainer.digest())
        buckets = [arena.buckets(k, k + 1) for k in range(schedule.buckets)]
        actual.append(
            {
                "parameters": {name: value.ravel().tolist() for name, value in trainer.runner.parameters.items()},
                "losses": losses,
                "same_bits": len(set(bits)) == 1 and len(set(digests)) == 1,
                "padding_is_zero": all(comm.allgather(padding_is_zero(trainer))),
                "shared": all(
                    any(np.shares_memory(view, bucket) for bucket in buckets)
                    and np.shares_memory(view, arena.gradients)
                    for view in trainer.runner.gradients.values()
                ),
                "rank_without_samples": any(comm.allgather(empty)),
                "dtypes": sorted({str(a.dtype) for a in (*kept, arena.gradients)}),
            }
        )
        trainer.close()
    return actual


def padding_is_zero(trainer: Trainer) -> bool:
    """Whether everything in the arena that belongs to no tensor is still zero."""
    arena = trainer.runner.arena
    outside = np.ones(len(arena.gradients), bool)
    for view in arena.views(outside).values():
        view[...] = False
    return not any(flat[outside].any() for flat in (arena.parameters, arena.gradients, *arena.optimizer_state.values()))


def digests_of_changed_state(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, str]:
    """The digest after one step of ``argument``, and those with one element more of each part of the state changed."""
    trainer = open_trainer(comm, argument)
    trainer.step()
    arena = trainer.runner.arena
    digests = {"as trained": trainer.digest()}
    parts = {"parameters": arena.parameters, **arena.optimizer_state, **trainer.replica.state()}
    for name, values in parts.items():
        values.reshape(-1)[0] += 1
        digests[name] = trainer.digest()
    return digests


def perturbed_start(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, bool]:
    """Ranks begin with different parameters and running statistics: whether they are equal before the first step."""
    dataset = load_dataset(argument["dataset"])
    replica = build_model(argument["model"], dataset.input_shape, dataset.classes)
    own = replica.initial_parameters

    def others(seed: int) -> dict[str, Array]:
        return {name: value + comm.rank for name, value in own(seed).items()}

    replica.initial_parameters = others  # type: ignore[method-assign]
    for value in replica.state().values():
        value += comm.rank
    expected = {name: value.copy() for name, value in own(3).items()}
    state = comm.bcast({name: value.copy() for name, value in replica.state().items()})
    plan = Plan(devices=comm.size, global_batch=8)
    trainer = Trainer(replica, dataset, plan, comm, Network(), seed=3)
    equal = all(np.array_equal(expected[name], value) for name, value in trainer.runner.parameters.items())
    equal_state = all(np.array_equal(state[name], value) for name, value in replica.state().items())
    digests = comm.allgather(trainer.digest())
    return {
        "parameters": all(comm.allgather(equal)),
        "state": all(comm.allgather(equal_state)),
        "has_state": bool(state),
        "digest": len(set(digests)) == 1,
    }


def evaluated(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[list[dict[str, Any]]]:
    """Every case: the sums over the test set before any step, on every rank."""
    actual = []
    for case in argument["cases"]:
        trainer = open_trainer(comm, case)
        actual.append([codec.to_builtins(sums) for sums in comm.allgather(trainer.evaluate())])
        trainer.close()
    return actual


def not_finite(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> None:
    """Train on data in which the last rank's share of the third global batch has a NaN; ends in an error."""
    plan = argument["plan"]
    dataset = load_dataset(argument["dataset"])
    if argument["spoil"]:
        trainer = open_trainer(comm, argument, dataset)
        for _ in range(3):
            share, _ = trainer.next_share()
        trainer.close()
        if comm.rank == comm.size - 1:
            wanted = share.x[-1].tobytes()
            spoilt = next(i for i, sample in enumerate(dataset.train_x) if sample.tobytes() == wanted)
            dataset.train_x[spoilt, 0, 0, 0] = np.nan
    trainer = open_trainer(comm, argument, dataset)
    for _ in range(plan["global_batch"] * 10):
        trainer.step()
    trainer.close()


def edited(schedule: Schedule, edit: Sequence[Any]) -> Schedule:
    """The schedule after ("swap", k, l), or after ("delay", k, name): collective k waits for that operation, too.

    ("swap gathers", k, l) does the first to the all-gathers.
    """
    if not edit:
        return schedule
    what, k, other = edit
    sent = schedule.parameter_collectives if what == "swap gathers" else schedule.gradient_collectives
    order = np.arange(len(schedule.kind))
    dependencies = [schedule.dependencies(operation) for operation in order.tolist()]
    if what == "delay":
        names = [schedule.operation_name(operation) for operation in order.tolist()]
        dependencies[sent[k]] = np.append(dependencies[sent[k]], np.int32(names.index(other)))
    else:
        order[[sent[k], sent[other]]] = sent[other], sent[k]
        dependencies = [order[dependencies[row]] for row in order]  # a swap is its own inverse
    columns = {
        name: getattr(schedule, name)[order] for name in ("kind", "layer", "bucket", "micro_batch", "size_bytes")
    }
    start = np.cumsum([0, *map(len, dependencies)]).astype(np.int32)
    joined = np.concatenate(dependencies).astype(np.int32)
    return dataclasses.replace(schedule, depends_start=start, depends_on=joined, **columns)


def recorded(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]]:
    """Timelines of some steps of every case, from the marks of all ranks, with what the marks say beside them."""
    actual = []
    for case in argument["cases"]:
        trainer = open_trainer(comm, case)
        mine = [trainer.step().marks for _ in range(argument["steps"])]
        marks: list[list[StepMarks]] = [list(ranks) for ranks in zip(*comm.allgather(mine), strict=True)]
        line: Timeline = timeline(
            marks, trainer.runner.program.names, emulated_network=trainer.transport.network.emulated
        )
        actual.append(
            {
                "timeline": codec.to_builtins(line.to_record()),
                "exposed_s": [[exposed_s(m) for m in ranks] for ranks in marks],
                "steps": [[[m.begin_s, m.end_s] for m in ranks] for ranks in marks],
                "ready": [[layer for layer, _ in m.ready] for m in marks[0]],
                "gradient_bytes": trainer.schedule.workload.gradient_bytes,
                "buckets": trainer.schedule.buckets,
                "layers": len(trainer.replica.layers),
                "events": marks[-1][0].events,
            }
        )
        trainer.close()
    return actual
