"""Predicted points of many configurations, as flat records with the fixed names of ``--json``."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Mapping, Sequence
from concurrent.futures import Executor
from typing import Any, NamedTuple

import msgspec

from dpsim.algorithms import ALGORITHMS
from dpsim.collective import parse_devices
from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import DDP_RULES, DEFAULT_RULE, FUSION_RULES
from dpsim.lowering import check_synchronous
from dpsim.machine import Machine
from dpsim.model.cautions import cautions
from dpsim.model.compare import choose_overlap
from dpsim.model.interval import Interval, equally_fast, predict, predict_with_interval, ratio_interval
from dpsim.model.memory import memory
from dpsim.model.residuals import LEVEL
from dpsim.model.step import Prediction
from dpsim.plan import OVERLAPS, Plan
from dpsim.setting import Grid, Row, plan_of, threshold_bytes
from dpsim.strategy import FULLY_SHARD, DataParallel
from dpsim.units import format_size
from dpsim.workload import Workload

Record = dict[str, Any]
_Predicted = tuple[Prediction, Interval]
_CHUNK = 64
"""The plans that a worker of an executor predicts at a time."""


def predict_points(
    workload: Workload, machine: Machine, grid: Grid, executor: Executor | None = None
) -> tuple[list[Record], Record]:
    """Return (points, summary) of every setting of a grid, whose fields are those of a plan and ``local_batch``.

    ``global_batch`` is the same on any device count (strong scaling);
    with ``local_batch`` the global batch grows with the devices (weak scaling). Without either, weak scaling with the
    workload's largest profiled local batch is predicted. Without ``algorithm`` it is ``default_algorithm``. One
    device has no threshold and is predicted once; no threshold means the rule's default, and where rules are
    compared, those that take no threshold get none. ``overlap`` may be ``auto`` (the default): the mechanism that
    ``choose_overlap`` chooses for all points. ``cycle_s`` belongs to the rule ``horovod``.

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
    planned = _planned(workload, machine, grid)
    groups = _predicted(workload, machine, planned, executor)
    return _summed_up(workload, machine, planned, groups)


def predict_on_machines(workload: Workload, machines: Mapping[str, Machine], grid: Grid) -> tuple[list[Record], Record]:
    """Return ``predict_points`` of each of several machines, with what each gains over the first of them.

    Points and best points say their ``machine``. ``upgrades`` in the summary has, for each number of devices, batch,
    rule and norm, how many times as fast the best step is as the first machine's, with its interval: what is uncertain
    about the workload holds on both, and what is uncertain about a machine on that alone.
    """
    points: list[Record] = []
    summary: Record = {}
    fastest: dict[str, dict[tuple[object, ...], tuple[Record, _Predicted]]] = {}
    for name, machine in machines.items():
        planned = _planned(workload, machine, grid)
        groups = _predicted(workload, machine, planned)
        its_points, its_summary = _summed_up(workload, machine, planned, groups)
        its_summary["best"] = [best | {"machine": name} for best in its_summary["best"]]
        points += [point | {"machine": name} for point in its_points]
        if summary:
            summary["best"] += its_summary["best"]
            summary["extrapolated"] |= its_summary["extrapolated"]
            its_cautions = its_summary["cautions"]
            summary["cautions"] += [each for each in its_cautions if each not in summary["cautions"]]
        else:
            summary = its_summary
        for (single, layout), rows in groups.items():
            row = min(rows, key=lambda item: item[1][0].step_s)
            fields = msgspec.structs.asdict(single)
            key = (layout, *(value for field, value in fields.items() if field != "algorithm"))
            before = fastest.setdefault(name, {}).get(key)
            if before is None or row[1][0].step_s < before[1][0].step_s:
                fastest[name][key] = row
    first, *others = machines
    summary["upgrades"] = [
        _upgrade(name, fastest[first][key], row)
        for name in others
        for key, row in fastest[name].items()
        if row[0]["devices"] > 1
    ]
    return points, summary


def _upgrade(name: str, before: tuple[Record, _Predicted], after: tuple[Record, _Predicted]) -> Record:
    """Return how many times as fast the best step of another machine is as that of the first."""
    low, high = ratio_interval(before[1], after[1], of_two_machines=True)
    keys = ("devices", "layout", "global_batch", "local_batch", "accumulate", "fusion_rule", "batch_norm")
    step_s, before_s = after[0]["predicted_step_s"], before[0]["predicted_step_s"]
    return {key: after[0][key] for key in keys} | {
        "machine": name,
        "predicted_step_s": step_s,
        "first_step_s": before_s,
        "ratio": before_s / step_s if step_s > 0 else 1.0,
        "ratio_low": low,
        "ratio_high": high,
    }


