"""``TrainConfig``: a training as ``dpsim train`` runs it. ``TrainRecord``: the file of its result (``--output``)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import msgspec

from dpsim import codec
from dpsim.algorithms import Backend
from dpsim.codec import Noun
from dpsim.columns import Column
from dpsim.constraints import check, check_backend
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides, fields
from dpsim.learning_rate import RateSchedule, learning_rate
from dpsim.machine import NODE, Network, Selection
from dpsim.optimizer import Sgd
from dpsim.plan import OVERLAPS, Plan
from dpsim.records.checks import check_label_smoothing, check_stall_after, check_steps
from dpsim.setting import DataSet, Seed, Setting, plan_of

SCHEMA = "dpsim.output/1"
_EPOCHS = 20
_AUTO = "auto"
_DEFAULTS = {"devices": 1, "global_batch": 64, "algorithm": _AUTO, "optimizer": Sgd(weight_decay=1e-3)}
_ASYNCHRONOUS = ("record", "replay", "checkpoint", "resume")
_PLAN = frozenset(Plan.__struct_fields__)


class TrainConfig(Noun, frozen=True):
    """What to train and how; ``steps`` or ``epochs`` define its end (``total_steps``).

    ``model`` is a token of ``dpsim.study.models.load``. ``checkpoint`` is a folder, into which checkpoints are
    written every ``checkpoint_every`` steps (if given) and at the end. ``resume`` is the checkpoint file to resume (see
    ``dpsim.harness.train.resume.resumed``); ``epochs`` and ``steps`` count from the beginning of training even then.

    With ``chooses_overlap``, and with the fusion rule ``mg-wfbp``, ``train`` profiles and calibrates first.
    ``selection`` is what algorithm ``auto`` uses for each size; ``None``: measured, if needed.

    ``elastic``: when ranks are killed, training continues on the others. ``record`` is a file for the order of updates
    of an asynchronous strategy, and ``replay`` such a file, whose updates are made again in that order.
    """

    plan: Annotated[Plan, Decides.NOTHING]
    model: str = "cnn"
    network: str = NODE
    dataset: DataSet = "digits"
    seed: Seed = 0
    epochs: Annotated[
        int | None, Decides.NOTHING, "Passes over the training samples (20, unless --steps is given)."
    ] = None
    steps: Annotated[int | None, Decides.NOTHING, "Steps to train, instead of epochs."] = None
    rate_schedule: Annotated[RateSchedule, Decides.BITS] = RateSchedule()
    stall_after_s: Annotated[float, Decides.NOTHING] = 60.0
    label_smoothing: Annotated[
        float,
        Decides.BITS,
        "Share of each target that is spread evenly over all classes, like 0.1 (0).",
        Column("ratio", "The share of each target that is spread over all classes."),
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
    elastic: Annotated[
        bool,
        Decides.NOTHING,
        "When ranks are killed, resume from the last checkpoint on the remaining ones.",
    ] = False
    chooses_overlap: Annotated[bool, Decides.NOTHING] = False
    record: Annotated[
        str | None, Decides.NOTHING, "Write the order of an asynchronous strategy's updates to this file."
    ] = None
    replay: Annotated[
        str | None,
        Decides.NOTHING,
        "Make the updates of such a file again, in its order and to the same bits; --devices may differ.",
    ] = None

    def __post_init__(self) -> None:
        from dpsim.rng import check_seed  # loads NumPy, which help pages need not

        check_seed(self.seed)
        for name in ("epochs", "steps"):
            if getattr(self, name) is not None:
                check_steps(getattr(self, name), name)
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
        if self.elastic and not (self.plan.leaves and self.checkpoint is not None):
            missing = "leaves" if not self.plan.leaves else "a folder for checkpoints"
            raise ConfigError(
                f"elastic training without {missing}: it could not continue as the same training on fewer devices",
                allowed="elastic with leaves and checkpoint",
                remedy="add --reproducible and --checkpoint, and --checkpoint-every to lose less",
            )
        check_stall_after(self.stall_after_s)
        check_label_smoothing(self.label_smoothing)
        network = Network.parse(self.network)
        if self.backend == "cpu":
            check("network", algorithm=self.plan.algorithm, network=network, strategy=self.plan.strategy)
        check("record", strategy=self.plan.strategy, **{name: getattr(self, name) for name in _ASYNCHRONOUS})
        check_backend(self.backend, self.plan, network)

    @classmethod
    def of(cls, **values: Any) -> Self:
        """Return the configuration with these fields, the plan's among them; others have their defaults.

        Overlap ``auto`` is chosen from a prediction. The algorithm of ``None`` is the network's own, the batch norm
        that of the leaves. Raises ``ConfigError``.
        """
        row = _DEFAULTS | {name: values.pop(name) for name in _PLAN & values.keys()}
        overlap = row.get("overlap", "off")
        if overlap not in (_AUTO, *OVERLAPS):
            raise unknown("overlap", overlap, (_AUTO, *OVERLAPS))
        if overlap == _AUTO:
            row["overlap"] = "off"
        plan = plan_of(row, Network.parse(values.get("network", NODE)).default_algorithm)
        return cls(plan=plan, **{"chooses_overlap": overlap == _AUTO} | values)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields and those of the plan under their own names: the arguments of ``of``."""
        values = msgspec.structs.asdict(self)
        values |= msgspec.structs.asdict(values.pop("plan"))
        return values | ({"overlap": _AUTO} if values.pop("chooses_overlap") else {})

    def changed(self, **changes: Any) -> Self:
        """Return the configuration with other values of some fields, the plan's among them. Raises ``ConfigError``."""
        return self.of(**self.fields | changes)

    def total_steps(self, steps_per_epoch: int) -> int:
        """Steps of the whole run: by ``steps`` or ``epochs``, whichever ends first; 20 epochs without either."""
        if self.steps is not None and self.epochs is None:
            return self.steps
        by_epochs = steps_per_epoch * (_EPOCHS if self.epochs is None else self.epochs)
        return by_epochs if self.steps is None else min(by_epochs, self.steps)

    def rates(self, samples: int) -> tuple[int, Callable[[int], float]]:
        """Return the number of steps on so many training samples, and the learning rate of each, counted from 0."""
        steps_per_epoch = -(-samples // self.plan.global_batch)
        total_steps = self.total_steps(steps_per_epoch)
        lasting = {"steps_per_epoch": steps_per_epoch, "total_steps": total_steps}

        def rate(step: int) -> float:
            base, batch = self.plan.optimizer.learning_rate, self.plan.global_batch
            return learning_rate(self.rate_schedule, base, step, global_batch=batch, **lasting)

        return total_steps, rate

    @property
    def resumes_in_place(self) -> bool:
        """Whether new checkpoints are written to the folder that the run is resumed from."""
        if self.checkpoint is None or self.resume is None:
            return False
        return Path(self.checkpoint).resolve() == Path(self.resume).resolve().parent


def deciding_fields(what: Decides) -> tuple[str, ...]:
    """Return the names of the fields of a training, its plan's among them, that decide any of ``what``."""
    declared = fields(TrainConfig, Setting) | fields(Plan)
    return tuple(name for name, field in declared.items() if field.decides & what)


RECORDED = tuple(name for name in deciding_fields(~Decides.NOTHING) if name not in ("devices", "selection", "backend"))
"""The fields by which a saved result identifies its training; ``devices`` and what ran it are part of the result."""


class TrainResult(Noun, frozen=True, kw_only=True):
    """The result of a training run. ``losses`` are mean training losses, one per step; times are medians.

    ``step_s`` is taken over the steps with a whole batch except the first, each from the last rank's begin to the
    slowest rank's end; ``images_per_s`` is the batch over it. A resumed run has the losses of the ``first_step`` steps
    before it, but not their times. ``test_loss`` is ``None`` in records of earlier versions.
    """

    devices: int
    steps: Annotated[int, Column("count", "The steps that were trained, those before a resumed run included.")]
    test_accuracy: Annotated[
        float, Column("ratio", "The share of the test samples that are classified correctly at the end.")
    ]
    test_loss: Annotated[
        float | None,
        Column("ratio", "The mean cross-entropy of the test samples at the end, in nats; NaN: unknown."),
    ] = None
    final_loss: Annotated[float, Column("ratio", "The training loss of the last step.")]
    images_per_s: Annotated[float, Column("1/s", "The samples of a step over step_s, so samples per second.")]
    step_s: Annotated[
        float,
        Column("s", "The median time of a step with a whole batch, on the slowest rank; 0 where there is none."),
    ]
    exposed_communication_s: Annotated[
        float, Column("s", "Its communication that was not hidden by computation: the median.")
    ]
    digest: Annotated[str, Column("text", "The SHA-256 of the trained state.")]
    losses: tuple[float, ...]
    first_step: Annotated[
        int, Column("count", "The steps that a resumed run took over; 0 for a run from the beginning.")
    ] = 0
    checkpoint_failure: Annotated[
        str, Column("text", "Why the last checkpoint could not be written; empty if it was.")
    ] = ""
    optimizer_state_bytes: Annotated[
        int,
        Column("bytes", "The memory of optimizer state on the device with the most; 0: unknown.", dtype="int64"),
    ] = 0
    mean_staleness: Annotated[
        float,
        Column(
            "ratio",
            "Asynchronous: how often parameters had changed since the pull when a gradient was added; the mean.",
        ),
    ] = 0.0
    consensus_distance: Annotated[
        float,
        Column(
            "ratio",
            "Where workers have parameters of their own: how far apart those are that an update averages, as a root"
            " mean square over the norm; the mean over all updates.",
        ),
    ] = 0.0
    gpus: Annotated[int, Column("count", "The GPUs that took part, which several ranks may share; 0 on the CPU.")] = 0
    gpu_path: Annotated[
        str,
        Column(
            "name",
            "How gradients got from GPU to GPU: by kernels in `peer memory`, by `nccl`, or through the `host` by MPI.",
        ),
    ] = ""
    computed_on: Annotated[str, Column("text", "With backend cuda: where gradients were computed and reduced.")] = ""
    libraries: Annotated[
        str, Column("text", "With backend cuda: versions and settings that decide the digest's bits.")
    ] = ""

    def __post_init__(self) -> None:
        if not 0 <= self.test_accuracy <= 1:
            raise ConfigError(f"test_accuracy is {self.test_accuracy}", allowed="a share of the samples, from 0 to 1")


class TrainRecord(TrainResult, frozen=True, kw_only=True):
    """The training, by every field that decides its bits or its times (``RECORDED``), and its result.

    Files of earlier versions lack some: optimizer, rate schedule and batch norm are then ``None``, others the defaults.
    """

    training: dict[str, Any]
    command: Literal["train"]
    schema: str = SCHEMA

    @property
    def point(self) -> dict[str, Any]:
        """The training and its result under the names of the file, without the losses."""
        values = codec.to_builtins(self)
        result = {name: values[name] for name in TrainResult.__struct_fields__ if name != "losses"}
        return dict(values["training"]) | result


def recorded(config: TrainConfig, result: TrainResult) -> dict[str, Any]:
    """Return the content of the file of a training's result."""
    training = {name: value for name, value in config.fields.items() if name in RECORDED}
    return {"schema": SCHEMA, "command": "train", **codec.to_builtins(training), **codec.to_builtins(result)}


def read(path: Path) -> TrainRecord:
    """Read the result of a training. Raises ``FileFormatError``."""
    earlier = TrainConfig.of().fields | dict.fromkeys(("optimizer", "rate_schedule", "batch_norm"))

    def with_training(raw: dict[str, Any]) -> dict[str, Any]:
        rest = {name: value for name, value in raw.items() if name not in RECORDED}
        return rest | {"training": {name: raw.get(name, earlier[name]) for name in RECORDED}}

    return codec.read(path, TrainRecord, "training result", SCHEMA, convert=with_training)
