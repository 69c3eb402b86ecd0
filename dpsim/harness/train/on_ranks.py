"""Trains on running ranks, and returns the result."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from mpi4py import MPI

from dpsim import codec
from dpsim.comm.shaped import enter
from dpsim.data import Dataset, load_dataset
from dpsim.data.sharding import check_batch
from dpsim.errors import ConfigError
from dpsim.harness.train.asynchronous import train_asynchronously
from dpsim.harness.train.resume import TrainTask, changed_model, check_same_training, run_of, stored
from dpsim.lowering import lower
from dpsim.machine import Network
from dpsim.plan import Plan
from dpsim.progress import Progress
from dpsim.records.train import TrainConfig
from dpsim.replica import LayerSpec
from dpsim.runtime.checkpoint import read
from dpsim.runtime.checkpoints import Checkpoints
from dpsim.runtime.fit import Callback, Epoch, OnRank, fit
from dpsim.runtime.snapshot import restore
from dpsim.runtime.trainer import Trainer
from dpsim.study import models
from dpsim.study.models import Model

if TYPE_CHECKING:
    from dpsim.comm.cuda.transport import CudaTransport


LEAST_LOCAL_BATCH = 16


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """One ``TrainTask`` on running ranks; rank 0 returns a ``TrainResult`` (plain values)."""
    task = codec.decode(argument, TrainTask, "training")
    config = task.config
    dataset = load_dataset(config.dataset, config.seed)
    check_batch(len(dataset.train_y), config.plan.global_batch)
    shape, smoothing = dataset.input_shape, config.label_smoothing
    model = models.load(config.model, shape, dataset.classes, label_smoothing=smoothing)
    if config.plan.parallelism.asynchronous:
        return train_asynchronously(comm, config, dataset, model, report)
    trainer, total = _trainer(comm, task, dataset, model, report)
    _restore(trainer, config, model, total, report)
    if trainer.runner.steps:
        report(f"going on after step {trainer.runner.steps}, towards {total} steps")
    saving = None
    if config.checkpoint is not None:
        saving = Checkpoints(
            config.checkpoint, config.checkpoint_every, run=run_of(config, model.source_digest), report=report
        )
    result = fit(trainer, total, [OnRank(_EpochReport(report)), *([saving] if saving else [])])
    result = msgspec.structs.replace(result, checkpoint_failure=saving.failure if saving else "")
    if config.backend == "cuda":
        gpus = transport_of(trainer)
        result = msgspec.structs.replace(result, gpus=gpus.gpus, gpu_path=gpus.path)
    return dict(codec.to_builtins(result)) if comm.rank == 0 else None


def _trainer(
    comm: MPI.Intracomm, task: TrainTask, dataset: Dataset, model: Model, report: Progress
) -> tuple[Trainer, int]:
    config, replica = task.config, model.replica()
    plan, schedule = config.plan, None
    if (warning := batch_norm_warning(replica.layers, plan)) is not None:
        report(f"warning: {warning}")
    if task.workload is not None:
        schedule = lower(task.workload, plan, alpha_s=task.alpha_s, beta_s_per_byte=task.beta_s_per_byte)
    total, rate = config.rates(len(dataset.train_y))
    network = Network.parse(config.network)
    enter(comm, network)
    trainer = Trainer(
        replica,
        dataset,
        plan,
        comm,
        network,
        seed=config.seed,
        schedule=schedule,
        rate=rate,
        stall_after_s=config.stall_after_s,
        selection=config.selection,
        backend=config.backend,
    )
    if config.backend == "cuda":
        report(trainer.computed_on)
    return trainer, total


def batch_norm_warning(layers: Sequence[LayerSpec], plan: Plan) -> str | None:
    """A warning if batch norm takes its statistics from too few samples, with a remedy; else None. Pure.

    ``plan.batch_norm`` decides whose samples these are: those of a micro-batch, a leaf or the global batch. Below
    16 the statistics are noisy: ResNet-50's top-1 error on ImageNet, with 32, 16, 8, 4 and 2 samples a device, is
    23.6, 23.7, 24.8, 27.3 and 34.7 % with batch norm, and 24.1, 24.2, 24.0, 24.2 and 24.1 % with group norm (Wu and
    He, arXiv:1803.08494, table 2).
    """
    count = sum(layer.batch_norm_channels > 0 for layer in layers)
    together = {"leaf": plan.leaves, "global": 1}.get(plan.batch_norm, plan.devices * plan.accumulate)
    local = plan.global_batch // together
    if not count or local >= LEAST_LOCAL_BATCH:
        return None
    least = LEAST_LOCAL_BATCH * together
    spread = f"{plan.global_batch} samples a step over {plan.devices} device{'s' * (plan.devices != 1)}"
    fewer = "fewer devices or micro-batches"
    if plan.batch_norm == "leaf":
        spread, fewer = f"{plan.global_batch} samples a step in {plan.leaves} leaves", "fewer leaves"
    elif plan.batch_norm == "local" and plan.accumulate > 1:
        spread += f" and {plan.accumulate} micro-batches"
    layers_take = "1 batch-norm layer takes its" if count == 1 else f"{count} batch-norm layers take their"
    return (
        f"{layers_take} statistics from {local} sample{'s' * (local != 1)} ({spread}): below {LEAST_LOCAL_BATCH} "
        "the test error rises (Wu and He 2018: ResNet-50 on ImageNet 23.7 % at 16 a device, 27.3 % at 4, 34.7 % at 2); "
        f"to do: --global-batch {least} or more, {fewer}, or a model with norm=group"
    )


def transport_of(trainer: Trainer) -> CudaTransport:
    """The transport of a trainer with backend cuda."""
    from dpsim.comm.cuda.transport import CudaTransport as Transport  # loads CUDA

    assert isinstance(trainer.transport, Transport)
    return trainer.transport


def _restore(trainer: Trainer, config: TrainConfig, model: Model, total: int, report: Progress) -> None:
    """Set the trainer to the state of the checkpoint to resume from, if there is one. Rank 0 reads it."""
    if config.resume is None:
        return
    checkpoint = None
    if trainer.comm.rank == 0:
        checkpoint = read(Path(config.resume))
        check_same_training(stored(checkpoint), config)
        if (warning := changed_model(checkpoint, model)) is not None:
            report(f"warning: {warning}")
    losses = restore(trainer, checkpoint, report)
    if len(losses) > total:
        raise ConfigError(
            f"the checkpoint is of step {len(losses)}, and the run would end at step {total}",
            allowed=f"{len(losses)} steps or more, counted from the beginning of training",
            remedy="raise --epochs or --steps",
        )
    trainer.log.resume_from(losses)


class _EpochReport(Callback):
    def __init__(self, report: Progress) -> None:
        self._report = report

    def on_epoch_end(self, trainer: Trainer, epoch: Epoch) -> None:
        done = f"{epoch.steps} of {epoch.total_steps} steps"
        self._report(f"epoch {epoch.number}: training loss {epoch.loss:.4f} ({done})")
