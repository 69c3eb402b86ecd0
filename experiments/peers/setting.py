"""A comparison: what is trained, by which systems, which settings of each are tried; and what a system comes to."""

from __future__ import annotations

import math
from typing import Any, Literal

import msgspec

from dpsim.codec import Noun
from dpsim.errors import ConfigError, unknown
from dpsim.optimizer import Sgd
from dpsim.plan import Plan
from dpsim.units import format_size

OWN = "dpsim"
ONE_RANK = "torch"
SYSTEMS = (OWN, "ddp-gloo", "ddp-mpi", ONE_RANK)
"""``ddp-gloo``: DistributedDataParallel over gloo; ``ddp-mpi``: its buckets reduced by MPI; ``torch``: one rank."""

_STEPS_PER_EPOCH = 16

CLASSES = 10
_SHAPES = {"mlp": (28, 28, 1), "resnet20": (32, 32, 3)}
_FORMS = "mlp (784-2048-2048-2048-10), with other widths mlp:512,256, or resnet20"
_MLP = "mlp:2048,2048,2048"


class Work(Noun, frozen=True):
    """The training that every system does: model, ranks, samples a rank, optimizer. The same batches everywhere."""

    model: str
    devices: int
    local_batch: int = 64
    optimizer: Sgd = Sgd(learning_rate=0.001, momentum=0.9, weight_decay=1e-3)
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _SHAPES or (":" in self.model and self.kind != "mlp"):
            raise unknown("model", self.model, _SHAPES, remedy=f"write {_FORMS}")
        for name, value in (("devices", self.devices), ("local batch", self.local_batch)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", allowed="1 or more")

    @property
    def kind(self) -> str:
        return self.model.partition(":")[0]

    @property
    def token(self) -> str:
        """The model as dpsim's ``build_model`` takes it."""
        return _MLP if self.model == "mlp" else self.model

    @property
    def shape(self) -> tuple[int, int, int]:
        """Height, width and channels of a sample."""
        return _SHAPES[self.kind]

    @property
    def global_batch(self) -> int:
        return self.devices * self.local_batch

    @property
    def dataset(self) -> str:
        """Synthetic samples, a whole number of global batches of them: no step has a short batch."""
        shape = "x".join(str(side) for side in self.shape)
        return f"synthetic:{shape},classes={CLASSES},train={_STEPS_PER_EPOCH * self.global_batch},test=10"

    def alone(self) -> Work:
        return msgspec.structs.replace(self, devices=1)


class OwnSetting(Noun, frozen=True, tag="dpsim"):
    """How dpsim runs, with the fields of ``Plan``. Its ranks are pinned to cores, as ``dpsim train`` pins them."""

    fusion_threshold_bytes: float = 2.0**20
    overlap: Literal["off", "inline", "poll", "thread"] = "off"
    algorithm: Literal["auto", "mpi"] = "auto"

    @property
    def pin(self) -> bool:
        return True

    @property
    def environment(self) -> dict[str, str]:
        return {}

    def plan(self, work: Work) -> Plan:
        return Plan(
            devices=work.devices,
            global_batch=work.global_batch,
            optimizer=work.optimizer,
            overlap=self.overlap,
            fusion_threshold_bytes=self.fusion_threshold_bytes,
            algorithm=self.algorithm,
        )


class TorchSetting(Noun, frozen=True, tag="torch"):
    """How PyTorch runs. The defaults are its own; ``bucket_cap_mb`` and ``bucket_view`` are DDP's arguments.

    ``allreduce`` is ``none`` on a single rank without DDP, ``gloo``, or by MPI from a communication hook: ``hook``
    blocks in it, ``started`` starts an Iallreduce in it and waits after backward, ``after`` reduces each bucket after
    backward. The last two need ``bucket_view``: without it DDP copies the buckets before they are reduced.
    """

    allreduce: Literal["none", "gloo", "hook", "started", "after"]
    memory_format: Literal["contiguous", "channels-last"] = "contiguous"
    optimizer: Literal["foreach", "fused"] = "foreach"
    bucket_view: bool = False
    bucket_cap_mb: int = 25
    thread_level: Literal["multiple", "single"] = "multiple"
    pin: bool = True

    def __post_init__(self) -> None:
        if self.allreduce in ("started", "after") and not self.bucket_view:
            raise ConfigError(
                f"allreduce {self.allreduce!r} without bucket_view", allowed="bucket_view = true, or another allreduce"
            )

    @property
    def environment(self) -> dict[str, str]:
        return {"MPI4PY_RC_THREAD_LEVEL": self.thread_level}


Setting = OwnSetting | TorchSetting
Change = dict[str, Any]


class PeerComparison(Noun, frozen=True):
    """Which systems train what, and how often they are timed at most: in ``rounds``, and ``steps`` of each visit.

    ``torch`` is compared with dpsim on one rank, the other systems on each of ``devices`` ranks.
    """

    model: str = "mlp"
    devices: tuple[int, ...] = (2,)
    systems: tuple[str, ...] = SYSTEMS
    rounds: int = 30
    steps: int = 6
    local_batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for system in self.systems:
            if system not in SYSTEMS:
                raise unknown("system", system, SYSTEMS)
        if OWN not in self.systems:
            raise ConfigError(f"systems {list(self.systems)}", allowed="dpsim and others: all are compared with it")
        for name, value in (("rounds", self.rounds), ("steps", self.steps)):
            if value < 1:
                raise ConfigError(f"{name} is {value}", allowed="1 or more")
        if len(set(self.devices)) != len(self.devices) or len(set(self.systems)) != len(self.systems):
            raise ConfigError("a device count or a system is named twice", allowed="different ones")
        self.works()

    def works(self) -> list[Work]:
        """Return the work at each device count, and on one rank where ``torch`` takes part. Raises ``ConfigError``."""
        counts = {*self.devices, 1} if ONE_RANK in self.systems else {*self.devices}
        return [Work(model=self.model, devices=n, local_batch=self.local_batch, seed=self.seed) for n in sorted(counts)]

    def systems_for(self, work: Work) -> list[str]:
        """Return the systems that do this work, dpsim first."""
        alone = work.devices == 1
        return [OWN, *(name for name in self.systems if name != OWN and (name == ONE_RANK) == alone)]


class TriedSetting(Noun, frozen=True):
    """A setting, and the least median step of its visits, made in turn with those of the same ``choice``."""

    setting: Setting
    step_s: float
    choice: int


class SystemResult(Noun, frozen=True):
    """One system on one device count: its best setting, and a median step a round with and without communication.

    ``gradient_error`` and ``loss_error`` are its differences from dpsim's first setting.
    """

    system: str
    devices: int
    setting: Setting
    gradient_error: float
    loss_error: float
    tried: tuple[TriedSetting, ...]
    step_s: tuple[float, ...] = ()
    alone_step_s: tuple[float, ...] = ()


def first_setting(system: str) -> Setting:
    """Return where the search for a system's best setting begins."""
    if system == OWN:
        return OwnSetting()
    kinds: dict[str, Literal["none", "gloo", "hook"]] = {ONE_RANK: "none", "ddp-gloo": "gloo", "ddp-mpi": "hook"}
    if system not in kinds:
        raise unknown("system", system, SYSTEMS)
    return TorchSetting(allreduce=kinds[system])


def choices(system: str, work: Work) -> list[list[Change]]:
    """Return the choices of the search, each a list of changes; the best setting so far is always a candidate, too."""
    if system == OWN:
        if work.devices == 1:
            return []
        return [
            [{"overlap": "poll"}, {"overlap": "inline"}, {"fusion_threshold_bytes": math.inf}],
            [{"fusion_threshold_bytes": 8 * 2.0**20}, {"fusion_threshold_bytes": 32_768.0}],
            [{"algorithm": "mpi"}],
        ]
    formats: list[Change] = [{"memory_format": "channels-last"}] if work.kind == "resnet20" else []
    dimensions = [formats, [{"optimizer": "fused"}]]
    if system == ONE_RANK:
        return [choice for choice in dimensions if choice]
    dimensions += [[{"bucket_view": True}], [{"bucket_cap_mb": 1}, {"bucket_cap_mb": 100}], [{"pin": False}]]
    if system == "ddp-mpi":
        reductions = [{"allreduce": kind, "bucket_view": True} for kind in ("started", "after")]
        dimensions = [*dimensions, reductions, [{"thread_level": "single"}]]
    return [choice for choice in dimensions if choice]


def shown(setting: Setting) -> str:
    """Return a setting's fields as text, without those that have no effect on its system."""
    values = msgspec.structs.asdict(setting)
    plain = {name: value for name, value in values.items() if name != "allreduce" or value not in ("none", "gloo")}
    if isinstance(setting, TorchSetting) and setting.allreduce in ("none", "gloo"):
        del plain["thread_level"]
    if isinstance(setting, TorchSetting) and setting.allreduce == "none":
        for name in ("bucket_view", "bucket_cap_mb", "pin"):
            del plain[name]
    return ", ".join(f"{name} {_text(value)}" for name, value in plain.items())


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if isinstance(value, float) else str(value)  # the only float is a size
