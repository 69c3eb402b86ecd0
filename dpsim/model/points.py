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
from dpsim.plan import OVERLAPS, Plan, samples_of_step
from dpsim.strategy import FULLY_SHARD, parse_strategy
from dpsim.units import format_size
from dpsim.workload import Workload

Record = dict[str, Any]
_Predicted = tuple[Prediction, Interval]
_CHUNK = 64
"""The plans that a worker of an executor predicts at a time."""


def predict_points(
    workload: Workload,
    machine: Machine,
    devices: Sequence[int | str],
    thresholds: Sequence[float],
    rule: str | Sequence[str] | None = None,
    executor: Executor | None = None,
    **settings: Any,
) -> tuple[list[Record], Record]:
    """Return (points, summary) of every device count or layout with every threshold, rule, algorithm and batch.

    ``settings`` are fields of ``dpsim.Plan`` and ``local_batch``; each but ``overlap`` may have several values.
    ``global_batch`` is the same on any device count (strong scaling);
    with ``local_batch`` the global batch grows with the devices (weak scaling). Without either, weak scaling with the
    workload's largest profiled local batch is predicted. Without ``algorithm`` it is ``default_algorithm``. One
    device has no threshold and is predicted once; no ``thresholds`` means the rule's default, and where rules are
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
    planned = _planned(workload, machine, devices, thresholds, rule, **settings)
    groups = _predicted(workload, machine, planned, executor)
    return _summed_up(workload, machine, planned, groups)


def predict_on_machines(
    workload: Workload,
    machines: Mapping[str, Machine],
    devices: Sequence[int | str],
    thresholds: Sequence[float],
    rule: str | Sequence[str] | None = None,
    **settings: Any,
) -> tuple[list[Record], Record]:
    """Return ``predict_points`` of each of several machines, with what each gains over the first of them.

    Points and best points say their ``machine``. ``upgrades`` in the summary has, for each number of devices, batch,
    rule and norm, how many times as fast the best step is as the first machine's, with its interval: what is uncertain
    about the workload holds on both, and what is uncertain about a machine on that alone.
    """
    points: list[Record] = []
    summary: Record = {}
    fastest: dict[str, dict[tuple[object, ...], tuple[Record, _Predicted]]] = {}
    for name, machine in machines.items():
        planned = _planned(workload, machine, devices, thresholds, rule, **settings)
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
        "from_script": planned.told.sentence,
        "cautions": [
            *planned.told.unpriced,
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
        alone = plan.on_one_device(global_batch=plan.global_batch // plan.data_devices)
        single, predicted = (predict_with_interval(workload, machine, each) for each in (alone, plan))
        point = _point(workload, machine, plan, single, predicted)
        groups.setdefault((point["layout"], plan.accumulate, plan.local_batch), []).append((point, predicted))
    return [_best(rows) for rows in groups.values()]


def predict_one(
    workload: Workload, machine: Machine, devices: int | str, thresholds: Sequence[float], **settings: Any
) -> Prediction:
    """Return the prediction that ``predict_points`` makes of one setting. Raises ``ConfigError``."""
    return predict(workload, machine, plan_one(workload, machine, devices, thresholds, **settings)[0])


def plan_one(
    workload: Workload, machine: Machine, devices: int | str, thresholds: Sequence[float], **settings: Any
) -> tuple[Plan, Told]:
    """Return the plan of one setting, and what the workload's script told of it. Raises ``ConfigError``."""
    planned = _planned(workload, machine, [devices], thresholds, **settings)
    if len(planned.plans) > 1:
        raise ConfigError(
            f"{len(planned.plans)} settings in one prediction",
            allowed="one rule, algorithm, batch and threshold",
            remedy="dpsim.model.predict_points predicts several",
        )
    return next(iter(planned.plans)), planned.told


class _Planned(NamedTuple):
    """The plans of all points, each with that of one device which it is compared with, and the settings told."""

    plans: dict[Plan, Plan]
    told: Told
    weak: bool


def _planned(
    workload: Workload,
    machine: Machine,
    devices: Sequence[int | str],
    thresholds: Sequence[float],
    rule: str | Sequence[str] | None = None,
    **settings: Any,
) -> _Planned:
    """Return the plans that ``predict_points`` predicts, and ``dpsim.model`` one of. Raises ``ConfigError``."""
    given = {name: value for name, value in settings.items() if value is not None}
    if rule is not None:
        given["fusion_rule"] = rule
    overlap = given.pop("overlap", "auto")
    _check(overlap, given)
    weak = "global_batch" not in given
    told = _told(workload, given, thresholds)
    fields = {_BATCH: workload.local_batches[-1]} if weak else {"global_batch": given["global_batch"]}
    fields |= told.fields
    counts = [parse_devices(each) for each in devices]
    plans: dict[Plan, Plan] = {}
    for values in itertools.product(*map(_several, fields.values())):
        variant = dict(zip(fields, values, strict=True))
        variant.setdefault("algorithm", default_algorithm(machine, variant.get("wire_dtype")))
        variant.setdefault("batch_norm", Plan.default_batch_norm(variant.get("leaves", 0)))
        takes_threshold = FUSION_RULES.find(variant["fusion_rule"]).default_threshold_bytes is not None
        compared = thresholds and (takes_threshold or len(_several(fields["fusion_rule"])) == 1)
        otherwise = told.bucket_cap_bytes if variant["fusion_rule"] in DDP_RULES else None
        strategy = parse_strategy(variant.get("strategy", "data-parallel"))
        check_synchronous(strategy)
        single = _plan(variant | {"strategy": "data-parallel"} if strategy.classes > 1 else variant, 1, "", None)
        for count, layout in counts:
            for threshold in thresholds if compared and count > 1 else [otherwise if count > 1 else None]:
                plans[_plan(variant, count, layout, threshold)] = single
    mechanism = choose_overlap(workload, machine, list(plans))[0] if overlap == "auto" else overlap
    return _Planned(
        {msgspec.structs.replace(plan, overlap=mechanism): single for plan, single in plans.items()}, told, weak
    )


