"""What is compared: the training, the systems that do it, and the settings among which each one's best is sought."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec

from dpsim import codec
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
OPTIMIZER = Sgd(learning_rate=0.001, momentum=0.9, weight_decay=1e-3)
_SHAPES = {"mlp": (28, 28, 1), "resnet20": (32, 32, 3)}
_FORMS = "mlp (784-2048-2048-2048-10), with other widths mlp:512,256, or resnet20"
_MLP = "mlp:2048,2048,2048"

Change = dict[str, Any]
Setting = tuple[tuple[str, Any], ...]
"""How a system runs, as names and values. Those of dpsim, ``type`` apart, are fields of ``Plan``; its ranks are pinned.

Those of PyTorch: ``bucket_cap_mb`` and ``bucket_view`` are DDP's arguments. ``allreduce`` is ``none`` on a single rank
without DDP, ``gloo``, or by MPI from a communication hook: ``hook`` blocks in it, ``started`` starts an Iallreduce in
it and waits after backward, ``after`` reduces each bucket after backward. The last two need ``bucket_view``: without it
DDP copies the buckets before they are reduced.
"""
_OWN_FIRST: Change = {
    "type": "dpsim",
    "fusion_threshold_bytes": 2.0**20,
    "overlap": "off",
    "algorithm": "auto",
}
_TORCH_FIRST: Change = {
    "type": "torch",
    "allreduce": "none",
    "memory_format": "contiguous",
    "optimizer": "foreach",
    "bucket_view": False,
    "bucket_cap_mb": 25,
    "thread_level": "multiple",
    "pin": True,
}
_ALLREDUCES = {ONE_RANK: "none", "ddp-gloo": "gloo", "ddp-mpi": "hook"}
_OWN_CHOICES: list[list[Change]] = [
    [{"overlap": "poll"}, {"overlap": "inline"}, {"fusion_threshold_bytes": math.inf}],
    [{"fusion_threshold_bytes": 8 * 2.0**20}, {"fusion_threshold_bytes": 32_768.0}],
    [{"algorithm": "mpi"}],
]
_DDP_CHOICES: list[list[Change]] = [
    [{"bucket_view": True}],
    [{"bucket_cap_mb": 1}, {"bucket_cap_mb": 100}],
    [{"pin": False}],
]
_MPI_CHOICES: list[list[Change]] = [
    [{"allreduce": kind, "bucket_view": True} for kind in ("started", "after")],
    [{"thread_level": "single"}],
]


class Work(Noun, frozen=True):
    """The training that every system does: model, ranks, samples a rank. The same batches everywhere."""

    model: str
    devices: int
    local_batch: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        if self.kind not in _SHAPES or (":" in self.model and self.kind != "mlp"):
            raise unknown("model", self.model, _SHAPES, remedy=f"write {_FORMS}")
        at_least_one({"devices": self.devices, "local batch": self.local_batch})

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

    def plan(self, setting: Change) -> Plan:
        """Return the plan of dpsim with a setting. Raises ``DpsimError``."""
        plain = Plan(devices=self.devices, global_batch=self.global_batch, optimizer=OPTIMIZER)
        changes = {name: value for name, value in setting.items() if name != "type"}
        return codec.decode(codec.to_builtins(plain) | changes, Plan, "setting")


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
        at_least_one({"rounds": self.rounds, "steps": self.steps})
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


def at_least_one(counts: Mapping[str, int]) -> None:
    """Raise ``ConfigError`` for a count below one."""
    for name, count in counts.items():
        if count < 1:
            raise ConfigError(f"{name} is {count}", allowed="1 or more")


def changed(setting: Setting, change: Change) -> Setting:
    """Return a setting with other values."""
    return tuple((dict(setting) | change).items())


def first_setting(system: str) -> Setting:
    """Return where the search for a system's best setting begins: for PyTorch, its own defaults."""
    return tuple((_OWN_FIRST if system == OWN else _TORCH_FIRST | {"allreduce": _ALLREDUCES[system]}).items())


def choices(system: str, work: Work) -> list[list[Change]]:
    """Return the choices of the search, each a list of changes; the best setting so far is always a candidate, too."""
    if system == OWN:
        return [] if work.devices == 1 else _OWN_CHOICES
    formats: list[list[Change]] = [[{"memory_format": "channels-last"}]] if work.kind == "resnet20" else []
    of_ddp = [] if system == ONE_RANK else _DDP_CHOICES
    return [*formats, [{"optimizer": "fused"}], *of_ddp, *(_MPI_CHOICES if system == "ddp-mpi" else ())]


def shown(setting: Setting) -> str:
    """Return a setting as text, without what has no effect on its system."""
    without = {
        "none": ("type", "allreduce", "thread_level", "bucket_view", "bucket_cap_mb", "pin"),
        "gloo": ("type", "allreduce", "thread_level"),
    }.get(dict(setting).get("allreduce", ""), ("type",))
    return ", ".join(f"{name} {_text(value)}" for name, value in setting if name not in without)


def _text(value: object) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return format_size(value) if isinstance(value, float) else str(value)  # the only float is a size
