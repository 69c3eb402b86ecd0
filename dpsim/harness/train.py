"""``train``: one training run on some devices, from the data set to a test accuracy."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.comm.launch import on_ranks
from dpsim.errors import ConfigError, unknown
from dpsim.machine import Network, check_algorithm
from dpsim.plan import OVERLAPS, Plan, Sgd
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

Progress = Callable[[str], None]


class TrainConfig(Noun, frozen=True):
    """What to train and how; ``steps`` (if given) ends training before ``epochs`` do.

    ``overlap`` may be ``auto``. It, and fusion rule ``mg-wfbp``, need a profile and a calibration, which ``train``
    takes first and puts into ``workload``, ``link_alpha_s`` and ``link_beta_s_per_byte``.
    """

    model: str = "cnn"
    dataset: str = "digits"
    devices: int = 1
    layout: str = ""
    wire_dtype: WireDtype | None = None
    global_batch: int = 64
    epochs: int = 20
    steps: int | None = None
    seed: int = 0
    network: str = "node"
    algorithm: str = "mpi"
    fusion_rule: str = "tarantella"
    fusion_threshold_bytes: float | None = None
    overlap: str = "off"
    accumulate: int = 1
    optimizer: Sgd = Sgd(weight_decay=1e-3)
    workload: Workload | None = None
    link_alpha_s: float = 0.0
    link_beta_s_per_byte: float = 0.0

    def __post_init__(self) -> None:
        if self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}", allowed="1 or more")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more")
        if self.overlap not in ("auto", *OVERLAPS):
            raise unknown("overlap", self.overlap, ("auto", *OVERLAPS))
        self.plan()
        check_algorithm(self.algorithm, Network.parse(self.network))

    def plan(self) -> Plan:
        """The plan of this run, ``auto`` standing for ``off`` until it is decided. Raises ``ConfigError``."""
        overlap = "off" if self.overlap == "auto" else self.overlap
        return Plan(
            devices=self.devices, global_batch=self.global_batch, accumulate=self.accumulate,
            fusion_rule=self.fusion_rule, fusion_threshold_bytes=self.fusion_threshold_bytes,  # type: ignore[arg-type]
            algorithm=self.algorithm, overlap=overlap, optimizer=self.optimizer,  # type: ignore[arg-type]
            layout=self.layout, wire_dtype=self.wire_dtype,
        )  # fmt: skip


class TrainResult(Noun, frozen=True):
    """What a training run came to. ``losses`` are mean training losses, one a step; times are medians.

    ``step_s`` is of the steps with a whole batch, each from the slowest rank's end of the step before it to its own
    (0 where there is only one step), and ``images_per_s`` is such a batch over it.
    """

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
    config = _decided(config, progress)
    found = on_ranks(
        "dpsim.harness.ranks.train:train_on_ranks",
        dict(codec.to_builtins(config)),
        devices=config.devices, progress=progress, pin=True,
    )  # fmt: skip
    return codec.decode(found, TrainResult, "training result")


def _decided(config: TrainConfig, progress: Progress) -> TrainConfig:
    """The configuration with what only a measurement can tell: the best overlap, and MG-WFBP's ready times."""
    if config.overlap != "auto" and config.fusion_rule != "mg-wfbp":
        return config
    if config.devices == 1:
        return msgspec.structs.replace(config, overlap=config.plan().overlap)
    from dpsim.harness.prepare import Preparation, prepare
    from dpsim.predict import alpha_beta, choose_overlap

    workload, machines = prepare(
        Preparation(
            model=config.model, dataset=config.dataset, optimizer=config.optimizer, seed=config.seed,
            global_batch=config.global_batch // config.accumulate, devices=(config.layout or config.devices,),
            networks=((config.network, config.algorithm),), overlaps=("poll", "thread"), wire_dtype=config.wire_dtype,
        ),
        progress,
    )  # fmt: skip
    machine, overlap = machines[config.network], config.overlap
    if overlap == "auto":
        overlap, steps = choose_overlap(workload, machine, config.plan())
        told = ", ".join(f"{name} {step_s * 1e3:.2f} ms" for name, step_s in steps.items())
        progress(f"overlap {overlap}, from the predicted steps: {told}")
    alpha_s, beta = alpha_beta(
        machine, config.algorithm, config.devices, config.plan().priced_wire_dtype, config.layout
    )
    return msgspec.structs.replace(
        config, overlap=overlap, workload=workload, link_alpha_s=alpha_s, link_beta_s_per_byte=beta
    )
