"""A trainer's whole state as a checkpoint, and back: gathered on rank 0, which alone needs the file system."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from dpsim.comm.broadcast import broadcast
from dpsim.errors import ConfigError
from dpsim.progress import Progress
from dpsim.replica import Array
from dpsim.runtime.checkpoint import Checkpoint, Header
from dpsim.runtime.trainer import Trainer

Floats = NDArray[np.float64]


def snapshot(trainer: Trainer, losses: list[float], run: dict[str, Any]) -> Checkpoint | None:
    """The state between two steps, on rank 0 (None elsewhere); collective. Its tensors share the trainer's memory.

    Running statistics, which each rank has of its own, are kept for each rank.
    """
    state = {name: _gathered(trainer, value) for name, value in sorted(trainer.replica.state().items())}
    if trainer.comm.rank:
        return None
    tensors = _tensors(trainer)
    for name, ranks in state.items():
        tensors |= {f"state/{rank}/{name}": value for rank, value in enumerate(ranks)}
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
    """Put a trainer that has not begun into a checkpoint's state, which rank 0 has; collective. The losses so far.

    Training goes on with the same bits on as many devices as wrote it, and, with leaves, on any number: running
    statistics are then the same on all ranks. Those of batch norm's mode ``local`` are each rank's own again; on
    another number of devices every rank gets their mean, as for an evaluation. ``report`` is told, in a line, where
    another kernel table decides from now on. Raises ``ConfigError`` on rank 0 when
    the checkpoint is of another training.
    """
    comm, arena = trainer.comm, trainer.runner.arena
    step, losses = 0, np.zeros(0)
    if checkpoint is not None:
        _check_fits(trainer, checkpoint)
        if (doubt := _other_table(trainer, checkpoint.header)) is not None:
            report(f"warning: {doubt}")
        for name, value in _tensors(trainer).items():
            value[...] = checkpoint.tensors[name]
        step, losses = checkpoint.header.step, checkpoint.tensors["losses"]
    for flat in (arena.parameters, *arena.optimizer_state.values()):
        broadcast(trainer.transport, flat)
    for name, value in sorted(trainer.replica.state().items()):
        everyones = None if checkpoint is None else _state_of_ranks(checkpoint, name, comm.size)
        mine = np.empty_like(value, order="C")
        comm.Scatter(everyones, mine)
        value[...] = mine
    trainer.resume_from(comm.bcast(step))
    found: list[float] = comm.bcast(losses).tolist()
    return found


def _other_table(trainer: Trainer, header: Header) -> str | None:
    """What to tell where a reproducible run goes on with another kernel table than it began with; else None."""
    then, now = header.kernel_table, trainer.kernel_table
    if not then or not now or then == now:
        return None
    return (
        f"the checkpoint was written with kernel table {then}, this version of dpsim has {now}: from step"
        f" {header.step} on the bits are not those of a run that was never interrupted"
    )


def _tensors(trainer: Trainer) -> dict[str, Array]:
    """Parameters and optimizer state, as views of the trainer's memory."""
    arena = trainer.runner.arena
    tensors = {f"parameters/{name}": value for name, value in trainer.runner.parameters.items()}
    for slot, flat in arena.optimizer_state.items():
        tensors |= {f"optimizer/{slot}/{name}": value for name, value in arena.views(flat).items()}
    return tensors


def _gathered(trainer: Trainer, value: Array) -> Array:
    """``value`` of every rank, [ranks, ...], on rank 0 (elsewhere empty)."""
    comm = trainer.comm
    ranks = np.empty((comm.size if comm.rank == 0 else 0, *value.shape), value.dtype)
    comm.Gather(np.asarray(value, order="C"), ranks)
    return ranks


def _state_of_ranks(checkpoint: Checkpoint, name: str, devices: int) -> Array:
    """The state to give to each rank, [devices, ...]: its own, or what all have, or the mean of all."""
    own = np.stack([checkpoint.tensors[f"state/{rank}/{name}"] for rank in range(checkpoint.header.plan.devices)])
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
        ("seed", header.seed, trainer.seed),
        ("number of training samples", header.training_samples, len(trainer.dataset.train_y)),
        ("position", header.epoch * trainer.steps_per_epoch + header.batch, header.step),
    ]
    wanted = {name: (value.shape, value.dtype.name) for name, value in _tensors(trainer).items()}
    for rank in range(header.plan.devices):
        state = trainer.replica.state()
        wanted |= {f"state/{rank}/{name}": (value.shape, value.dtype.name) for name, value in state.items()}
    wanted["losses"] = ((header.step,), "float64")
    held = {name: (value.shape, value.dtype.name) for name, value in checkpoint.tensors.items()}
    pairs += [(f"tensor {name}", held.get(name), wanted.get(name)) for name in sorted(held.keys() | wanted.keys())]
    differing = [f"{what} is {there} there, {here} here" for what, there, here in pairs if there != here]
    if differing:
        more = f"; and {len(differing) - 3} more" if len(differing) > 3 else ""
        raise ConfigError(
            f"the checkpoint is of another training: {'; '.join(differing[:3])}{more}",
            allowed="the model, data, optimizer, seed, batch, leaves, batch norm and wire dtype it was written with",
            remedy="leave out the flags that differ, or train afresh into another folder with --checkpoint",
        )
