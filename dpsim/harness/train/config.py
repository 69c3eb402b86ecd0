"""What a training run is configured with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal, get_args

from dpsim.algorithms import Backend
from dpsim.codec import Noun
from dpsim.constraints import check, check_backend
from dpsim.dtypes import ComputeDtype, WireDtype
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides, declared, shared
from dpsim.learning_rate import RateSchedule
from dpsim.machine import Network, Selection
from dpsim.optimizer import Optimizer, Sgd
from dpsim.plan import BatchNormMode, Overlap, Plan, Strategy
from dpsim.runtime.stall import check_stall_after
from dpsim.setting import DataSet, Seed, Setting

_EPOCHS = 20
OverlapChoice = Literal["auto", Overlap]


class TrainConfig(Noun, frozen=True):
    """What to train and how; ``steps`` or ``epochs`` define its end (``total_steps``).

    ``model`` is a token of ``dpsim.harness.models.load``. ``checkpoint`` is a folder, into which checkpoints are
    written every ``checkpoint_every`` steps (if given) and at the end. ``resume`` is the checkpoint file to resume (see
    ``dpsim.harness.train.resume.resumed``); ``epochs`` and ``steps`` count from the beginning of training even then.

    ``overlap`` ``auto`` and the fusion rule ``mg-wfbp`` make ``train`` profile and calibrate first. ``selection`` is
    what algorithm ``auto`` uses for each size; ``None``: measured, if needed.

    ``elastic``: when ranks are killed, training continues on the others.
    """

    model: str = "cnn"
    dataset: DataSet = "digits"
    devices: int = 1
    layout: str = ""
    wire_dtype: WireDtype | None = None
    global_batch: int = 64
    epochs: Annotated[
        int | None, Decides.NOTHING, "Passes over the training samples (20, unless --steps is given)."
    ] = None
    steps: Annotated[int | None, Decides.NOTHING, "Steps to train, instead of epochs."] = None
    seed: Seed = 0
    network: str = "node"
    algorithm: str = "auto"
    fusion_rule: str = "tarantella"
    fusion_threshold_bytes: float | None = None
    overlap: OverlapChoice = "off"
    accumulate: int = 1
    optimizer: Optimizer = Sgd(weight_decay=1e-3)
    rate_schedule: Annotated[RateSchedule, Decides.BITS] = RateSchedule()
    stall_after_s: Annotated[float, Decides.NOTHING] = 60.0
    label_smoothing: Annotated[
        float, Decides.BITS, "Share of each target that is spread evenly over all classes, like 0.1 (0)."
    ] = 0.0
    checkpoint: Annotated[str | None, Decides.NOTHING] = None
    checkpoint_every: Annotated[int | None, Decides.NOTHING, "Steps between two checkpoints."] = None
    resume: Annotated[str | None, Decides.NOTHING] = None
    selection: Annotated[Selection | None, Decides.ORDER] = None
    backend: Annotated[
        Backend,
        Decides.ORDER,
        "Where training runs: cpu, or cuda (the ranks' GPUs; LARS and models of your own compute on the CPU). cuda"
        " also takes --algorithm nccl.",
    ] = "cpu"
    leaves: int = 0
    batch_norm: BatchNormMode | None = None
    strategy: Strategy = "data-parallel"
    elastic: Annotated[
        bool,
        Decides.NOTHING,
        "When ranks are killed, resume from the last checkpoint on the remaining ones.",
    ] = False
    compute_dtype: ComputeDtype = "float32"
    cycle_s: float = 1e-3

    def __post_init__(self) -> None:
        from dpsim.nn.losses import check_label_smoothing  # loads NumPy, which help pages need not
        from dpsim.rng import check_seed

        check_seed(self.seed)
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ConfigError(f"{name} is {getattr(self, name)}", allowed="1 or more")
        if self.checkpoint_every is not None and self.checkpoint_every < 1:
            raise ConfigError(
                f"checkpoint_every is {self.checkpoint_every}",
                allowed="1 step or more",
                remedy="leave --checkpoint-every out for one checkpoint, at the end",
            )
        if self.checkpoint_every is not None and self.checkpoint is None:
            raise ConfigError(
                "checkpoint_every without a folder for the checkpoints",
                allowed="checkpoint_every with checkpoint",
                remedy="name a folder with --checkpoint",
            )
        if self.elastic and not (self.leaves and self.checkpoint is not None):
            missing = "leaves" if not self.leaves else "a folder for checkpoints"
            raise ConfigError(
                f"elastic training without {missing}: it could not continue as the same training on fewer devices",
                allowed="elastic with leaves and checkpoint",
                remedy="add --reproducible and --checkpoint, and --checkpoint-every to lose less",
            )
        if self.overlap not in get_args(OverlapChoice):
            raise unknown("overlap", self.overlap, get_args(OverlapChoice))
        check_stall_after(self.stall_after_s)
        check_label_smoothing(self.label_smoothing)
        plan, network = self.plan(), Network.parse(self.network)
        if self.backend == "cpu":
            check("network", algorithm=self.algorithm, network=network)
        check_backend(self.backend, plan, network)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: by ``steps`` or ``epochs``, whichever ends first; 20 epochs without either."""
        if self.steps is not None and self.epochs is None:
            return self.steps
        by_epochs = steps_per_epoch * (_EPOCHS if self.epochs is None else self.epochs)
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def plan(self) -> Plan:
        """The plan of this run, with overlap ``off`` in place of ``auto``. Raises ``ConfigError``."""
        overlap = "off" if self.overlap == "auto" else self.overlap
        batch_norm = self.batch_norm or Plan.default_batch_norm(self.leaves)
        return Plan(**(shared(self, Plan) | {"overlap": overlap, "batch_norm": batch_norm}))

    @property
    def resumes_in_place(self) -> bool:
        """Whether new checkpoints are written to the folder that the run is resumed from."""
        if self.checkpoint is None or self.resume is None:
            return False
        return Path(self.checkpoint).resolve() == Path(self.resume).resolve().parent


declared(TrainConfig, Plan, Setting)
