"""Trains on running ranks, and gathers what came of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.data.sharding import check_batch
from dpsim.errors import ConfigError
from dpsim.harness.train.advice import batch_norm_warning
from dpsim.harness.train.resume import check_same_training, run_of, stored
from dpsim.harness.train.train import TrainConfig
from dpsim.learning_rate import learning_rate
from dpsim.lowering import lower
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.progress import Progress
from dpsim.runtime.checkpoint import read
from dpsim.runtime.checkpoints import Checkpoints
from dpsim.runtime.fit import Callback, Epoch, OnRank, fit
from dpsim.runtime.snapshot import restore
from dpsim.runtime.trainer import Trainer


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """One ``TrainConfig`` on running ranks; rank 0 returns a ``TrainResult`` (plain values)."""
    config = codec.decode(argument, TrainConfig, "training")
    trainer, total = _trainer(comm, config, report)
    _restore(trainer, config, total, report)
    if trainer.runner.steps:
        report(f"going on after step {trainer.runner.steps}, towards {total} steps")
    saving = None
    if config.checkpoint is not None:
        saving = Checkpoints(config.checkpoint, config.checkpoint_every, run=run_of(config), report=report)
    result = fit(trainer, total, [OnRank(_Tell(report)), *([saving] if saving else [])])
    result = msgspec.structs.replace(result, checkpoint_failure=saving.failure if saving else "")
    return dict(codec.to_builtins(result)) if comm.rank == 0 else None


def _trainer(comm: MPI.Intracomm, config: TrainConfig, report: Progress) -> tuple[Trainer, int]:
    """A trainer as configured, and how many steps the run has."""
    dataset = load_dataset(config.dataset, config.seed)
    check_batch(len(dataset.train_y), config.global_batch)
    replica = build_model(config.model, dataset.input_shape, dataset.classes, label_smoothing=config.label_smoothing)
    plan, schedule = config.plan(), None
    if (doubt := batch_norm_warning(replica.layers, plan)) is not None:
        report(f"warning: {doubt}")
    if config.workload is not None:
        schedule = lower(
            config.workload, plan, alpha_s=config.link_alpha_s, beta_s_per_byte=config.link_beta_s_per_byte
        )
    steps_per_epoch = -(-len(dataset.train_y) // plan.global_batch)
    total = config.total_steps(steps_per_epoch)

    def rate(step: int) -> float:
        return learning_rate(
            config.rate_schedule,
            plan.optimizer.learning_rate,
            step,
            global_batch=plan.global_batch,
            steps_per_epoch=steps_per_epoch,
            total_steps=total,
        )

    trainer = Trainer(
        replica,
        dataset,
        plan,
        comm,
        Network.parse(config.network),
        seed=config.seed,
        schedule=schedule,
        rate=rate,
        stall_after_s=config.stall_after_s,
        selection=config.selection,
        backend=config.backend,
    )
    if config.backend == "cuda":
        from dpsim.comm.cuda.transport import CudaTransport

        assert isinstance(trainer.transport, CudaTransport)
        report(trainer.transport.description)
    return trainer, total


def _restore(trainer: Trainer, config: TrainConfig, total: int, report: Progress) -> None:
    """Put the trainer where the checkpoint to resume from is (rank 0 reads it), if there is one."""
    if config.resume is None:
        return
    checkpoint = None
    if trainer.comm.rank == 0:
        checkpoint = read(Path(config.resume))
        check_same_training(stored(checkpoint), config)
    losses = restore(trainer, checkpoint, report)
    if len(losses) > total:
        raise ConfigError(
            f"the checkpoint is of step {len(losses)}, and the run would end at step {total}",
            allowed=f"{len(losses)} steps or more, counted from the beginning of training",
            remedy="raise --epochs or --steps",
        )
    trainer.log.resume_from(losses)


class _Tell(Callback):
    """A line of progress an epoch."""

    def __init__(self, report: Progress) -> None:
        self._report = report

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        done = f"{epoch.steps} of {epoch.total_steps} steps"
        self._report(f"epoch {epoch.number}: training loss {epoch.loss:.4f} ({done})")