def _predicted(
    workload: Workload, machine: Machine, planned: _Planned, executor: Executor | None = None
) -> dict[_Group, list[tuple[Record, _Predicted]]]:
    """Return the points of each plan of one device and layout."""
    groups: dict[_Group, list[tuple[Record, _Predicted]]] = {}
    every = [*dict.fromkeys((*planned.plans.values(), *planned.plans))]
    chunks = [every[begin : begin + _CHUNK] for begin in range(0, len(every), _CHUNK)]
    mapped = (map if executor is None else executor.map)(functools.partial(_predict_all, workload, machine), chunks)
    predicted = dict(zip(every, itertools.chain.from_iterable(mapped), strict=True))
    for plan, single in planned.plans.items():
        point = _point(workload, machine, plan, predicted[single], predicted[plan])
        groups.setdefault((single, point["layout"]), []).append((point, predicted[plan]))
    return groups


def _predict_all(workload: Workload, machine: Machine, plans: Sequence[Plan]) -> list[_Predicted]:
    return [predict_with_interval(workload, machine, plan) for plan in plans]


def _summed_up(
    workload: Workload, machine: Machine, planned: _Planned, groups: dict[_Group, list[tuple[Record, _Predicted]]]
) -> tuple[list[Record], Record]:
    """Return the points of all groups, and the summary that ``predict_points`` describes."""
    points = [point for rows in groups.values() for point, _ in rows]
    return points, {
        "scaling": "weak" if planned.weak else "strong",
        "wire_dtype": next(iter(planned.plans)).wire_dtype,
        "best": [_best(rows) for rows in groups.values()],
        "interval_level": LEVEL if all(point["interval_level"] for point in points) else None,
        "interval_studies": min(point["interval_studies"] for point in points),
        "extrapolated": any(point["extrapolated"] for point in points),
        "from_script": planned.script.sentence,
        "cautions": [
            *planned.script.unpriced,
            *cautions(machine, list(planned.plans), workload),
            *([_WITHOUT_LEAVES] if any(plan.leaves for plan in planned.plans) else []),
        ],
    }


def best_of_plans(workload: Workload, machine: Machine, plans: Sequence[Plan]) -> list[Record]:
    """Return the best of these plans for each number of devices, micro-batches and local batch, as ``predict_points``.

    Plans with the same of these differ in nothing but the threshold.
    """
    groups: dict[tuple[str, int, float], list[tuple[Record, _Predicted]]] = {}
    for plan in plans:
        alone = _alone(plan, weak=True)
        single, predicted = (predict_with_interval(workload, machine, each) for each in (alone, plan))
        point = _point(workload, machine, plan, single, predicted)
        groups.setdefault((point["layout"], plan.accumulate, plan.local_batch), []).append((point, predicted))
    return [_best(rows) for rows in groups.values()]


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


def _planned(workload: Workload, machine: Machine, grid: Grid) -> _Planned:
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
        plans[plan] = _alone(plan, weak=weak)
    mechanism = choose_overlap(workload, machine, list(plans))[0] if overlap == "auto" else overlap
    return _Planned(
        {msgspec.structs.replace(plan, overlap=mechanism): single for plan, single in plans.items()}, script, weak
    )


def _alone(plan: Plan, *, weak: bool) -> Plan:
    """Return the plan on one device that a plan's speedup is over; it is divided into no parts or stages."""
    strategy = plan.strategy if plan.parallelism.classes == 1 else DataParallel.name
    batch = plan.global_batch // plan.data_devices if weak else plan.global_batch
    return plan.on_one_device(strategy=strategy, global_batch=batch, fusion_threshold_bytes=None, overlap="off")