def _plan(variant: Mapping[str, Any], devices: int, layout: str, threshold: float | None) -> Plan:
    fields = dict(variant)
    if _BATCH in fields:
        strategy = fields.get("strategy", "data-parallel")
        fields["global_batch"] = samples_of_step(fields.pop(_BATCH), devices, fields.get("accumulate", 1), strategy)
    return Plan(devices=devices, layout=layout, fusion_threshold_bytes=threshold, **fields)


class Told(NamedTuple):
    """The settings that hold where a script may have told DDP some: its words, and what it told that has no price."""

    fields: dict[str, Any]
    bucket_cap_bytes: float | None = None
    sentence: str = ""
    unpriced: tuple[str, ...] = ()


def _told(workload: Workload, given: dict[str, Any], thresholds: Sequence[float]) -> Told:
    """Return what was given; for the rest what the workload's script told DDP, or a default."""
    ddp, fields = workload.ddp, {name: given[name] for name in _FIRST if name in given}
    normalises = any(layer.batch_norm_channels for layer in workload.layers)
    if "global" in _several(given.get("batch_norm", ())) and not normalises:
        raise ConfigError(
            f"batch norm global for {workload.name}, in which no layer states batch_norm_channels",
            allowed="a workload whose layers with batch norm state their number of channels, as dpsim profile does",
            remedy="add batch_norm_channels to those layers, or leave --batch-norm out",
        )
    if ddp is None:
        return Told({"fusion_rule": DEFAULT_RULE} | fields | given)
    taken, cap, sent = list[str](), None if thresholds else ddp.bucket_cap_bytes, ddp.wire_dtype
    told: dict[str, Any] = {"fusion_rule": ddp.bucket_rule if thresholds else ddp.fusion_rule}
    if ddp.units and "strategy" not in given:
        told["strategy"] = FULLY_SHARD.name
        taken.append(f"strategy {FULLY_SHARD.name}, a unit for each module of fully_shard")
    elif "fusion_rule" not in given:
        taken.append(f"rule {told['fusion_rule']}")
    if cap is not None and DDP_RULES & {*_several(given.get("fusion_rule", told["fusion_rule"]))}:
        taken.append(f"buckets of {format_size(cap)}")
    if "accumulate" not in given and ddp.accumulate > 1:
        told["accumulate"] = ddp.accumulate
        taken.append(f"{ddp.accumulate} micro-batches a step")
    if "batch_norm" not in given and ddp.sync_batch_norm and normalises:
        told["batch_norm"] = "global"
        taken.append("batch norm over all devices")
    unpriced = ddp.unpriced(batch_norm=normalises)
    if "wire_dtype" not in given and sent is not None:
        if all(ALGORITHMS.find(name).sixteen_bits for name in _several(given.get("algorithm", ()))):
            told["wire_dtype"] = sent
            taken.append(f"gradients sent as {sent}")
        else:
            unpriced += (f"the script's {ddp.communication_hook} sends {sent}, which this algorithm cannot",)
    words = (
        f"as the script told {'FSDP' if ddp.units else 'DDP'}: {', '.join(taken)}; a flag overrides it" if taken else ""
    )
    return Told(told | fields | given, cap, words, unpriced)


def _check(overlap: str, given: Mapping[str, Any]) -> None:
    if overlap != "auto" and overlap not in OVERLAPS:
        raise unknown("overlap", overlap, ("auto", *OVERLAPS))
    for name in given:
        if name not in _SETTINGS:
            raise unknown("setting of a prediction", name, _SETTINGS)
    if "global_batch" in given and _BATCH in given:
        raise ConfigError(
            f"a global batch of {given['global_batch']} and a local batch of {given[_BATCH]}",
            allowed="one of the two",
            remedy="a global batch for strong scaling, a local batch for weak scaling",
        )


_WITHOUT_LEAVES = (
    "layer times are the workload file's, and dpsim profile measures without leaves: computing leaf by leaf takes"
    " longer, most with few samples a leaf; dpsim sweep profiles it"
)
_BATCH = "local_batch"
_FIRST = ("global_batch", _BATCH, "fusion_rule", "algorithm", "batch_norm")
"""The order of points."""
_SETTINGS = (*(set(Plan.__struct_fields__) - {"devices", "layout", "fusion_threshold_bytes"}), _BATCH)
_Group = tuple[Plan, str]


def _several(values: Any) -> tuple[Any, ...]:
    """Return one value or a sequence of values as a tuple."""
    return tuple(values) if isinstance(values, (tuple, list)) else (values,)


def _best(rows: Sequence[tuple[Record, _Predicted]]) -> Record:
    """Return the fastest point of a device count, and the thresholds that cannot be told apart from it."""
    row, fastest = min(rows, key=lambda item: item[1][0].step_s)
    keys = (*Plan.__struct_fields__, _BATCH, "buckets", "predicted_step_s", "images_per_s")
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
