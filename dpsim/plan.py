"""``Plan``: how a workload is run. Every choice a user can make, checked at construction."""

from __future__ import annotations

import math
from typing import Annotated, Literal, get_args

from dpsim.algorithms import ALGORITHMS, RUNNABLE, algorithms_in
from dpsim.codec import Noun
from dpsim.collective import Collective
from dpsim.columns import Column
from dpsim.compute_dtype import COMPUTE_DTYPES, ComputeDtype
from dpsim.errors import ConfigError, unknown
from dpsim.fields import Decides, Field, declared
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.layout import check_hierarchy, check_layout, node_counts
from dpsim.optimizer import Optimizer, Sgd
from dpsim.registry import listed
from dpsim.sharded import check_shards
from dpsim.wire_dtype import WireDtype, check_compression

Overlap = Literal["off", "inline", "poll", "thread"]
BatchNormMode = Literal["local", "leaf", "global"]
Strategy = Literal["data-parallel", "zero1"]
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)
BATCH_NORM_MODES: tuple[BatchNormMode, ...] = get_args(BatchNormMode)
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)
DEFAULT_LEAVES = 8
MOST_LEAVES = 4096


def overlap_of(name: str) -> Overlap:
    """The overlap of that name. Raises ``ConfigError``."""
    for overlap in OVERLAPS:
        if overlap == name:
            return overlap
    raise unknown("overlap", name, OVERLAPS)


