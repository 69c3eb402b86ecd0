"""``train``: one training run on some devices, from the data set to a test accuracy."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.launch import on_ranks
from dpsim.errors import ConfigError
from dpsim.machine import Network
from dpsim.plan import Plan, Sgd
from dpsim.workload import Workload

Progress = Callable[[str], None]


class TrainConfig(Noun):
    """What to train and how; ``steps`` (if given) ends training before ``epochs`` do.

    ``workload`` (a profile of the model) is needed by fusion rule ``mg-wfbp`` alone, with ``link_alpha_s`` and
    ``link_beta_s_per_byte`` of an allreduce.
    """

    model: str = "cnn"
    dataset: str = "digits"
    devices: int = 1
    global_batch: int = 64
    epochs: int = 12
    steps: int | None = None
    seed: int = 0
    network: str = "node"
    algorithm: str = "mpi"
    fusion_rule: str = "tarantella"
    fusion_threshold_bytes: float | None = None
    overlap: str = "off"
    accumulate: int = 1
    optimizer: Sgd = Sgd()
    workload: Workload | None = None
    link_alpha_s: float = 0.0
    link_beta_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}", allowed="1 or more")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more")
        self.plan()
        if self.algorithm == "mpi" and Network.parse(self.network).emulated:
            raise ConfigError(
                f"algorithm 'mpi' cannot run on {self.network}: MPI's own allreduce hides its messages from the link",
                allowed="ring, recursive-doubling, halving-doubling, direct",
                remedy="choose one of them with --algorithm, or use --network node",
            )

    def plan(self) -> Plan:
        """The plan of this run. Raises ``ConfigError``."""
        return Plan(
            devices=self.devices, global_batch=self.global_batch, accumulate=self.accumulate,
            fusion_rule=self.fusion_rule, fusion_threshold_bytes=self.fusion_threshold_bytes,  # type: ignore[arg-type]
            algorithm=self.algorithm, overlap=self.overlap, optimizer=self.optimizer,  # type: ignore[arg-type]
        )  # fmt: skip


class TrainResult(Noun):
    """What a training run came to. ``losses`` are mean training losses, one a step; times are medians."""

    devices: int
    steps: int
    test_accuracy: float
    final_loss: float
    images_per_s: float
    step_s: float
    exposed_communication_s: float
    digest: str
    losses: tuple[float, ...]


def train(config: TrainConfig, progress: Progress) -> TrainResult:
    """Train on ``config.devices`` ranks. Raises ``NotFiniteError``, ``ConfigError``, ``CommunicationError``."""
    found = on_ranks(
        "dpsim.harness.train:train_on_ranks",
        dict(codec.to_builtins(config)),
        devices=config.devices, progress=progress, pin=True,
    )  # fmt: skip
    return codec.decode(found, TrainResult, "training result")


def train_on_ranks(comm: Any, argument: dict[str, Any], report: Progress) -> dict[str, Any] | None:
    """One ``TrainConfig`` on running ranks; rank 0 returns a ``TrainResult`` (plain values)."""
    from dpsim.data import load_dataset
    from dpsim.lower import lower
    from dpsim.nn import build_model
    from dpsim.runtime.recorder import exposed_s
    from dpsim.runtime.trainer import Trainer

    config = codec.decode(argument, TrainConfig, "training")
    dataset = load_dataset(config.dataset, config.seed)
    replica = build_model(config.model, dataset.input_shape, dataset.classes)
    plan, schedule = config.plan(), None
    if config.workload is not None:
        schedule = lower(
            config.workload, plan, alpha_s=config.link_alpha_s, beta_s_per_byte=config.link_beta_s_per_byte
        )
    trainer = Trainer(
        replica, dataset, plan, comm, Network.parse(config.network), seed=config.seed, schedule=schedule
    )
    total = trainer.steps_per_epoch * config.epochs
    if config.steps is not None:
        total = min(total, config.steps)
    losses: list[float] = []
    samples: list[int] = []
    ends: list[float] = []
    waits: list[float] = []
    for step in range(total):
        x, labels, size = trainer.next_share()
        outcome = trainer.runner.run(x, labels, size)
        losses.append(outcome.sums.loss)
        samples.append(size)
        ends.append(outcome.marks.end_s)
        waits.append(exposed_s(outcome.marks))
        if (step + 1) % trainer.steps_per_epoch == 0 or step + 1 == total:
            since = step - step % trainer.steps_per_epoch
            part = comm.reduce(sum(losses[since:]))
            if comm.rank == 0:
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
    step_s = statistics.median(b - a for a, b in zip(slowest, slowest[1:], strict=False)) if total > 1 else 0.0
    result = TrainResult(
        devices=config.devices, steps=total, test_accuracy=test.correct / test.samples,
        final_loss=whole[-1] / samples[-1], step_s=step_s,
        images_per_s=config.global_batch / step_s if step_s else 0.0,
        exposed_communication_s=statistics.median(exposed), digest=digest,
        losses=tuple(loss / size for loss, size in zip(whole, samples, strict=True)),
    )  # fmt: skip
    return dict(codec.to_builtins(result))
