"""Trains on running ranks, and gathers what came of it."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

from dpsim import codec
from dpsim.data import load_dataset
from dpsim.harness.train import TrainConfig, TrainResult
from dpsim.learning_rate import learning_rate
from dpsim.lower import lower
from dpsim.machine import Network
from dpsim.nn import build_model
from dpsim.runtime.recorder import exposed_s
from dpsim.runtime.trainer import Trainer

Progress = Callable[[str], None]


def train_on_ranks(comm: MPI.Intracomm, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """One ``TrainConfig`` on running ranks; rank 0 returns a ``TrainResult`` (plain values)."""
    config = codec.decode(argument, TrainConfig, "training")
    dataset = load_dataset(config.dataset, config.seed)
    replica = build_model(config.model, dataset.input_shape, dataset.classes)
    plan, schedule = config.plan(), None
    if config.workload is not None:
        schedule = lower(
            config.workload, plan, alpha_s=config.link_alpha_s, beta_s_per_byte=config.link_beta_s_per_byte
        )
    steps_per_epoch = -(-len(dataset.train_y) // plan.global_batch)
    total = steps_per_epoch * config.epochs
    if config.steps is not None:
        total = min(total, config.steps)

    def rate(step: int) -> float:
        return learning_rate(
            config.rate_schedule, plan.optimizer.learning_rate, step,
            global_batch=plan.global_batch, steps_per_epoch=steps_per_epoch, total_steps=total,
        )  # fmt: skip

    trainer = Trainer(
        replica, dataset, plan, comm, Network.parse(config.network), seed=config.seed, schedule=schedule, rate=rate
    )
    losses: list[float] = []
    samples: list[int] = []
    ends: list[float] = []
    waits: list[float] = []
    for step in range(total):
        outcome = trainer.step()
        losses.append(outcome.sums.loss)
        samples.append(outcome.global_samples)
        ends.append(outcome.marks.end_s)
        waits.append(exposed_s(outcome.marks))
        if (step + 1) % trainer.steps_per_epoch == 0 or step + 1 == total:
            since = step - step % trainer.steps_per_epoch
            part = comm.reduce(sum(losses[since:]))
            if part is not None:
                epoch = step // trainer.steps_per_epoch + 1
                report(f"epoch {epoch}: training loss {part / sum(samples[since:]):.4f} ({step + 1} of {total} steps)")
    test = trainer.evaluate()
    whole = [sum(column) for column in zip(*comm.allgather(losses), strict=True)]
    slowest = [max(column) for column in zip(*comm.allgather(ends), strict=True)]
    exposed = [min(column) for column in zip(*comm.allgather(waits), strict=True)]
    digest = trainer.digest()
    trainer.close()
    if comm.rank:
        return None
    full = max(samples[1:], default=0)  # the last batch of an epoch may be short; the first step has no step before it
    times = [b - a for (a, b), size in zip(itertools.pairwise(slowest), samples[1:], strict=True) if size == full]
    step_s = statistics.median(times) if times else 0.0
    result = TrainResult(
        devices=config.devices, steps=total, test_accuracy=test.correct / test.samples,
        final_loss=whole[-1] / samples[-1], step_s=step_s,
        images_per_s=full / step_s if step_s else 0.0,
        exposed_communication_s=statistics.median(exposed), digest=digest,
        losses=tuple(loss / size for loss, size in zip(whole, samples, strict=True)),
    )  # fmt: skip
    return dict(codec.to_builtins(result))
