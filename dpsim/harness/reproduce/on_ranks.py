"""Trains the configurations of a reproduction on running ranks, and keeps digests of all that each step makes."""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

from dpsim import codec, models, nn
from dpsim.comm.group import first_ranks, quiet_barrier
from dpsim.data import Dataset, load_dataset
from dpsim.harness.reproduce.sample_digests import SampleDigests, as_numbers
from dpsim.harness.reproduce.task import RunOutcome, Task
from dpsim.machine import Network
from dpsim.nn.batch_norm import BatchNorm
from dpsim.records.reproduce import Configuration, DriftInputs, Reproduction, Trajectory
from dpsim.replica import Array, ObservableReplica
from dpsim.runtime.trainer import Trainer

Progress = Callable[[str], None]
DIGITS = 16
_MOST_BATCHES = 16


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> list[dict[str, Any]] | None:
    """One ``Task``, on as many ranks as any of it needs; rank 0 returns a ``RunOutcome`` a configuration (plain
    values).
    """
    task = codec.decode(argument, Task, "reproduction on ranks")
    dataset = load_dataset(task.reproduction.dataset, task.reproduction.seed)
    groups = {devices: first_ranks(comm, devices) for devices in sorted({c.devices for c in task.configurations})}
    found = []
    for number, (configuration, file) in enumerate(zip(task.configurations, task.files, strict=True)):
        if (group := groups[configuration.devices]) is not None:
            report(f"{number + 1} of {len(task.files)}: {configuration.name}, batch norm {configuration.batch_norm}")
            run = _Run(group, task.reproduction, configuration, dataset)
            ran = run.look_into(task.until[number], Path(file)) if task.until else run.train(file)
            found.append(codec.to_builtins(ran))
            gc.collect()  # what ranks share is freed when nothing refers to it
        quiet_barrier(comm)
    return found if comm.rank == 0 else None


class _Run:
    """The training of one configuration."""

    def __init__(
        self, comm: MPI.Intracomm, reproduction: Reproduction, configuration: Configuration, dataset: Dataset
    ) -> None:
        self.comm, self.configuration, self.steps = comm, configuration, reproduction.steps
        self.replica = models.load(reproduction.model, dataset.input_shape, dataset.classes).replica()
        self.trainer = Trainer(
            self.replica, dataset, reproduction.plan(configuration), comm, Network(), seed=reproduction.seed
        )

    def tensors(self) -> dict[str, Array]:
        """All tensors by name in the order in which a step makes them: statistics, then layer by layer backwards."""
        runner = self.trainer.runner
        slots = {name: runner.arena.views(flat) for name, flat in runner.arena.optimizer_state.items()}
        found = {f"state/{name}": value for name, value in self.replica.state().items()}
        for layer in reversed(self.replica.layers):
            for tensor in layer.tensors:
                found |= {f"optimizer/{slot}/{tensor.name}": views[tensor.name] for slot, views in slots.items()}
                found[f"parameters/{tensor.name}"] = runner.parameters[tensor.name]
        return found

    def train(self, file: str) -> RunOutcome:
        """All steps, with the digests of every tensor after each."""
        trainer, alone = self.trainer, self.configuration.devices == 1 and not self.configuration.promised
        moved = _Moved(trainer.runner.arena.parameters) if alone else None
        kept = self._first_means() if file and self.configuration.batch_norm == "local" else {}
        steps: list[tuple[str, ...]] = []
        for _ in range(self.steps):
            trainer.step()
            if self.comm.rank == 0:
                steps.append(tuple(_digest(value) for value in self.tensors().values()))
            if moved:
                moved.step()
        if file and self.comm.rank == 0:
            kept |= {name: value for name, value in self.tensors().items() if name.startswith("parameters/")}
            np.savez(file, **kept)  # type: ignore[arg-type]
        basis = moved.basis(self.configuration, self.replica.state()) if moved else None
        return self._ran(tuple(steps), basis)

    def look_into(self, step: int, file: Path) -> RunOutcome:
        """So many steps; then the file has every tensor, the gradients, and digests of each sample in that step."""
        digests = SampleDigests()
        for _ in range(step - 1):
            self.trainer.step()
        if isinstance(self.replica, ObservableReplica):
            self.replica.observe(digests.add)
        self.trainer.step()
        ranks = self.comm.gather(digests.digests)
        steps: tuple[tuple[str, ...], ...] = ()
        if ranks is not None:
            tensors = self.tensors()
            steps = (tuple(_digest(value) for value in tensors.values()),)
            names = max(ranks, key=len)
            samples = {
                f"samples/{name}": as_numbers([one for found in ranks for one in found.get(name, [])]) for name in names
            }
            gradients = {f"gradients/{name}": value for name, value in self.trainer.runner.gradients.items()}
            np.savez(file, **tensors | samples | gradients)  # type: ignore[arg-type]
        return self._ran(steps, None)

    def _ran(self, steps: tuple[tuple[str, ...], ...], basis: DriftInputs | None) -> RunOutcome:
        trainer = self.trainer
        trainer.log.gather()
        with trainer.averaged_state():
            digest = trainer.digest()
        agree = len(set(self.comm.allgather(digest))) == 1
        trainer.close()
        losses = tuple(trainer.log.losses)
        trajectory = Trajectory(
            digest=digest,
            losses=losses,
            tensors=tuple(self.tensors()),
            steps=steps,
            losses_digest=hashlib.sha256(np.array(losses, np.float64).tobytes()).hexdigest(),
        )
        return RunOutcome(trajectory=trajectory, ranks_agree=agree, basis=basis)

    def _first_means(self) -> dict[str, Array]:
        """What the first batch norm is given of the first batches, by the initial parameters; rank 0 has all ranks'.

        ``means`` [batches, ranks, C], and ``deviation`` [C] of a sample's own mean, over a device's samples. (A batch
        norm takes the gap out of what it hands on, so a later one is given less of it.)
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


def _digest(value: Array) -> str:
    return hashlib.sha256(np.ascontiguousarray(value).tobytes()).hexdigest()[:DIGITS]


class _Moved:
    """How far parameters move, step after step."""

    def __init__(self, parameters: Array) -> None:
        self._now, self._before = parameters, parameters.copy()
        self._spacing_updates = self._squared_updates = 0.0

    def step(self) -> None:
        updates = np.abs(self._now - self._before).astype(np.float64)
        self._spacing_updates += float((updates * np.spacing(np.abs(self._now))).mean())
        self._squared_updates += float((updates * updates).mean())
        self._before[...] = self._now

    def basis(self, configuration: Configuration, state: dict[str, Array]) -> DriftInputs:
        return DriftInputs(
            batch_norm=configuration.batch_norm,
            spacing_updates=self._spacing_updates,
            squared_updates=self._squared_updates,
            parameter_rms=float(np.sqrt(np.mean(self._now.astype(np.float64) ** 2))),
            unit=float(np.finfo(self._now.dtype).eps) / 2,
            normalises=bool(state),
        )