class Plan(Noun, frozen=True):
    """How a workload is run on ``devices`` devices.

    ``fusion_rule`` is one of ``dpsim.fusion_rules``, ``algorithm`` one of ``dpsim.algorithms``.
    ``fusion_threshold_bytes`` belongs to the rules tarantella (a bucket closes once it holds at least this
    much), ddp (likewise; by default, its first bucket at 1 MiB) and horovod (a maximum); ``None`` is the
    rule's own default, and 0 is one bucket per tensor under every rule. ``cycle_s`` is Horovod's cycle.
    ``layout`` is ``2x4`` for 2 nodes of 4 devices; empty: nothing is known of nodes (flat).
    ``algorithm`` ``auto`` is the fastest in shared memory by size (``dpsim.machine.Selection``), MPI's own without it.
    ``wire_dtype`` is what gradients are sent as (``dpsim.comm.compression``); ``None``: as the tensors are.
    ``leaves`` > 0 makes training reproducible: each global batch is cut into so many leaves, and whatever is summed
    over samples is added leaf by leaf in one fixed order, so that results have the same bits on any number of devices
    (up to one per leaf). ``batch_norm`` says whose statistics batch normalisation uses: the device's (``local``), each
    leaf's (``leaf``) or the whole global batch's (``global``). ``strategy`` names the lowering (``dpsim.lowering``):
    with ``zero1`` a device updates and keeps optimizer state for its shard of the parameters alone. ``compute_dtype``
    is what the operands of matrix products and convolutions are rounded to (``dpsim.compute_dtype``).
    """

    devices: Annotated[
        int,
        Field(
            Decides.SHARES | Decides.STEP_TIME,
            "Number of devices (MPI ranks), or a layout: 2x4 is 2 nodes with 4 each.",
            several="Numbers of devices: 1,2,4, or layouts: 2x4.",
        ),
        Column("count", "The number of devices; each is one rank."),
    ]
    global_batch: Annotated[
        int,
        Field(
            Decides.BITS | Decides.STEP_TIME,
            "Samples per step, over all devices.",
            several="Numbers of samples per step, over all devices: 64,128,256.",
        ),
        Column("count", "The samples of one step, over all devices."),
    ]
    accumulate: Annotated[
        int,
        Field(Decides.SHARES | Decides.STEP_TIME, "Micro-batches per step on each device."),
        Column("count", "The micro-batches of a step on each device."),
    ] = 1
    fusion_rule: Annotated[
        str,
        Field(
            Decides.ORDER | Decides.STEP_TIME,
            f"Rule that forms buckets: {listed(FUSION_RULES)} (tarantella).",
            several=f"List of {listed(FUSION_RULES)} (tarantella).",
        ),
        Column("name", "The rule that forms buckets."),
    ] = "tarantella"
    fusion_threshold_bytes: Annotated[
        float | None,
        Field(
            Decides.ORDER | Decides.STEP_TIME,
            "Bytes to fuse, like 64KiB or 25MB; 0: one bucket per tensor; inf: one per step.",
            several="Bytes to fuse, like 0,32KiB,1MiB,inf; 0: one bucket per tensor; inf: one per step.",
        ),
    ] = None
    cycle_s: Annotated[
        float,
        Field(Decides.ORDER | Decides.STEP_TIME, "Horovod's cycle, with --fusion-rule horovod, like 5ms (1ms)."),
    ] = 1e-3
    algorithm: Annotated[
        str,
        Field(
            Decides.ORDER | Decides.STEP_TIME,
            f"{listed(algorithms_in(*RUNNABLE))}. Default: auto on a node (in shared memory, by size), otherwise ring.",
            several=f"List of {listed(algorithms_in(*RUNNABLE))}.",
        ),
        Column("name", "The allreduce algorithm."),
    ] = "auto"
    overlap: Annotated[
        Overlap,
        Field(
            Decides.STEP_TIME,
            "Overlap of communication with backward: auto, off, inline, poll or thread.",
            more_words=True,
        ),
        Column("name", "How communication runs beside backward; `off` is not at all."),
    ] = "off"
    batch_norm: Annotated[
        BatchNormMode,
        Field(
            Decides.BITS | Decides.COMPUTE_TIME | Decides.STEP_TIME,
            "Samples that statistics are taken over: a device's, a leaf's, or the whole batch.",
        ),
        Column("name", "Whose statistics batch norm uses: those of each device, leaf, or all."),
    ] = "local"
    optimizer: Annotated[Optimizer, Field(Decides.BITS | Decides.COMPUTE_TIME, "sgd (the default), adamw or lars.")] = (
        Sgd()
    )
    wire_dtype: Annotated[
        WireDtype | None,
        Field(
            Decides.BITS | Decides.NETWORK_TIME,
            "Number format of gradients in messages; default: the tensor's own. Sums use float32.",
        ),
        Column("name", "What gradients are sent as; missing where it is their own data type."),
    ] = None
    strategy: Annotated[
        Strategy,
        Field(
            Decides.STEP_TIME,
            "data-parallel (the default), or zero1: a device updates a shard, and has optimizer state for it alone.",
        ),
        Column("name", "The strategy: plain data parallelism, or ZeRO-1."),
    ] = "data-parallel"
    layout: Annotated[str, Decides.ORDER | Decides.STEP_TIME] = ""
    leaves: Annotated[
        int,
        Field(
            Decides.BITS | Decides.COMPUTE_TIME,
            "Parts of a global batch whose gradients are added in a fixed order (8 with --reproducible).",
        ),
        Column("count", "The leaves of a global batch in reproducible training; 0 is without leaves."),
    ] = 0
    compute_dtype: Annotated[
        ComputeDtype,
        Field(
            Decides.BITS | Decides.COMPUTE_TIME | Decides.NETWORK_TIME,
            "Number format that operands of matrix products and convolutions are rounded to: float32 (the default) or"
            " bfloat16. Sums, parameters and gradients are float32.",
        ),
        Column("name", "What operands of products and convolutions are rounded to."),
    ] = "float32"

    def __post_init__(self) -> None:
        rule = FUSION_RULES.find(self.fusion_rule)
        ALGORITHMS.find(self.algorithm)
        for key, allowed in (
            ("overlap", OVERLAPS),
            ("batch_norm", BATCH_NORM_MODES),
            ("strategy", STRATEGIES),
            ("compute_dtype", COMPUTE_DTYPES),
        ):
            if getattr(self, key) not in allowed:
                raise unknown(key.replace("_", " "), getattr(self, key), allowed)
        if self.devices < 1:
            raise ConfigError(f"devices is {self.devices}", allowed="1 or more")
        check_layout(self.layout, self.devices)
        check_hierarchy(self.algorithm, self.devices, self.layout)
        if not self.leaves:
            check_compression(self.wire_dtype, self.algorithm)
        if self.accumulate < 1:
            raise ConfigError(f"accumulate is {self.accumulate}", allowed="1 or more")
        if self.global_batch < self.devices * self.accumulate:
            raise ConfigError(
                f"a global batch of {self.global_batch} samples cannot feed {self.devices} devices"
                + (f" with {self.accumulate} micro-batches each" if self.accumulate > 1 else ""),
                allowed=f"a global batch of at least {self.devices * self.accumulate}",
                remedy="raise --global-batch or lower --devices",
            )
        self._check_leaves()
        if self.strategy == "zero1":
            check_shards(self.algorithm, self.fusion_rule, self.wire_dtype)
        threshold = self.fusion_threshold_bytes
        if threshold is not None:
            if rule.default_threshold_bytes is None:
                raise ConfigError(
                    f"fusion rule {self.fusion_rule!r} takes no threshold",
                    allowed=f"a threshold with {', '.join(threshold_rules())}",
                    remedy="leave --fusion-threshold out",
                )
            if not threshold >= 0:
                raise ConfigError(f"fusion threshold is {threshold}", allowed="0 or more bytes, or inf")
        if not (math.isfinite(self.cycle_s) and self.cycle_s > 0):
            raise ConfigError(f"cycle_s is {self.cycle_s}", allowed="finite seconds > 0")

    def _check_leaves(self) -> None:
        if not 0 <= self.leaves <= MOST_LEAVES:
            raise ConfigError(f"leaves is {self.leaves}", allowed=f"1 to {MOST_LEAVES}, or 0 for none")
        if self.leaves and self.leaves < self.devices * self.accumulate:
            each = f" with {self.accumulate} micro-batches each" if self.accumulate > 1 else ""
            raise ConfigError(
                f"{self.leaves} leaves cannot feed {self.devices} devices{each}",
                allowed=f"{self.devices * self.accumulate} leaves or more",
                remedy="raise --leaves (which makes it another training), or lower --devices",
            )
        if self.leaves and self.batch_norm == "local":
            raise ConfigError(
                "reproducible training with batch_norm local, whose statistics depend on the number of devices",
                allowed="batch_norm leaf or global, where leaves are given",
                remedy="choose --batch-norm leaf or --batch-norm global, or leave --reproducible out",
            )
        if self.batch_norm == "leaf" and not self.leaves:
            raise ConfigError(
                "batch_norm is leaf, and there are no leaves",
                allowed="local or global without leaves",
                remedy="add --reproducible, or choose another --batch-norm",
            )
        while_running = FUSION_RULES.find(self.fusion_rule).while_running
        if self.batch_norm == "global" and while_running and self.overlap == "inline":
            raise ConfigError(
                f"batch_norm is global, under rule {self.fusion_rule} with overlap inline: the ranks would wait for"
                " each other",
                allowed="another overlap, or a fusion rule that decides beforehand",
                remedy="choose --overlap poll, or leave --fusion-rule out",
            )
        if self.batch_norm == "global" and self.accumulate > 1:
            raise ConfigError(
                f"batch_norm is global, with {self.accumulate} micro-batches a device",
                allowed="one micro-batch, for only then are all samples normalised together",
                remedy="leave --accumulate out, or choose another --batch-norm",
            )

    @staticmethod
    def default_batch_norm(leaves: int) -> BatchNormMode:
        """The mode where none is named: ``leaf`` with leaves, else ``local``."""
        return "leaf" if leaves else "local"

    @property
    def local_batch(self) -> float:
        """Samples a device computes at once, on average (an unequal share is a fraction here)."""
        return self.global_batch / (self.devices * self.accumulate)

    @property
    def priced_wire_dtype(self) -> str:
        """The wire dtype of the cost tables that price this plan: what travels as it is counts as float32."""
        return self.wire_dtype or "float32"

    @property
    def collective(self) -> Collective:
        """What adds up the plan's gradients: an allreduce, or with zero1 a reduce-scatter."""
        return Collective(
            algorithm=self.algorithm,
            devices=self.devices,
            layout=self.layout,
            wire_dtype=self.priced_wire_dtype,
            kind="reduce-scatter" if self.strategy == "zero1" else "allreduce",
        )

    @property
    def devices_a_node(self) -> int:
        """Devices of one node of the layout; 1 in a flat one."""
        return node_counts(self.layout, self.devices)[1]

    @property
    def threshold_bytes(self) -> float:
        """The threshold in force: the given one, or the rule's default (0 for a rule that ignores it)."""
        if self.fusion_threshold_bytes is not None:
            return self.fusion_threshold_bytes
        return FUSION_RULES.find(self.fusion_rule).default_threshold_bytes or 0.0


declared(Plan)
