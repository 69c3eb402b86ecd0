"""Training by an asynchronous strategy on running ranks: the order of its updates, recorded and replayed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.data import Dataset
from dpsim.harness.train.updates import RecordedUpdates, read
from dpsim.progress import Progress
from dpsim.records.train import TrainConfig
from dpsim.runtime.asynchronous import training
from dpsim.study.models import Model


def train_asynchronously(
    comm: MPI.Intracomm, config: TrainConfig, dataset: Dataset, model: Model, report: Progress
) -> dict[str, Any] | None:
    """Train, or replay; the first rank that is alive at the end returns a ``TrainResult`` (plain values)."""
    replica, plan = model.replica(), config.plan
    total, rate = config.rates(len(dataset.train_y))
    if config.replay is not None:
        order = read(Path(config.replay)).order
        worker = training.Worker(replica, dataset, plan, len(order.orders), config.seed, comm)
        return dict(codec.to_builtins(training.replay(comm, worker, plan, order, rate)))
    worker = training.Worker(replica, dataset, plan, comm.size, config.seed, comm)
    trained = training.train(comm, worker, plan, total, rate)
    if trained is None:
        return None
    result, order = trained
    report(order.describe())
    if config.record is not None:
        codec.write(Path(config.record), RecordedUpdates(training=config, order=order))
    return dict(codec.to_builtins(result))
