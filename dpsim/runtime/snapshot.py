"""Converts a trainer's state to a checkpoint and back. Rank 0 gathers it; only rank 0 needs the file system."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.arena import distribute
from dpsim.runtime.checkpoint import Checkpoint, Header
from dpsim.runtime.trainer import Trainer

Floats = NDArray[np.float64]


def snapshot(trainer: Trainer, losses: list[float], run: dict[str, Any]) -> Checkpoint | None:
    """Return the state between two steps on rank 0, else None. Collective; tensors may share the trainer's memory.

    The running statistics of every rank are kept. Sharded optimizer state is brought together, so that a checkpoint
    does not depend on the strategy.
    """
    states = trainer.comm.gather(trainer.state_on_host())
    optimizer_state = trainer.optimizer_state(root=0)
    parameters = trainer.parameters(root=0)
    if states is None:
        return None
    tensors = {f"parameters/{name}": value for name, value in parameters.items()}
    for slot, of_slot in optimizer_state.items():
        tensors |= {f"optimizer/{slot}/{name}": value for name, value in of_slot.items()}
    for rank, state in enumerate(states):
        tensors |= {f"state/{trainer.plan.place_of(rank)}/{name}": value for name, value in state.items()}
    tensors["losses"] = np.array(losses, np.float64)
    epoch, batch = divmod(trainer.runner.steps, trainer.steps_per_epoch)
    header = Header(
        step=trainer.runner.steps,
        epoch=epoch,
        batch=batch,
        seed=trainer.seed,
        plan=trainer.plan,
        run=run,
        training_samples=len(trainer.dataset.train_y),
        kernel_table=trainer.kernel_table,
    )
    return Checkpoint(header=header, tensors=tensors)


def restore(trainer: Trainer, checkpoint: Checkpoint | None, report: Progress) -> list[float]:
    """Set a trainer that has not begun to the state of rank 0's checkpoint; returns the losses so far. Collective.

    Training continues with the same bits on as many devices as wrote it and, with leaves, on any number of them. With
    batch norm's mode ``local`` each rank gets its own running statistics, and on another number of devices their mean,
    as in an evaluation. ``report`` gets a warning if the kernel table is another one than the checkpoint's. Raises
    ``ConfigError`` on rank 0 if the checkpoint is of another training.
    """
    comm, arena = trainer.comm, trainer.runner.arena
    tensors = trainer.schedule.workload.tensors
    step, losses = 0, np.zeros(0)
    parameters, optimizer_state, states = None, None, None
    if checkpoint is not None:
        _check_fits(trainer, checkpoint)
        if (warning := _other_table(trainer, checkpoint.header)) is not None:
            report(f"warning: {warning}")
        parameters = {tensor.name: checkpoint.tensors[f"parameters/{tensor.name}"] for tensor in tensors}
        optimizer_state = {
            slot: {tensor.name: checkpoint.tensors[f"optimizer/{slot}/{tensor.name}"] for tensor in tensors}
            for slot in arena.optimizer_state
        }
        states = [_state_of_rank(trainer, checkpoint, rank) for rank in range(comm.size)]
        step, losses = checkpoint.header.step, checkpoint.tensors["losses"]
    flat = arena.flat(parameters)
    comm.Bcast(flat)
    arena.set_parameters(flat)
    distribute(arena, comm, optimizer_state)
    own = comm.scatter(states)
    for name, value in trainer.replica.state().items():
        arena.memory.write(value, own[name])
    trainer.resume_from(comm.bcast(step))
    result: list[float] = comm.bcast(losses).tolist()
    return result


def _other_table(trainer: Trainer, header: Header) -> str | None:
    """Return a warning if a bit-reproducible run is resumed with other choices of code, else None."""
    before, now = header.kernel_table, trainer.kernel_table
    shares = (header.plan.devices, header.plan.accumulate), (trainer.plan.devices, trainer.plan.accumulate)
    if not before or not now or before == now or (not trainer.plan.leaves and shares[0] != shares[1]):
        return None
    made = "this version of dpsim has" if trainer.plan.leaves else "measurements on this machine chose"
    return (
        f"the checkpoint was written with kernel table {before}, {made} {now}: from step {header.step} on the bits are"
        " not those of a run that was never interrupted"
    )


def _state_of_rank(trainer: Trainer, checkpoint: Checkpoint, rank: int) -> dict[str, Array]:
    """Return the state of the whole model that a rank resumes with."""
    plan = trainer.plan
    own = plan.place_of(rank)
    return {name: _state_of_ranks(checkpoint, name, plan.data_devices)[own] for name in trainer.model_state}


def _state_of_ranks(checkpoint: Checkpoint, name: str, devices: int) -> Array:
    """Return the state of each rank, [devices, ...]: its own, or the common one, or the mean of all."""
    own = np.stack([checkpoint.tensors[f"state/{rank}/{name}"] for rank in range(checkpoint.header.plan.data_devices)])
    if len(own) == devices:
        return own
    if checkpoint.header.plan.batch_norm != "local":
        return np.repeat(own[:1], devices, axis=0)
    return np.repeat(own.mean(axis=0, dtype=np.float64, keepdims=True).astype(own.dtype), devices, axis=0)


def _check_fits(trainer: Trainer, checkpoint: Checkpoint) -> None:
    header, plan = checkpoint.header, trainer.plan
    pairs: list[tuple[str, object, object]] = [
        ("optimizer", header.plan.optimizer, plan.optimizer),
        ("global batch", header.plan.global_batch, plan.global_batch),
        ("leaves", header.plan.leaves, plan.leaves),
        ("batch norm", header.plan.batch_norm, plan.batch_norm),
        ("wire dtype", header.plan.wire_dtype, plan.wire_dtype),
        ("compute dtype", header.plan.compute_dtype, plan.compute_dtype),
        ("seed", header.seed, trainer.seed),
        ("number of training samples", header.training_samples, len(trainer.dataset.train_y)),
        ("position", header.epoch * trainer.steps_per_epoch + header.batch, header.step),
    ]
    wanted: dict[str, tuple[tuple[int, ...], str]] = {}
    for part in ("parameters", *(f"optimizer/{slot}" for slot in trainer.runner.arena.optimizer_state)):
        for tensor in trainer.schedule.workload.tensors:
            wanted[f"{part}/{tensor.name}"] = (tensor.shape, tensor.dtype)
    for rank in range(header.plan.data_devices):
        wanted |= {f"state/{rank}/{name}": value for name, value in trainer.model_state.items()}
    wanted["losses"] = ((header.step,), "float64")
    held = {name: (value.shape, value.dtype.name) for name, value in checkpoint.tensors.items()}
    pairs += [(f"tensor {name}", held.get(name), wanted.get(name)) for name in sorted(held.keys() | wanted.keys())]
    differing = [f"{name} is {saved} there, {own} here" for name, saved, own in pairs if saved != own]
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"the checkpoint is of another training: {'; '.join(differing[:3])}{more}",
            allowed="the model, data, optimizer, seed, batch, leaves, batch norm and dtypes it was written with",
            remedy="leave out the flags that differ, or train afresh into another folder with --checkpoint",
        )
