"""The predicted rows of a grid's settings, and as records with the fixed names of ``--json``."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import msgspec

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import parse_devices
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import DDP_RULES, DEFAULT_RULE, FUSION_RULES
from dpsim.grouping import grouped
from dpsim.launch.workers import in_order
from dpsim.lowering import check_synchronous
from dpsim.machine import Machine
from dpsim.model.cautions import cautions
from dpsim.model.compare import chosen_overlap
from dpsim.model.deferring import gain_of_deferring
from dpsim.model.interval import Interval, of_schedule, predict
from dpsim.model.memory import Memory, memory
from dpsim.model.residuals import LEVEL
from dpsim.model.rows import PredictedRow, Record, alone_of, best_of, bits_of
from dpsim.model.step import Prediction, scheduled
from dpsim.plan import OVERLAPS, Plan
from dpsim.setting import Grid, Row, plan_of, threshold_bytes
from dpsim.strategy import ZERO_REDUNDANCY, Zero3
from dpsim.units import format_size
from dpsim.workload import Workload


def predict_points(
    workload: Workload, machine: Machine, grid: Grid, executor: Executor | None = None
) -> tuple[list[Record], Record]:
    """Return (points, summary) of every setting of a grid, whose fields are those of a plan and ``local_batch``.

    ``global_batch`` is the same on any device count (strong scaling);
    with ``local_batch`` the global batch grows with the devices (weak scaling). Without either, weak scaling with the
    workload's largest profiled local batch is predicted. Without ``algorithm`` it is ``default_algorithm``. One
    device has no threshold and is predicted once; no threshold means the rule's default, and where rules are
    compared, those that take no threshold get none. ``overlap`` may be ``auto`` (the default): the mechanism that
    ``chosen_overlap`` chooses for all points. ``cycle_s`` belongs to the rule ``horovod``.

    Where the workload was recorded from a script with DDP, what the script told DDP takes the place of the defaults:
    rule ``ddp`` (``ddp-2.3`` before PyTorch 2.4) with its bucket cap, the micro-batches of a step, the type that its
    communication hook sends, and global batch norm where it synchronises batch norm.

    With an ``executor`` (``concurrent.futures``, or ``mpi4py.futures`` and others like it) its workers predict; the
    results are the same.

    The summary names the best point of each device count, rule, algorithm and batch, with its speedup (samples/s over
    one device's at the same global batch, or local batch under weak scaling), its scaling efficiency (speedup / n), and
    the thresholds whose difference from it is within its uncertainty (``equally_fast_bytes``). ``speedup_low`` and
    ``speedup_high`` are the ends of its interval; what makes one device as uncertain does not count. It also has the
    ``cautions``: the assumptions behind the points, in sentences, and what was taken ``from_script``.
    Raises ``ConfigError``.
    """
    predicted = predict_grid(workload, machine, grid, executor)
    return [row.record() for row in predicted.rows], predicted.summary()


def predict_on_machines(workload: Workload, machines: Mapping[str, Machine], grid: Grid) -> tuple[list[Record], Record]:
    """Return ``compared`` of predictions of a grid on each of several machines. Raises ``ConfigError``."""
    return compared({name: predict_grid(workload, machine, grid) for name, machine in machines.items()})


def compared(predicted: Mapping[str, Predicted]) -> tuple[list[Record], Record]:
    """Return ``predict_points`` of each of several machines, with what each gains over the first of them.

    Points and best points say their ``machine``. ``upgrades`` in the summary has, for each number of devices, batch,
    rule and norm, how many times as fast the best step is as the first machine's, with its interval: what is uncertain
    about the workload holds on both, and what is uncertain about a machine on that alone.
    """
    summaries = {name: each.summary() for name, each in predicted.items()}
    summary = next(iter(summaries.values()))
    summary |= {
        "best": [best | {"machine": name} for name, each in summaries.items() for best in each["best"]],
        "extrapolated": any(each["extrapolated"] for each in summaries.values()),
        "cautions": list(dict.fromkeys(caution for each in summaries.values() for caution in each["cautions"])),
    }
    first, *others = (_fastest(each.rows) for each in predicted.values())
    summary["upgrades"] = [
        _upgrade(name, first[key], row)
        for name, fastest in zip([*predicted][1:], others, strict=True)
        for key, row in fastest.items()
        if row.plan.devices > 1
    ]
    return [row.record() | {"machine": name} for name, each in predicted.items() for row in each.rows], summary


def _fastest(rows: Sequence[PredictedRow]) -> dict[tuple[object, ...], PredictedRow]:
    """Return the fastest row of each layout and plan of one device, whatever its algorithm."""
    fields = [name for name in Plan.__struct_fields__ if name != "algorithm"]
    groups = grouped(rows, lambda row: (row.layout, *(getattr(row.lone.plan, name) for name in fields)))
    return {key: min(group, key=lambda row: row.step_s) for key, group in groups.items()}


def _upgrade(name: str, before: PredictedRow, after: PredictedRow) -> Record:
    """Return how many times as fast the best step of another machine is as that of the first."""
    ratio, record = after.over(before, of_two_machines=True), after.record("layout", "local_batch")
    keys = ("devices", "layout", "global_batch", "local_batch", "accumulate", "fusion_rule", "batch_norm")
    return {key: record[key] for key in keys} | {
        "machine": name,
        "predicted_step_s": after.step_s,
        "first_step_s": before.step_s,
        "ratio": ratio.value,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
    }


class Predicted(NamedTuple):
    """The rows of a grid, whether its batch grows with the devices, and what the workload's script told DDP."""

    rows: list[PredictedRow]
    weak: bool
    script: ScriptDefaults

    def summary(self) -> Record:
        """Return what ``predict_points`` describes."""
        plans, first = [row.plan for row in self.rows], self.rows[0]
        gain = gain_of_deferring(first.workload, first.machine, max(plans, key=lambda plan: plan.devices))
        return {
            "scaling": "weak" if self.weak else "strong",
            "wire_dtype": first.plan.wire_dtype,
            "best": best_of(self.rows),
            "interval_level": LEVEL if all(row.interval_level for row in self.rows) else None,
            "interval_studies": min(row.interval_studies for row in self.rows),
            "interval_clusters": min(row.interval_clusters for row in self.rows),
            "extrapolated": any(row.extrapolated for row in self.rows),
            "from_script": self.script.sentence,
            "cautions": [
                *self.script.unpriced,
                *([gain] if gain else []),
                *cautions(first.machine, plans, first.workload),
                *([_WITHOUT_LEAVES] if any(plan.leaves for plan in plans) else []),
            ],
        }


def predict_grid(workload: Workload, machine: Machine, grid: Grid, executor: Executor | None = None) -> Predicted:
    """Return the predicted row of every setting of a grid; see ``predict_points``. Raises ``ConfigError``."""
    planned = _planned(workload, machine, grid, executor)
    every = [*dict.fromkeys((*planned.plans.values(), *planned.plans))]
    predicted = in_order(executor, functools.partial(_predicted, workload, machine), every)
    rows: dict[Plan, PredictedRow] = {}
    for plan, (prediction, needed, bits) in zip(every, predicted, strict=True):
        alone = rows.get(planned.plans.get(plan, plan))
        row = rows[plan] = PredictedRow(workload=workload, machine=machine, plan=plan, alone=alone)
        row.predicted, row.memory, row.bits = prediction, needed, bits
    return Predicted([rows[plan] for plan in planned.plans], planned.weak, planned.script)


def _predicted(
    workload: Workload, machine: Machine, plan: Plan
) -> tuple[tuple[Prediction, Interval], Memory, bytes | None]:
    """Return what takes long about a row: its prediction with the interval, the memory, and the digest of its bits."""
    schedule = scheduled(workload, machine, plan)
    return of_schedule(schedule, machine), memory(workload, plan, machine), bits_of(schedule, machine)


def rows_of_plans(workload: Workload, machine: Machine, plans: Sequence[Plan]) -> list[PredictedRow]:
    """Return the rows of these plans, whose batch grows with the devices."""
    predicted = functools.partial(PredictedRow, workload=workload, machine=machine)
    return [predicted(plan=plan, alone=predicted(plan=alone_of(plan, weak=True))) for plan in plans]


def predict_one(workload: Workload, machine: Machine, grid: Grid) -> Prediction:
    """Return the prediction that ``predict_points`` makes of a grid's only setting. Raises ``ConfigError``."""
    return predict(workload, machine, plan_one(workload, machine, grid)[0])


def plan_one(workload: Workload, machine: Machine, grid: Grid) -> tuple[Plan, ScriptDefaults]:
    """Return the plan of a grid's only setting, and what the workload's script told. Raises ``ConfigError``."""
    planned = _planned(workload, machine, grid)
    if len(planned.plans) > 1:
        raise ConfigError(
            f"{len(planned.plans)} settings in one prediction",
            allowed="one rule, algorithm, batch and threshold",
            remedy="dpsim.model.predict_points predicts several",
        )
    return next(iter(planned.plans)), planned.script


class _Planned(NamedTuple):
    """The plans of all points, each with that of one device which it is compared with, and the script's settings."""

    plans: dict[Plan, Plan]
    script: ScriptDefaults
    weak: bool


def _planned(workload: Workload, machine: Machine, grid: Grid, executor: Executor | None = None) -> _Planned:
    """Return the plans of a grid that is completed for predictions. Raises ``ConfigError``."""
    overlaps = grid.values("overlap") or ("auto",)
    overlap = overlaps[0] if len(overlaps) == 1 else ",".join(overlaps)
    if overlap not in ("auto", *OVERLAPS):
        raise unknown("overlap", overlap, ("auto", *OVERLAPS))
    weak, script = not grid.values("global_batch"), script_defaults(workload, grid)
    batch = {"local_batch": workload.local_batches[-1]} if weak else {}
    complete = grid.completed(batch | script.fields)
    axes = sorted(complete.axes.items(), key=lambda axis: _ORDER.get(axis[0], 0))
    several_rules = len(complete.values("fusion_rule")) > 1
    algorithm = functools.partial(default_algorithm, machine)
    plans: dict[Plan, Plan] = {}
    for row in msgspec.structs.replace(complete, axes=dict(axes)).rows:
        threshold = _threshold(row, script.bucket_cap_bytes, several_rules=several_rules)
        plan = plan_of(row | {"fusion_threshold_bytes": threshold, "overlap": "off"}, algorithm)
        check_synchronous(plan.parallelism)
        plans[plan] = alone_of(plan, weak=weak)
    if overlap == "auto" and _waits_for_each(workload, plans):
        overlap = "off"
    mechanism = chosen_overlap(workload, machine, list(plans), executor) if overlap == "auto" else overlap
    return _Planned(
        {msgspec.structs.replace(plan, overlap=mechanism): single for plan, single in plans.items()}, script, weak
    )


def _waits_for_each(workload: Workload, plans: Iterable[Plan]) -> bool:
    """Whether a script's FSDP waits for each of its collectives, as on processors: they are gloo's."""
    units = workload.ddp is not None and bool(workload.ddp.units)
    return units and {plan.algorithm for plan in plans if plan.devices > 1} == {"gloo"}


def _threshold(row: Row, script_cap_bytes: float | None, *, several_rules: bool) -> float | None:
    """Return the threshold of a row: none on one device, nor where rules are compared for those that take none."""
    rule, threshold = FUSION_RULES.find(row["fusion_rule"]), row.get("fusion_threshold_bytes")
    if parse_devices(row["devices"])[0] == 1 or (several_rules and rule.default_threshold_bytes is None):
        return None
    return script_cap_bytes if threshold is None and rule.name in DDP_RULES else threshold_bytes(threshold)


class ScriptDefaults(NamedTuple):
    """The settings that a script told DDP where the grid has none: in words too, and those that have no price."""

    fields: dict[str, Any]
    bucket_cap_bytes: float | None = None
    sentence: str = ""
    unpriced: tuple[str, ...] = ()


def script_defaults(workload: Workload, grid: Grid) -> ScriptDefaults:
    """Return what the workload's script told DDP of fields that the grid leaves out. Raises ``ConfigError``."""
    ddp, named = workload.ddp, {name for row in grid.rows for name in row}
    normalises = any(layer.batch_norm_channels for layer in workload.layers)
    if "global" in grid.values("batch_norm") and not normalises:
        raise ConfigError(
            f"batch norm global for {workload.name}, in which no layer states batch_norm_channels",
            allowed="a workload whose layers with batch norm state their number of channels, as dpsim profile does",
            remedy="add batch_norm_channels to those layers, or leave --batch-norm out",
        )
    if ddp is None:
        return ScriptDefaults({"fusion_rule": DEFAULT_RULE})
    named_cap = "fusion_threshold_bytes" in named
    rule, cap = (ddp.bucket_rule, None) if named_cap else (ddp.fusion_rule, ddp.bucket_cap_bytes)
    fields: dict[str, tuple[Any, str]] = {"fusion_rule": (rule, f"rule {rule}")}
    if ddp.units and "strategy" not in named:
        strategy = Zero3(replicas=ddp.replicas).text
        words = f"strategy {strategy}, a unit for each module of fully_shard"
        fields = {"fusion_rule": (rule, ""), "strategy": (strategy, words)}
    elif ddp.sharded_optimizer and "strategy" not in named:
        fields["strategy"] = (
            ZERO_REDUNDANCY,
            f"strategy {ZERO_REDUNDANCY}, of ZeroRedundancyOptimizer",
        )
    if cap is not None and DDP_RULES & {*(grid.values("fusion_rule") or (rule,))}:
        fields["fusion_threshold_bytes"] = cap, f"buckets of {format_size(cap)}"
    if ddp.accumulate > 1:
        times = "each" if not ddp.reduces else str(len(ddp.reduces))
        each = "" if ddp.deferred else f", {times} of which {'reduce' if ddp.reduces else 'reduces'} gradients"
        fields["accumulate"] = ddp.accumulate, f"{ddp.accumulate} micro-batches a step{each}"
    if ddp.sync_batch_norm and normalises:
        fields["batch_norm"] = "global", "batch norm over all devices"
    unpriced = ddp.unpriced(batch_norm=normalises)
    own_dtype = workload.most_common_dtype("reduced")
    if own_dtype in SIXTEEN_BITS and {*SIXTEEN_BITS} & {*grid.values("wire_dtype")}:
        raise ConfigError(
            f"wire_dtype for {workload.name}, whose gradients are {own_dtype}",
            allowed="gradients in 32 bits or more, which 16 bits make smaller",
            remedy="leave wire_dtype out: gradients are priced in their own type",
        )
    if ddp.wire_dtype is not None and own_dtype not in SIXTEEN_BITS:
        if all(ALGORITHMS.find(name).sixteen_bits for name in grid.values("algorithm")):
            fields["wire_dtype"] = ddp.wire_dtype, f"gradients sent as {ddp.wire_dtype}"
        elif "wire_dtype" not in named:
            refused = f"the script's {ddp.communication_hook} sends {ddp.wire_dtype}, which this algorithm cannot"
            unpriced += (refused,)
    left_out = {name: each for name, each in fields.items() if name not in named}
    words = ", ".join(text for _, text in left_out.values() if text)
    system = "FSDP" if ddp.units else "DDP"
    return ScriptDefaults(
        {name: value for name, (value, _) in left_out.items() if name != "fusion_threshold_bytes"},
        cap,
        f"as the script told {system}: {words}; a flag overrides it" if words else "",
        unpriced,
    )


_WITHOUT_LEAVES = (
    "layer times are the workload file's, and dpsim profile measures without leaves: computing leaf by leaf takes"
    " longer, most with few samples a leaf; dpsim sweep profiles it"
)
_ORDER = {"global_batch": -5, "local_batch": -4, "fusion_rule": -3, "algorithm": -2, "batch_norm": -1} | {
    "devices": 1,
    "fusion_threshold_bytes": 2,
}
"""The order of points: the last axis varies fastest, and those that are not named here are between the two groups."""


def default_algorithm(machine: Machine, wire_dtype: str | None = None) -> str:
    """Return the algorithm to predict with by default.

    It is ``auto`` or else ``mpi`` where the machine has a table of it, else the algorithm of its first table, else
    ``ring``. With 16-bit messages it is the first algorithm with a table that can send them, else ``direct``.
    """
    names = [table.algorithm for table in (machine.allreduce or machine.halves)]
    if wire_dtype in SIXTEEN_BITS:
        return next((name for name in names if ALGORITHMS.find(name).sixteen_bits), "direct")
    return next((name for name in ("auto", "mpi", *names) if name in names), "ring")
