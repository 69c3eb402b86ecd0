"""Trains the configurations of a reproduction on MPI ranks, and keeps digests of every tensor after each step."""

from __future__ import annotations

import gc
import hashlib
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray

from dpsim import codec, nn
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.harness import models
from dpsim.machine import Network
from dpsim.nn.batch_norm import BatchNorm
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.reproduce import (
    DriftInputs,
    Reproduction,
    RunOutcome,
    Task,
    Trajectory,
    losses_digest,
    plan_name,
    promised,
)
from dpsim.replica import Array, Capabilities
from dpsim.runtime.trainer import Trainer

DIGITS = 16
_MOST_BATCHES = 16


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]] | None:
    """Run a ``Task`` on as many ranks as its largest plan needs.

    Rank 0 returns the ``RunOutcome`` of each plan as plain values, the others ``None``.
    """
    task = codec.decode(argument, Task, "reproduction on ranks")
    dataset = load_dataset(task.reproduction.dataset, task.reproduction.seed)
    groups = {devices: first_ranks(comm, devices) for devices in sorted({plan.devices for plan in task.plans})}
    outcomes = []
    for number, (plan, file) in enumerate(zip(task.plans, task.files, strict=True)):
        if (group := groups[plan.devices]) is not None:
            report(f"{number + 1} of {len(task.files)}: {plan_name(plan)}, batch norm {plan.batch_norm}")
            run = _Run(group, task.reproduction, plan, dataset)
            outcome = run.dump(task.until[number], Path(file)) if task.until else run.train(file)
            outcomes.append(codec.to_builtins(outcome))
            gc.collect()  # shared memory is freed once nothing refers to it
        quiet_barrier(comm)
    return outcomes if comm.rank == 0 else None


class _Run:
    """The training of one plan."""

    def __init__(self, comm: MPI.Intracomm, reproduction: Reproduction, plan: Plan, dataset: Dataset) -> None:
        self.comm, self.plan, self.steps = comm, plan, reproduction.steps
        self.replica = models.load(reproduction.model, dataset.input_shape, dataset.classes).replica()
        self.trainer = Trainer(self.replica, dataset, plan, comm, Network(), seed=reproduction.seed)

    def tensors(self) -> dict[str, Array]:
        """Return all tensors by name, in the order in which a step makes them: statistics, then layers backwards.

        Collective where optimizer state is sharded.
        """
        runner = self.trainer.runner
        optimizer_state = self.trainer.optimizer_state()
        tensors = {f"state/{name}": value for name, value in self.replica.state().items()}
        for layer in reversed(self.replica.layers):
            for tensor in layer.tensors:
                for name, views in optimizer_state.items():
                    tensors[f"optimizer/{name}/{tensor.name}"] = views[tensor.name]
                tensors[f"parameters/{tensor.name}"] = runner.parameters[tensor.name]
        return tensors

    def train(self, file: str) -> RunOutcome:
        """Train all steps, and take the digests of every tensor after each."""
        trainer, plan = self.trainer, self.plan
        predicts = plan.devices == 1 and not promised(plan)
        updates = _Updates(trainer.runner.arena.parameters) if predicts else None
        arrays = self._first_means() if file and plan.batch_norm == "local" else {}
        steps: list[tuple[str, ...]] = []
        for _ in range(self.steps):
            trainer.step()
            tensors = self.tensors()
            if self.comm.rank == 0:
                steps.append(tuple(_digest(value) for value in tensors.values()))
            if updates:
                updates.step()
        if file and self.comm.rank == 0:
            arrays |= {f"parameters/{name}": value for name, value in self.trainer.runner.parameters.items()}
            np.savez(file, **arrays)  # type: ignore[arg-type]
        inputs = updates.drift_inputs(plan, normalises=bool(self.replica.state())) if updates else None
        return self._outcome(tuple(steps), inputs)

    def dump(self, step: int, file: Path) -> RunOutcome:
        """Train up to a step, and save its dump: every tensor, the gradients, and digests of each sample."""
        digests = SampleDigests()
        for _ in range(step - 1):
            self.trainer.step()
        if (observable := Capabilities.of(self.replica).observable) is not None:
            observable.observe(digests.add)
        self.trainer.step()
        ranks = self.comm.gather(digests.digests)
        steps: tuple[tuple[str, ...], ...] = ()
        tensors = self.tensors()
        if ranks is not None:
            steps = (tuple(_digest(value) for value in tensors.values()),)
            names = max(ranks, key=len)
            samples = {
                f"samples/{name}": as_numbers([digest for of_rank in ranks for digest in of_rank.get(name, [])])
                for name in names
            }
            gradients = {f"gradients/{name}": value for name, value in self.trainer.runner.gradients.items()}
            np.savez(file, **tensors | samples | gradients)  # type: ignore[arg-type]
        return self._outcome(steps, None)

    def _outcome(self, steps: tuple[tuple[str, ...], ...], inputs: DriftInputs | None) -> RunOutcome:
        """End the training and return its outcome."""
        trainer = self.trainer
        trainer.log.gather()
        with trainer.averaged_state():
            digest = trainer.digest()
        agree = len(set(self.comm.allgather(digest))) == 1
        names = tuple(self.tensors())
        trainer.close()
        losses = tuple(trainer.log.losses)
        trajectory = Trajectory(
            digest=digest,
            losses=losses,
            tensors=names,
            steps=steps,
            losses_digest=losses_digest(losses),
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


def _row_digests(rows: Array) -> list[bytes]:
    """8 bytes of the SHA-256 of each row."""
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
