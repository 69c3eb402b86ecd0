"""Which combinations of a plan's fields are impossible, and why: one table.

``Plan`` checks every row; ``check`` those of some fields, where there is no plan yet; ``possible`` answers without an
error, so that what compares many combinations leaves the impossible ones out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from types import SimpleNamespace
from typing import Any, NamedTuple

from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError
from dpsim.fusion_rules import FUSION_RULES, threshold_rules
from dpsim.wire_dtype import SIXTEEN_BITS


def _decides_while_running(plan: Any) -> bool:
    return FUSION_RULES.find(plan.fusion_rule).while_running


class Constraint(NamedTuple):
    """A combination of ``fields`` that is impossible: when, and the parts of its error, with values in braces.

    Beside the fields, ``{needed}`` is the number of micro-batches of a step, ``{each}`` says how many of them a device
    has, and ``{half}`` is half of the devices.
    """

    fields: str
    impossible: Callable[[Any], bool]
    given: str
    allowed: str
    remedy: str

    def error(self, plan: Any) -> ConfigError:
        """Return what is said of a plan that has the combination, or of whatever has these fields."""
        values = {name: getattr(plan, name) for name in self.fields.split()}
        devices, accumulate = values.get("devices", 1), values.get("accumulate", 1)
        each = f" with {accumulate} micro-batches each" if accumulate > 1 else ""
        values |= {"needed": devices * accumulate, "each": each, "half": max(devices // 2, 1)}
        given, allowed, remedy = (text.format(**values) for text in (self.given, self.allowed, self.remedy))
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
        "choose one of them with --algorithm, or leave --wire-dtype out; --reproducible can send it by any",
    ),
    Constraint(
        "global_batch devices accumulate",
        lambda plan: plan.global_batch < plan.devices * plan.accumulate,
        "a global batch of {global_batch} samples cannot feed {devices} devices{each}",
        "a global batch of at least {needed}",
        "raise --global-batch or lower --devices",
    ),
    Constraint(
        "leaves devices accumulate",
        lambda plan: 0 < plan.leaves < plan.devices * plan.accumulate,
        "{leaves} leaves cannot feed {devices} devices{each}",
        "{needed} leaves or more",
        "raise --leaves (which makes it another training), or lower --devices",
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
        "choose --overlap poll, or leave --fusion-rule out",
    ),
    Constraint(
        "batch_norm accumulate",
        lambda plan: plan.batch_norm == "global" and plan.accumulate > 1,
        "batch_norm is global, with {accumulate} micro-batches a device",
        "one micro-batch, for only then are all samples normalised together",
        "leave --accumulate out, or choose another --batch-norm",
    ),
    Constraint(
        "strategy fusion_rule",
        lambda plan: plan.strategy == "zero1" and _decides_while_running(plan),
        "strategy zero1 under rule {fusion_rule}, which decides buckets while running: shards are slices of"
        " buckets, and optimizer state stays with its shard",
        "fusion rules that decide beforehand",
        "choose another --fusion-rule, or leave --strategy out",
    ),
    Constraint(
        "strategy algorithm",
        lambda plan: plan.strategy == "zero1" and not ALGORITHMS.find(plan.algorithm).halves,
        "strategy zero1 with algorithm {algorithm!r}, of which there is no reduce-scatter and no all-gather",
        ", ".join(name for name, algorithm in ALGORITHMS.items() if algorithm.halves),
        "choose one of them with --algorithm, or leave --strategy out",
    ),
    Constraint(
        "strategy wire_dtype",
        lambda plan: plan.strategy == "zero1" and plan.wire_dtype in SIXTEEN_BITS,
        "strategy zero1 with gradients sent as {wire_dtype}: parameters are gathered as they are",
        "wire dtypes float32 and float64",
        "leave --wire-dtype out, or leave --strategy out",
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


def _rows(names: set[str]) -> Iterator[Constraint]:
    return (row for row in CONSTRAINTS if names.issuperset(row.fields.split()))


def check_plan(plan: Any, rows: Iterable[Constraint] = CONSTRAINTS) -> None:
    """Raise ``ConfigError`` if a plan has an impossible combination."""
    for row in rows:
        if row.impossible(plan):
            raise row.error(plan)


def check(**fields: Any) -> None:
    """Raise ``ConfigError`` if these values are impossible together; constraints of other fields do not count."""
    check_plan(SimpleNamespace(**fields), _rows(set(fields)))


def possible(of: str, **fields: Any) -> bool:
    """Return whether no constraint of field ``of`` refuses these values together."""
    rows = (row for row in _rows(set(fields)) if of in row.fields.split())
    return not any(row.impossible(SimpleNamespace(**fields)) for row in rows)
