"""The runner of digests: trains configurations on ranks, and keeps digests of every tensor after each step."""

from __future__ import annotations

import gc
import hashlib
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec, nn
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.machine import Network, Selection
from dpsim.nn.batch_norm import BatchNorm
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.reproduce import (
    DigestCase,
    DriftInputs,
    Reproduction,
    RunOutcome,
    Trajectory,
    losses_digest,
    plan_name,
    promised,
)
from dpsim.replica import Array, Capabilities, Replica
from dpsim.runtime.trainer import Trainer
from dpsim.study import models

DIGITS = 8
_MOST_BATCHES = 16


def run(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[Any] | None:
    """Run ``argument["cases"]`` of a reproduction one after another, each on the first ranks of the job.

    Rank 0 returns the ``RunOutcome`` of each case as plain values, the others ``None``.
    """
    reproduction = codec.decode(argument["reproduction"], Reproduction, "reproduction")
    cases = [codec.decode(each, DigestCase, "training") for each in argument["cases"]]
    dataset = load_dataset(reproduction.dataset, reproduction.seed)
    groups = {devices: first_ranks(comm, devices) for devices in sorted({case.plan.devices for case in cases})}
    outcomes = []
    for number, case in enumerate(cases, start=1):
        if (group := groups[case.plan.devices]) is not None:
            report(f"{number} of {len(cases)}: {plan_name(case.plan)}, batch norm {case.plan.batch_norm}")
            outcomes.append(codec.to_builtins(_Run(group, reproduction, case, dataset).train()))
            gc.collect()  # shared memory is freed once nothing refers to it
        quiet_barrier(comm)
    return outcomes if comm.rank == 0 else None


class DigestedTraining:
    """One rank's training of a plan, of which the tensors can be compared after every step.

    ``trained`` is a replica of the reproduction's model. ``selection`` is what algorithm ``auto`` takes by size;
    without one it is measured.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        reproduction: Reproduction,
        trained: Replica,
        plan: Plan,
        dataset: Dataset,
        selection: Selection | None = None,
    ) -> None:
        self.comm, self.replica = comm, trained
        self.trainer = Trainer(
            self.replica, dataset, plan, comm, Network(), seed=reproduction.seed, selection=selection
        )

    def tensors(self) -> dict[str, Array]:
        """Return all tensors by name, in the order in which a step makes them: statistics, then layers backwards.

        Collective where a rank does not have everything.
        """
        trainer = self.trainer
        parameters, optimizer_state, state = trainer.parameters(), trainer.optimizer_state(), trainer.whole_state()
        tensors = {f"state/{name}": state[name] for name in trainer.model_state}
        for layer in reversed(self.replica.layers):
            for tensor in layer.tensors:
                for name, views in optimizer_state.items():
                    tensors[f"optimizer/{name}/{tensor.name}"] = views[tensor.name]
                tensors[f"parameters/{tensor.name}"] = parameters[tensor.name]
        return tensors

    def digests(self) -> tuple[str, ...]:
        """Return the first digits of the SHA-256 of every tensor, on rank 0. Collective as ``tensors`` is."""
        tensors = self.tensors()
        return tuple(map(_digest, tensors.values())) if self.comm.rank == 0 else ()


def replica(reproduction: Reproduction, dataset: Dataset) -> Replica:
    """Return a replica of the model of a reproduction."""
    return models.load(reproduction.model, dataset.input_shape, dataset.classes).replica()


class _Run(DigestedTraining):
    def __init__(self, comm: MPI.Intracomm, reproduction: Reproduction, case: DigestCase, dataset: Dataset) -> None:
        super().__init__(comm, reproduction, replica(reproduction, dataset), case.plan, dataset)
        self.case, self.steps = case, case.until or reproduction.steps

    def train(self) -> RunOutcome:
        """Train, take the digests of every tensor after each step (of a dump: the last), and save the case's file."""
        trainer, case = self.trainer, self.case
        predicts = case.plan.devices == 1 and not promised(case.plan) and not case.until
        updates = _Updates(trainer.runner.arena.parameters) if predicts else None
        arrays = self._first_means() if case.file and not case.until and case.plan.batch_norm == "local" else {}
        samples, steps = SampleDigests(), []
        for step in range(1, self.steps + 1):
            if step == case.until and (observable := Capabilities.of(self.replica).observable) is not None:
                observable.observe(samples.add)
            trainer.step()
            if step >= case.until:
                steps.append(self.digests())
            if updates:
                updates.step()
        if case.until:
            arrays = self.tensors() | samples.gathered(self.comm)
            arrays |= {f"gradients/{name}": value for name, value in trainer.gradients().items()}
        else:
            arrays |= {f"parameters/{name}": value for name, value in trainer.parameters().items()}
        if case.file and self.comm.rank == 0:
            np.savez(case.file, **arrays)  # type: ignore[arg-type]
        inputs = updates.drift_inputs(case.plan, normalises=bool(self.replica.state())) if updates else None
        trainer.log.gather()
        with trainer.averaged_state():
            digest = trainer.digest()
        agree = len(set(self.comm.allgather(digest))) == 1
        names = tuple(self.tensors())
        trainer.close()
        losses = tuple(trainer.log.losses)
        trajectory = Trajectory(
            digest=digest, losses=losses, tensors=names, steps=tuple(steps), losses_digest=losses_digest(losses)
        )
        return RunOutcome(trajectory=trajectory, ranks_agree=agree, drift_inputs=inputs)

    def _first_means(self) -> dict[str, Array]:
        """Return the means of the inputs of the first batch norm, over the first batches and with initial parameters.

        Rank 0 has those of all ranks: ``means`` [batches, ranks, C], and ``deviation`` [C], the standard deviation of a
        sample's own mean over a device's samples. A batch norm removes the gap from its output, so that a later one
        would show less of it.
        """
        if not isinstance(self.replica, nn.Network):
            return {}
        chain, trainer = self.replica.chain, self.trainer
        first = next((number for number, layer in enumerate(chain) if isinstance(layer, BatchNorm)), None)
        if first is None:
            return {}
        means, variances = [], []
        for _ in range(min(_MOST_BATCHES, trainer.steps_per_epoch)):
            share, samples = trainer.next_share()
            if samples == trainer.plan.global_batch:
                x = share.x
                for layer in chain[:first]:
                    layer.begin(share)
                    x = layer.forward(x, share.leaves, training=True)
                of_samples = x.reshape(len(x), -1, x.shape[-1]).mean(axis=1, dtype=np.float64)
                means.append(of_samples.mean(axis=0))
                variances.append(of_samples.var(axis=0, ddof=min(1, len(x) - 1)))
        trainer.resume_from(0)
        ranks = self.comm.gather(np.array(means))
        if ranks is None:
            return {}
        return {"means": np.stack(ranks, axis=1), "deviation": np.sqrt(np.mean(variances, axis=0))}


class SampleDigests:
    """Collects digests of a rank's samples; ``add`` is a ``dpsim.replica.Observer``.

    ``digests`` by ``input`` (the samples themselves), ``forward LAYER`` and ``input_gradient LAYER``, in the order of
    computation.
    """

    def __init__(self) -> None:
        self.digests: dict[str, list[bytes]] = {}

    def add(self, operation: str, layer: str, values: Array, result: Array) -> None:
        if not self.digests:
            self.digests["input"] = _row_digests(values)
        self.digests.setdefault(f"{operation} {layer}", []).extend(_row_digests(result))

    def gathered(self, comm: MPI.Intracomm) -> dict[str, Array]:
        """Return the digests of all ranks' samples, ``samples/OUTPUT``; on rank 0, nothing on the others. Collective.

        The rank with the most outputs names them: one without samples has none.
        """
        ranks = comm.gather(self.digests) or [{}]
        return {
            f"samples/{name}": as_numbers([digest for of_rank in ranks for digest in of_rank.get(name, [])])
            for name in max(ranks, key=len)
        }


def _row_digests(rows: Array) -> list[bytes]:
    return [hashlib.sha256(row.tobytes()).digest()[:8] for row in rows]


def as_numbers(digests: list[bytes]) -> NDArray[np.uint64]:
    """Digests as an array."""
    return np.frombuffer(b"".join(digests), np.uint64)


def _digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:DIGITS]


class _Updates:
    """Accumulates the sizes of the updates, step after step."""

    def __init__(self, parameters: Array) -> None:
        self._parameters, self._before = parameters, parameters.copy()
        self._spacing_updates = self._squared_updates = 0.0

    def step(self) -> None:
        updates = np.abs(self._parameters - self._before).astype(np.float64)
        self._spacing_updates += float((updates * np.spacing(np.abs(self._parameters))).mean())
        self._squared_updates += float((updates * updates).mean())
        self._before[...] = self._parameters

    def drift_inputs(self, plan: Plan, *, normalises: bool) -> DriftInputs:
        return DriftInputs(
            batch_norm=plan.batch_norm,
            spacing_updates=self._spacing_updates,
            squared_updates=self._squared_updates,
            parameter_rms=float(np.sqrt(np.mean(self._parameters.astype(np.float64) ** 2))),
            unit=float(np.finfo(self._parameters.dtype).eps) / 2,
            normalises=normalises,
        )
