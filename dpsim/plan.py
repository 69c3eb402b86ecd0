"""``Plan``: how a workload is run. Every choice a user can make, checked at construction."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from typing import Annotated, Any, Literal, get_args, get_origin

import msgspec

from dpsim.algorithms import ALGORITHMS, RUNNABLE, algorithms_in
from dpsim.codec import Noun
from dpsim.collective import FLAT, Collective, Layout, checked_layout
from dpsim.columns import Column
from dpsim.constraints import check_plan
from dpsim.dtypes import ComputeDtype, WireDtype
from dpsim.errors import ConfigError, unknown
from dpsim.fields import MORE_WORDS, Decides, fields
from dpsim.fusion_rules import DEFAULT_RULE, FUSION_RULES
from dpsim.optimizer import Optimizer, Sgd
from dpsim.registry import listed
from dpsim.strategy import DataParallel, Strategy, described, parse_strategy

Overlap = Literal["off", "inline", "poll", "thread"]
BatchNormMode = Literal["local", "leaf", "global"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
BATCH_NORM_MODES: tuple[BatchNormMode, ...] = get_args(BatchNormMode)
DEFAULT_LEAVES = 8
MOST_LEAVES = 4096


class Plan(Noun, frozen=True, dict=True):
    """How a workload is run on ``devices`` devices.

    ``fusion_rule`` is one of ``dpsim.fusion_rules``, ``algorithm`` one of ``dpsim.algorithms``.
    ``fusion_threshold_bytes`` belongs to the rules that take one: under tarantella and ddp a bucket closes once it
    holds at least this much, under horovod and capped it is a maximum; ``None`` is the rule's own default, and 0 is
    one bucket per tensor under every rule.
    ``layout`` is ``2x4`` for 2 nodes of 4 devices; empty: nothing is known of nodes (flat).
    ``algorithm`` ``auto`` is the fastest by size, in shared memory or by messages (``dpsim.machine.Selection``).
    ``leaves`` > 0 makes training reproducible: each global batch is cut into so many leaves, and whatever is summed
    over samples is added leaf by leaf in one fixed order, so that results have the same bits on any number of devices
    (up to one per leaf). ``strategy`` is one of ``dpsim.strategy``, with its settings. Which combinations are
    impossible stands in ``dpsim.constraints``.
    """

    devices: Annotated[
        int,
        Decides.SHARES | Decides.STEP_TIME | Decides.PROBLEM,
        "Number of devices (MPI ranks), or a layout: 2x4 is 2 nodes with 4 each.",
        "Numbers of devices: 1,2,4, or layouts: 2x4.",
        Column("count", "The number of devices; each is one rank."),
    ]
    global_batch: Annotated[
        int,
        Decides.BITS | Decides.STEP_TIME | Decides.PROBLEM,
        "Samples per step, over all devices.",
        "Numbers of samples per step, over all devices: 64,128,256.",
        Column("count", "The samples of one step, over all devices."),
    ]
    accumulate: Annotated[
        int,
        Decides.SHARES | Decides.STEP_TIME,
        "Micro-batches per step on each device.",
        Column("count", "The micro-batches of a step on each device."),
    ] = 1
    fusion_rule: Annotated[
        str,
        Decides.ORDER | Decides.STEP_TIME,
        f"Rule that forms buckets: {listed(FUSION_RULES)} (tarantella).",
        f"List of {listed(FUSION_RULES)} (tarantella).",
        Column("name", "The rule that forms buckets."),
    ] = DEFAULT_RULE
    fusion_threshold_bytes: Annotated[
        float | None,
        Decides.ORDER | Decides.STEP_TIME,
        "Bytes to fuse, like 64KiB or 25MB; 0: one bucket per tensor; inf: one per step.",
        "Bytes to fuse, like 0,32KiB,1MiB,inf; 0: one bucket per tensor; inf: one per step.",
        Column("bytes", "The fusion threshold; it has no effect on one device."),
    ] = None
    cycle_s: Annotated[
        float,
        Decides.ORDER | Decides.STEP_TIME,
        "Horovod's cycle, with the fusion rule horovod, like 5ms (1ms).",
        Column("s", "Horovod's cycle."),
    ] = 1e-3
    algorithm: Annotated[
        str,
        Decides.ORDER | Decides.STEP_TIME,
        f"{listed(algorithms_in(*RUNNABLE))}. Default: auto on a node (in shared memory, by size), otherwise ring.",
        f"List of {listed(algorithms_in(*RUNNABLE))}.",
        Column("name", "The allreduce algorithm."),
    ] = "auto"
    overlap: Annotated[
        Overlap,
        Decides.STEP_TIME,
        "Overlap of communication with backward: auto, off, inline, poll or thread.",
        MORE_WORDS,
        Column("name", "How communication runs beside backward; `off` is not at all."),
    ] = "off"
    batch_norm: Annotated[
        BatchNormMode,
        Decides.BITS | Decides.COMPUTE_TIME | Decides.STEP_TIME,
        "Samples that statistics are taken over: a device's, a leaf's, or the whole batch.",
        Column("name", "Whose statistics batch norm uses: those of each device, leaf, or all."),
    ] = "local"
    optimizer: Annotated[Optimizer, Decides.BITS | Decides.COMPUTE_TIME, "sgd (the default), adamw or lars."] = Sgd()
    wire_dtype: Annotated[
        WireDtype | None,
        Decides.BITS | Decides.NETWORK_TIME,
        "Number format of gradients in messages; default: the tensor's own. Sums use float32.",
        Column("name", "What gradients are sent as; missing where it is their own data type."),
    ] = None
    strategy: Annotated[
        str,
        Decides.SHARES | Decides.STEP_TIME,
        f"How devices share the work: {described()}.",
        f"List of {described()}.",
        Column("name", "The strategy: how the devices share samples, layers, gradients and parameters."),
    ] = "data-parallel"
    layout: Annotated[
        Layout,
        Decides.ORDER | Decides.STEP_TIME,
        Column("name", "The devices as a layout such as `2x4`; empty on one node."),
    ] = FLAT
    leaves: Annotated[
        int,
        Decides.BITS | Decides.COMPUTE_TIME,
        "Parts of a global batch whose gradients are added in a fixed order (8 with --reproducible).",
        Column("count", "The leaves of a global batch in reproducible training; 0 is without leaves."),
    ] = 0
    compute_dtype: Annotated[
        ComputeDtype,
        Decides.BITS | Decides.COMPUTE_TIME | Decides.NETWORK_TIME,
        "Number format that operands of matrix products and convolutions are rounded to: float32 (the default) or"
        " bfloat16. Sums, parameters and gradients are float32.",
        Column("name", "What operands of products and convolutions are rounded to."),
    ] = "float32"

    def __post_init__(self) -> None:
        FUSION_RULES.find(self.fusion_rule)
        ALGORITHMS.find(self.algorithm)
        check_words({name: getattr(self, name) for name in _WORDS})
        if self.devices < 1:
            raise ConfigError(f"devices is {self.devices}", allowed="1 or more")
        msgspec.structs.force_setattr(self, "layout", checked_layout(self.layout, self.devices))
        msgspec.structs.force_setattr(self, "strategy", parse_strategy(self.strategy).text)
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}", allowed="1 or more")
        if not 0 <= self.leaves <= MOST_LEAVES:
            raise ConfigError(f"leaves is {self.leaves}", allowed=f"1 to {MOST_LEAVES}, or 0 for none")
        check_plan(self)
        if self.fusion_threshold_bytes is not None and not self.fusion_threshold_bytes >= 0:
            raise ConfigError(f"fusion threshold is {self.fusion_threshold_bytes}", allowed="0 or more bytes, or inf")
        if not (math.isfinite(self.cycle_s) and self.cycle_s > 0):
            raise ConfigError(f"cycle_s is {self.cycle_s}", allowed="finite seconds > 0")

    @staticmethod
    def default_batch_norm(leaves: int) -> BatchNormMode:
        """The mode where none is named: ``leaf`` with leaves, else ``local``."""
        return "leaf" if leaves else "local"

    @property
    def local_batch(self) -> float:
        """Samples a device computes at once, on average (an unequal share is a fraction here)."""
        return self.global_batch / (self.data_devices * self.accumulate)

    @functools.cached_property
    def parallelism(self) -> Strategy:
        """The strategy with its settings."""
        return parse_strategy(self.strategy)

    @functools.cached_property
    def data_devices(self) -> int:
        """The devices that the samples of a step are divided among: all, or as many as each rank class has."""
        return self.devices // self.parallelism.classes

    @functools.cached_property
    def replicas(self) -> int:
        """How many groups of neighbours divide a copy of the parameters each, where the strategy is sharded."""
        return self.parallelism.replicas if self.data_devices > 1 else 1

    @functools.cached_property
    def shard_devices(self) -> int:
        """The devices of each of the ``replicas``."""
        return self.data_devices // self.replicas

    def class_of(self, rank: int) -> int:
        """The rank class of a rank: neighbours are the parts of a stage, as often as its data is divided."""
        parts = self.parallelism.parts
        return rank // (self.data_devices * parts) * parts + rank % parts

    def place_of(self, rank: int) -> int:
        """Which of the ranks of its class a rank is."""
        return rank // self.parallelism.parts % self.data_devices

    def rank_of(self, rank_class: int, place: int) -> int:
        """The rank at a place of a class."""
        stage, part = divmod(rank_class, self.parallelism.parts)
        return (stage * self.data_devices + place) * self.parallelism.parts + part

    def on_one_device(self, **changed: Any) -> Plan:
        """The same plan on one device, with these fields changed; there is nothing to share then."""
        alone: dict[str, Any] = {"devices": 1, "layout": FLAT, "strategy": DataParallel.name}
        return msgspec.structs.replace(self, **alone | changed)

    @property
    def priced_wire_dtype(self) -> str:
        """The wire dtype of the cost tables that price this plan: what travels as it is counts as float32."""
        return self.wire_dtype or "float32"

    @functools.cached_property
    def data_layout(self) -> Layout:
        """The layout of the devices that have the same layers."""
        parts = self.parallelism.parts
        return self.layout.group(self.data_devices * parts).spread(parts)

    @functools.cached_property
    def collective(self) -> Collective:
        """What adds up the plan's gradients over the devices that have the same layers, or share a copy of them."""
        return Collective(
            algorithm=self.algorithm,
            devices=self.shard_devices,
            layout=self.data_layout.group(self.shard_devices),
            wire_dtype=self.priced_wire_dtype,
            kind=self.parallelism.gradient_collective,
        )

    @functools.cached_property
    def of_all_data(self) -> Collective:
        """The same over all devices that have the same layers: several copies of them too."""
        return msgspec.structs.replace(self.collective, devices=self.data_devices, layout=self.data_layout)

    @functools.cached_property
    def between_replicas(self) -> Collective:
        """What adds up a shard over the copies of the parameters."""
        apart = self.data_layout.spread(self.shard_devices)
        return msgspec.structs.replace(self.collective, devices=self.replicas, layout=apart, kind="allreduce")

    @functools.cached_property
    def joining(self) -> Collective:
        """What adds up what the parts of a stage compute, one device of each: along a tree, as their bits ask for.

        A ring of more than two would have to carry what the tree adds elsewhere; the direct exchange does not.
        """
        parts = self.parallelism.parts
        by_messages = ALGORITHMS.find(self.algorithm).place in ("messages", "library")
        algorithm = "direct" if by_messages and parts > 2 else self.algorithm
        return msgspec.structs.replace(
            self.collective, algorithm=algorithm, devices=parts, layout=self.layout.group(parts), kind="allreduce"
        )

    @property
    def devices_a_node(self) -> int:
        """Devices of one node of the layout; 1 in a flat one."""
        return self.layout.of_a_node

    @property
    def threshold_bytes(self) -> float:
        """The threshold in force: the given one, or the rule's default (0 for a rule that ignores it)."""
        if self.fusion_threshold_bytes is not None:
            return self.fusion_threshold_bytes
        return FUSION_RULES.find(self.fusion_rule).default_threshold_bytes or 0.0


_WORDS = {name: get_args(field.kind) for name, field in fields(Plan).items() if get_origin(field.kind) is Literal}


def check_words(fields: Mapping[str, Any]) -> None:
    """Refuse a value that is not among the words of its field of a plan, such as an unknown overlap."""
    for name, allowed in _WORDS.items():
        if name in fields and fields[name] not in allowed:
            raise unknown(name.replace("_", " "), fields[name], allowed)


def samples_of_step(local_batch: int, devices: int, accumulate: int, strategy: str) -> int:
    """Return the global batch of a local batch b, the samples that a device has at once: b x micro-batches x n / c.

    Of n devices c have the same samples, one of each rank class: the stages of a pipeline, the parts of tensors.
    """
    return local_batch * accumulate * max(1, devices // parse_strategy(strategy).classes)
