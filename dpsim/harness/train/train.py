"""``train``: one training run on some devices, from the data set to a test accuracy."""

from __future__ import annotations

from pathlib import Path

import msgspec

from dpsim import codec
from dpsim.algorithms import ALGORITHMS
from dpsim.backend import Backend, check_backend
from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import FUSION_RULES
from dpsim.launch.jobs import JobFailed, on_ranks
from dpsim.launch.rank_info import job
from dpsim.learning_rate import RateSchedule
from dpsim.machine import Network, Selection, check_algorithm
from dpsim.nn.losses import check_label_smoothing
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import OVERLAPS, BatchNormMode, Plan
from dpsim.progress import Progress
from dpsim.records.sweep import TrainResult
from dpsim.rng import check_seed
from dpsim.runtime.stall import check_stall_after
from dpsim.wire_dtype import WireDtype
from dpsim.workload import Workload

_EPOCHS = 20
_GONE_WITHIN_S = 60.0


class TrainConfig(Noun, frozen=True):
    """What to train and how; ``steps`` or ``epochs`` say when it ends (``total_steps``).

    ``checkpoint`` is a folder: checkpoints go there every ``checkpoint_every`` steps (if given) and at the end.
    ``resume`` is a checkpoint to go on from (``dpsim.harness.train.resume.resumed`` makes such a configuration);
    ``epochs`` and ``steps`` count from the beginning of training all the same.

    ``overlap`` may be ``auto``. It, and fusion rule ``mg-wfbp``, need a profile and a calibration, which ``train``
    takes first and puts into ``workload``, ``link_alpha_s``, ``link_beta_s_per_byte`` and ``selection``.

    ``elastic``: when ranks are killed, training goes on by itself on the others.
    """

    model: str = "cnn"
    dataset: str = "digits"
    devices: int = 1
    layout: str = ""
    wire_dtype: WireDtype | None = None
    global_batch: int = 64
    epochs: int | None = None
    steps: int | None = None
    seed: int = 0
    network: str = "node"
    algorithm: str = "auto"
    fusion_rule: str = "tarantella"
    fusion_threshold_bytes: float | None = None
    overlap: str = "off"
    accumulate: int = 1
    optimizer: Optimizer = Sgd(weight_decay=1e-3)
    rate_schedule: RateSchedule = RateSchedule()
    workload: Workload | None = None
    link_alpha_s: float = 0.0
    link_beta_s_per_byte: float = 0.0
    stall_after_s: float = 60.0
    label_smoothing: float = 0.0
    checkpoint: str | None = None
    checkpoint_every: int | None = None
    resume: str | None = None
    selection: Selection | None = None
    backend: Backend = "cpu"
    leaves: int = 0
    batch_norm: BatchNormMode | None = None
    elastic: bool = False

    def __post_init__(self) -> None:
        check_seed(self.seed)
        if self.epochs is not None and self.epochs < 1:
            raise ConfigError(f"epochs is {self.epochs}", allowed="1 or more")
        if self.steps is not None and self.steps < 1:
            raise ConfigError(f"steps is {self.steps}", allowed="1 or more")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}",
                allowed="1 step or more",
                remedy="leave --checkpoint-every out for one checkpoint, at the end",
            )
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ConfigError(
                "checkpoints are wanted, and no folder for them",
                allowed="checkpoint_every with checkpoint",
                remedy="name a folder with --checkpoint",
            )
        if self.elastic and not (self.leaves and self.checkpoint is not None):
            missing = "leaves" if not self.leaves else "a folder for checkpoints"
            raise ConfigError(
                f"elastic training without {missing}: on fewer devices it could not go on as the same training",
                allowed="elastic with leaves and checkpoint",
                remedy="add --reproducible and --checkpoint, and --checkpoint-every to lose less",
            )
        if self.overlap not in ("auto", *OVERLAPS):
            raise unknown("overlap", self.overlap, ("auto", *OVERLAPS))
        check_stall_after(self.stall_after_s)
        check_label_smoothing(self.label_smoothing)
        self.plan()
        check_algorithm(self.algorithm, Network.parse(self.network))
        check_backend(self.backend, self.algorithm, Network.parse(self.network), self.leaves)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: ``steps``, or ``epochs``, or the earlier end of both; 20 epochs without either."""
        if self.steps is not None and self.epochs is None:
            return self.steps
        by_epochs = steps_per_epoch * (_EPOCHS if self.epochs is None else self.epochs)
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def plan(self) -> Plan:
        """The plan of this run, ``auto`` standing for ``off`` until it is decided. Raises ``ConfigError``."""
        overlap = "off" if self.overlap == "auto" else self.overlap
        return Plan(
            devices=self.devices,
            global_batch=self.global_batch,
            accumulate=self.accumulate,
            fusion_rule=self.fusion_rule,
            fusion_threshold_bytes=self.fusion_threshold_bytes,
            algorithm=self.algorithm,
            overlap=overlap,  # type: ignore[arg-type]
            optimizer=self.optimizer,
            layout=self.layout,
            wire_dtype=self.wire_dtype,
            leaves=self.leaves,
            batch_norm=self.batch_norm or Plan.default_batch_norm(self.leaves),
        )


def train(config: TrainConfig, progress: Progress) -> TrainResult:
    """Train on ``config.devices`` ranks.

    An elastic run whose ranks are killed goes on, on as many devices fewer, to the same result; one device that is
    killed ends it. A checkpoint that cannot be written is told of, and training goes on; see the result's
    ``checkpoint_failure``.

    Raises ``NotFiniteError``, ``ConfigError``, ``CommunicationError``; ``FileFormatError`` for a bad checkpoint.
    """
    if config.elastic and job() is not None:
        raise ConfigError(
            "elastic training on the ranks of a job: a killed rank ends such a job, and nobody would start another",
            allowed="elastic where dpsim starts the ranks itself",
            remedy="start it without mpiexec or srun, or leave --elastic out",
        )
    if config.checkpoint is not None and not same_folder(config):
        from dpsim.runtime.checkpoint import check_unused

        check_unused(Path(config.checkpoint))
    config = _decided(config, progress)
    while True:
        try:
            found = on_ranks(
                "dpsim.harness.train.on_ranks:train_on_ranks",
                dict(codec.to_builtins(config)),
                devices=config.devices,
                progress=progress,
                pin=True,
                watch=config.elastic,
            )
        except JobFailed as failed:
            if not (config.elastic and failed.lost) or config.devices == 1:
                raise
            config = _survivors(config, failed, progress)
        else:
            return codec.decode(found, TrainResult, "training result")


def _survivors(config: TrainConfig, failed: JobFailed, progress: Progress) -> TrainConfig:
    """The configuration to go on with after a kill, once the killed run has let go of its folder."""
    from dpsim.harness.train.resume import survivors
    from dpsim.runtime.checkpoint import wait_until_free

    wait_until_free(Path(str(config.checkpoint)), _GONE_WITHIN_S)
    left, step = survivors(config, failed.lost)
    where = f"from step {step}" if step else "from the beginning"
    progress(f"warning: {failed.given}; going on {where} on {left.devices} device{'s' * (left.devices != 1)}")
    return left


def same_folder(config: TrainConfig) -> bool:
    """Whether checkpoints go where the one is that the run goes on from."""
    if config.checkpoint is None or config.resume is None:
        return False
    return Path(config.checkpoint).resolve() == Path(config.resume).resolve().parent


def _decided(config: TrainConfig, progress: Progress) -> TrainConfig:
    """The configuration with what only a measurement can tell: the best overlap, and MG-WFBP's ready times."""
    if config.overlap != "auto" and not FUSION_RULES.find(config.fusion_rule).needs_costs:
        return config
    if config.devices == 1:
        return msgspec.structs.replace(config, overlap=config.plan().overlap)
    from dpsim.harness.sweep.prepare import Preparation, prepare
    from dpsim.predict import alpha_beta, choose_overlap

    plain = ALGORITHMS.find(config.algorithm).sixteen_bits  # others send 16 bits with leaves, and are measured without
    workload, machines = prepare(
        Preparation(
            model=config.model,
            dataset=config.dataset,
            optimizer=config.optimizer,
            seed=config.seed,
            global_batch=config.global_batch // config.accumulate,
            devices=(config.layout or config.devices,),
            networks=((config.network, config.algorithm),),
            overlaps=("poll", "thread"),
            wire_dtype=config.wire_dtype if plain else None,
        ),
        progress,
    )
    machine, overlap = machines[config.network], config.overlap
    if overlap == "auto":
        overlap, steps = choose_overlap(workload, machine, [config.plan()])
        told = ", ".join(f"{name} {step_s * 1e3:.2f} ms" for name, step_s in steps.items())
        progress(f"overlap {overlap}, from the predicted steps: {told}")
    alpha_s, beta = alpha_beta(
        machine, config.algorithm, config.devices, config.plan().priced_wire_dtype, config.layout
    )
    return msgspec.structs.replace(
        config,
        overlap=overlap,
        workload=workload,
        link_alpha_s=alpha_s,
        link_beta_s_per_byte=beta,
        selection=machine.selected(config.devices),
    )