def _threshold(row: Row, script_cap_bytes: float | None, *, several_rules: bool) -> float | None:
    """Return the threshold of a row: none on one device, nor where rules are compared for those that take none."""
    rule, given = FUSION_RULES.find(row["fusion_rule"]), row.get("fusion_threshold_bytes")
    if parse_devices(row["devices"])[0] == 1 or (several_rules and rule.default_threshold_bytes is None):
        return None
    return script_cap_bytes if given is None and rule.name in DDP_RULES else threshold_bytes(given)


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
        words = f"strategy {FULLY_SHARD.name}, a unit for each module of fully_shard"
        fields = {"fusion_rule": (rule, ""), "strategy": (FULLY_SHARD.name, words)}
    if cap is not None and DDP_RULES & {*(grid.values("fusion_rule") or (rule,))}:
        fields["fusion_threshold_bytes"] = cap, f"buckets of {format_size(cap)}"
    if ddp.accumulate > 1:
        fields["accumulate"] = ddp.accumulate, f"{ddp.accumulate} micro-batches a step"
    if ddp.sync_batch_norm and normalises:
        fields["batch_norm"] = "global", "batch norm over all devices"
    unpriced = ddp.unpriced(batch_norm=normalises)
    if ddp.wire_dtype is not None:
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
_Group = tuple[Plan, str]


def _best(rows: Sequence[tuple[Record, _Predicted]]) -> Record:
    """Return the fastest point of a device count, and the thresholds that cannot be told apart from it."""
    row, fastest = min(rows, key=lambda item: item[1][0].step_s)
    keys = (*Plan.__struct_fields__, "local_batch", "buckets", "predicted_step_s", "images_per_s")
    near = [
        point["fusion_threshold_bytes"]
        for point, predicted in rows
        if point is not row and equally_fast(predicted, fastest)
    ]
    return {key: row[key] for key in keys} | {
        "speedup": row["predicted_speedup"],
        "speedup_low": row["predicted_speedup_low"],
        "speedup_high": row["predicted_speedup_high"],
        "scaling_efficiency": row["predicted_speedup"] / row["devices"],
        "thresholds_compared": len(rows),
        "equally_fast_bytes": near,
        "any_threshold": len(near) == len(rows) - 1 and len(rows) > 1,
    }


def default_algorithm(machine: Machine, wire_dtype: str | None = None) -> str:
    """Return the algorithm to predict with by default.

    It is ``auto`` or else ``mpi`` where the machine has a table of it, else the algorithm of its first table, else
    ``ring``. With 16-bit messages it is the first algorithm with a table that can send them, else ``direct``.
    """
    names = [table.algorithm for table in (machine.allreduce or machine.halves)]
    if wire_dtype in SIXTEEN_BITS:
        return next((name for name in names if ALGORITHMS.find(name).sixteen_bits), "direct")
    return next((name for name in ("auto", "mpi", *names) if name in names), "ring")


def _point(workload: Workload, machine: Machine, plan: Plan, single: _Predicted, of_plan: _Predicted) -> Record:
    predicted = of_plan[0]
    needed = memory(workload, plan, machine)
    has_threshold = plan.devices > 1 and FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is not None
    speedup = predicted.images_per_s / single[0].images_per_s
    speedup = speedup if math.isfinite(speedup) else float(plan.devices)
    low, high = ratio_interval(single, of_plan) if plan.devices > 1 else (1.0, 1.0)
    scale = speedup * of_plan[0].step_s / single[0].step_s if single[0].step_s > 0 else 0.0
    return msgspec.structs.asdict(plan) | {
        "layout": plan.layout or str(plan.devices),
        "local_batch": plan.local_batch,
        "fusion_threshold_bytes": plan.threshold_bytes if has_threshold else None,
        "buckets": predicted.buckets,
        "optimizer": plan.optimizer.__struct_config__.tag,
        "network": machine.network,
        "emulated_compute": workload.emulated_compute,
        "emulated_network": machine.emulated_network,
        "predicted_step_s": predicted.step_s,
        "predicted_low_s": predicted.low_s,
        "predicted_high_s": predicted.high_s,
        "interval_level": predicted.interval_level,
        "interval_studies": predicted.interval_studies,
        "predicted_exposed_communication_s": predicted.exposed_communication_s,
        "predicted_communication_cost_s": predicted.communication_cost_s,
        "waiting_for_slowest_s": predicted.waiting_for_slowest_s,
        "waiting_for_input_s": predicted.waiting_for_input_s,
        "images_per_s": predicted.images_per_s,
        "predicted_speedup": speedup,
        "predicted_speedup_low": low * scale or speedup,
        "predicted_speedup_high": high * scale or speedup,
        "calibrated_on": machine.calibrated_on,
        "extrapolated": predicted.extrapolated,
        "memory_bytes": needed.parts() | {"total": needed.total},
        "fits": needed.fits,
    }
