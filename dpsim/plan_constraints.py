"""What a plan cannot be: combinations of its fields that are impossible, each a row with the words of its error."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from dpsim.algorithms import ALGORITHMS
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.optimizer import Lars
from dpsim.strategy import DataParallel, Strategy, parse_strategy


def _decides_while_running(plan: Any) -> bool:
    return FUSION_RULES.find(plan.fusion_rule).while_running


def strategy_of(plan: Any) -> Strategy:
    return parse_strategy(plan.strategy)


def _computing(plan: Any) -> int:
    """The devices that samples are divided among; at least 1."""
    devices = int(getattr(plan, "devices", 1)) // parse_strategy(getattr(plan, "strategy", DataParallel.name)).classes
    return max(devices, 1)


def _divides_nodes_unevenly(plan: Any) -> bool:
    strategy, of_a_node = strategy_of(plan), plan.layout.of_a_node
    groups = {strategy.parts, strategy.parts * _computing(plan), max(_computing(plan) // strategy.replicas, 1)}
    return any(group % of_a_node and of_a_node % group for group in groups)


def _replicas_divide(plan: Any) -> bool:
    replicas = strategy_of(plan).replicas
    return 1 in (replicas, plan.devices) or (plan.devices % replicas == 0 and plan.devices >= 2 * replicas)


def _replicas_have_subtrees(plan: Any) -> bool:
    """Whether the leaves of each group of neighbours are a subtree of the fixed order of addition."""
    of_each, rest = divmod(plan.leaves, strategy_of(plan).replicas)
    return strategy_of(plan).replicas == 1 or (rest == 0 < of_each and of_each & (of_each - 1) == 0)


def asynchronous_with(field: str, allowed: object, plan: Any) -> bool:
    return strategy_of(plan).asynchronous and getattr(plan, field) != allowed


class Constraint(NamedTuple):
    """A combination of ``fields`` that is impossible: when, and the parts of its error, with values in braces.

    Beside the fields, ``{needed}`` is the number of micro-batches of a step, ``{each}`` says how many of them a device
    has, and ``{half}`` is half of the devices. A network is written as its token.
    """

    fields: str
    impossible: Callable[[Any], bool]
    given: str
    allowed: str | Callable[[Any], str]
    remedy: str

    def error(self, plan: Any) -> ConfigError:
        """Return what is said of a plan that has the combination, or of whatever has these fields."""
        values = {name: getattr(plan, name) for name in self.fields.split()}
        devices, accumulate = values.get("devices", 1), values.get("accumulate", 1)
        each = f" with {accumulate} micro-batches each" if accumulate > 1 else ""
        values |= {"needed": _computing(plan) * accumulate, "each": each, "half": max(devices // 2, 1)}
        values = {name: getattr(value, "token", value) for name, value in values.items()}
        allowed = self.allowed if isinstance(self.allowed, str) else self.allowed(plan)
        given, allowed, remedy = (text.format(**values) for text in (self.given, allowed, self.remedy))
        return ConfigError(given, allowed=allowed, remedy=remedy)


CONSTRAINTS = (
    Constraint(
        "algorithm devices layout",
        lambda plan: plan.algorithm == "hierarchical" and plan.devices > 1 and not plan.layout,
        "algorithm 'hierarchical' on the flat layout {devices}: nothing says which devices share a node",
        "a layout of nodes x devices of a node",
        "write it like --devices 2x{half}, or choose another --algorithm",
    ),
    Constraint(
        "algorithm wire_dtype leaves",
        lambda plan: (
            plan.wire_dtype in SIXTEEN_BITS and not plan.leaves and not ALGORITHMS.find(plan.algorithm).sixteen_bits
        ),
        "algorithm {algorithm!r} cannot send {wire_dtype}: it would round the partial sums of every round",
        ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.sixteen_bits),
        "choose one of them with --algorithm, or leave wire_dtype out; --reproducible can send it by any",
    ),
    Constraint(
        "global_batch devices accumulate strategy",
        lambda plan: plan.global_batch < _computing(plan) * plan.accumulate,
        "a global batch of {global_batch} samples cannot feed {devices} devices{each}",
        "a global batch of at least {needed}",
        "raise --global-batch or lower --devices",
    ),
    Constraint(
        "leaves devices accumulate strategy",
        lambda plan: 0 < plan.leaves < _computing(plan) * plan.accumulate,
        "{leaves} leaves cannot feed {devices} devices{each}",
        "{needed} leaves or more",
        "raise leaves (which makes it another training), or lower --devices",
    ),
    Constraint(
        "leaves batch_norm",
        lambda plan: plan.leaves > 0 and plan.batch_norm == "local",
        "reproducible training with batch_norm local, whose statistics depend on the number of devices",
        "batch_norm leaf or global, where leaves are given",
        "choose --batch-norm leaf or --batch-norm global, or leave --reproducible out",
    ),
    Constraint(
        "leaves batch_norm",
        lambda plan: plan.batch_norm == "leaf" and not plan.leaves,
        "batch_norm is leaf, and there are no leaves",
        "local or global without leaves",
        "add --reproducible, or choose another --batch-norm",
    ),
    Constraint(
        "batch_norm fusion_rule overlap",
        lambda plan: plan.batch_norm == "global" and plan.overlap == "inline" and _decides_while_running(plan),
        "batch_norm is global, under rule {fusion_rule} with overlap inline: the ranks would wait for each other",
        "another overlap, or a fusion rule that decides beforehand",
        "choose overlap poll, or leave --fusion-rule out",
    ),
    Constraint(
        "batch_norm accumulate",
        lambda plan: plan.batch_norm == "global" and plan.accumulate > 1,
        "batch_norm is global, with {accumulate} micro-batches a device",
        "one micro-batch, for only then are all samples normalised together",
        "leave accumulate out, or choose another --batch-norm",
    ),
    Constraint(
        "strategy devices",
        lambda plan: plan.devices % strategy_of(plan).classes > 0,
        "strategy {strategy} on {devices} devices, which do not fill its stages or parts evenly",
        "a multiple of their number",
        "change --devices, or stages=N or parts=N of the strategy",
    ),
    Constraint(
        "strategy devices",
        lambda plan: not _replicas_divide(plan),
        "strategy {strategy} on {devices} devices, which do not fill as many groups of 2 devices or more evenly",
        "a multiple of replicas: 2 devices or more for each",
        "change --devices, or replicas=N of the strategy",
    ),
    Constraint(
        "strategy leaves",
        lambda plan: plan.leaves > 0 and not _replicas_have_subtrees(plan),
        "strategy {strategy} with {leaves} leaves, whose fixed order of addition replicas would change",
        "leaves that are a power of 2 times replicas",
        "change leaves (which makes it another training), or replicas=N of the strategy",
    ),
    Constraint(
        "strategy layout devices",
        lambda plan: bool(plan.layout) and _divides_nodes_unevenly(plan),
        "strategy {strategy} on the layout {layout}, where neighbours that belong together (the devices of a stage or a"
        " replica, or the parts of a layer) would be an uneven part of the nodes",
        "numbers of them that divide the devices of a node, or hold whole nodes",
        "change --devices, or stages=N, parts=N or replicas=N of the strategy",
    ),
    Constraint(
        "strategy fusion_rule",
        lambda plan: strategy_of(plan) != DataParallel() and _decides_while_running(plan),
        "strategy {strategy} under rule {fusion_rule}, which decides buckets while running: shards and stages own"
        " buckets, and optimizer state stays with its owner",
        "fusion rules that decide beforehand",
        "choose another --fusion-rule, or leave --strategy out",
    ),
    Constraint(
        "strategy algorithm",
        lambda plan: strategy_of(plan).sharded and not ALGORITHMS.find(plan.algorithm).has_reduce_scatter,
        "strategy {strategy} with algorithm {algorithm!r}, of which there is no reduce-scatter and no all-gather",
        ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.has_reduce_scatter),
        "choose one of them with --algorithm, or leave --strategy out",
    ),
    Constraint(
        "strategy wire_dtype",
        lambda plan: strategy_of(plan).sharded and plan.wire_dtype in SIXTEEN_BITS,
        "strategy {strategy} with gradients sent as {wire_dtype}: parameters are gathered as they are",
        "wire dtypes float32 and float64",
        "leave wire_dtype out, or leave --strategy out",
    ),
    Constraint(
        "strategy wire_dtype",
        lambda plan: strategy_of(plan).classes > 1 and plan.wire_dtype in SIXTEEN_BITS,
        "strategy {strategy} with gradients sent as {wire_dtype}: activations are sent as they are",
        "wire dtypes float32 and float64",
        "leave wire_dtype out, or leave --strategy out",
    ),
    Constraint(
        "strategy batch_norm",
        lambda plan: strategy_of(plan).classes > 1 and plan.batch_norm == "global",
        "strategy {strategy} with batch_norm global, whose sums between layers it has no place for",
        "batch_norm local, or leaf with leaves",
        "choose another --batch-norm, or leave --strategy out",
    ),
    Constraint(
        "strategy leaves devices accumulate",
        lambda plan: (
            strategy_of(plan).whole_micro_batches
            and plan.leaves > 0 < plan.accumulate - 1
            and plan.leaves % (_computing(plan) * plan.accumulate) > 0
        ),
        "strategy {strategy} with {accumulate} micro-batches a device, which {leaves} leaves do not fill evenly",
        "leaves that are a multiple of {needed}",
        "change leaves (which makes it another training), accumulate or --devices",
    ),
    *(
        Constraint(
            f"strategy {field}",
            functools.partial(asynchronous_with, field, allowed),
            f"strategy {{strategy}} with {field} {{{field}}}: {why}",
            f"{field} {shown}",
            "leave it out, or choose another --strategy",
        )
        for field, allowed, shown, why in (
            (
                "leaves",
                0,
                0,
                "each run has another order of updates, unless --replay repeats a recorded one",
            ),
            ("accumulate", 1, 1, "each micro-batch is an update"),
            ("batch_norm", "local", "local", "no two devices compute the same step"),
            ("wire_dtype", None, "float32", "devices share parameters in memory, and send no messages"),
            ("overlap", "off", "off", "devices share parameters in memory, and send no messages"),
        )
    ),
    Constraint(
        "strategy optimizer",
        lambda plan: strategy_of(plan).asynchronous and isinstance(plan.optimizer, Lars),
        "strategy {strategy} with LARS, which needs the norms of whole tensors, where flat arrays are updated alone",
        "sgd, adamw",
        "choose another --optimizer, or another --strategy",
    ),
    Constraint(
        "fusion_rule fusion_threshold_bytes",
        lambda plan: (
            plan.fusion_threshold_bytes is not None
            and FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is None
        ),
        "fusion rule {fusion_rule!r} takes no threshold",
        f"a threshold with {', '.join(threshold_rules())}",
        "leave --fusion-threshold out",
    ),
)
