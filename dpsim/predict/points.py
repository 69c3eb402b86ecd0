"""Predicted points of many configurations, as flat records with the fixed names of ``--json``."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import msgspec

from dpsim.algorithms import ALGORITHMS
from dpsim.errors import ConfigError, unknown
from dpsim.fusion_rules import FUSION_RULES
from dpsim.layout import parse_devices
from dpsim.machine import Machine
from dpsim.plan import OVERLAPS, Plan, Strategy
from dpsim.predict.cautions import cautions
from dpsim.predict.compare import choose_overlap
from dpsim.predict.interval import LEVEL, Interval, equally_fast, predict, predict_with_interval
from dpsim.predict.memory import memory
from dpsim.predict.step import Prediction
from dpsim.wire_dtype import SIXTEEN_BITS, WireDtype
from dpsim.workload import Workload

Record = dict[str, Any]
_Predicted = tuple[Prediction, Interval]


def predict_points(
    workload: Workload,
    machine: Machine,
    devices: Sequence[int | str],
    thresholds: Sequence[float],
    rule: str | Sequence[str] = "tarantella",
    *,
    global_batch: int | Sequence[int] | None = None,
    local_batch: int | Sequence[int] | None = None,
    algorithm: str | Sequence[str] | None = None,
    overlap: str = "auto",
    accumulate: int = 1,
    wire_dtype: WireDtype | None = None,
    cycle_s: float = 1e-3,
    strategy: Strategy = "data-parallel",
) -> tuple[list[Record], Record]:
    """Return (points, summary) of every device count or layout with every threshold, rule, algorithm and batch.

    ``global_batch`` is the same on any device count (strong scaling); with ``local_batch`` the global batch grows with
    the devices (weak scaling). Without either, weak scaling with the workload's largest profiled local batch is
    predicted. Without ``algorithm`` it is ``default_algorithm``. One device has no threshold and is predicted once; no
    ``thresholds`` means the rule's default, and where rules are compared, those that take no threshold get none.
    ``overlap`` may be ``auto``: the mechanism that ``choose_overlap`` chooses for all points. ``cycle_s`` belongs to
    the rule ``horovod``.

    The summary names the best point of each device count, rule, algorithm and batch, with its speedup (samples/s over
    one device's at the same global batch, or local batch under weak scaling), its scaling efficiency (speedup / n), and
    the thresholds whose difference from it is within its uncertainty (``equally_fast_bytes``). It also has the
    ``cautions``: the assumptions behind the points, in sentences. Raises ``ConfigError``.
    """
    _check(overlap, global_batch, local_batch)
    weak = global_batch is None
    batches = _several(workload.local_batches[-1] if weak and local_batch is None else local_batch or global_batch)
    variants = [
        _Variant(fusion_rule=name, algorithm=chosen or default_algorithm(machine, wire_dtype), batch=batch)
        for batch, name, chosen in itertools.product(batches, _several(rule), _several(algorithm))
    ]
    plans: dict[Plan, _Variant] = {}
    singles: dict[_Variant, Prediction] = {}

    def plan_of(variant: _Variant, count: int, threshold: float | None, layout: str = "") -> Plan:
        return Plan(
            devices=count,
            layout=layout,
            global_batch=variant.batch * accumulate * count if weak else variant.batch,
            accumulate=accumulate,
            fusion_rule=variant.fusion_rule,
            fusion_threshold_bytes=threshold,
            algorithm=variant.algorithm,
            wire_dtype=wire_dtype,
            cycle_s=cycle_s,
            strategy=strategy,
        )

    for variant in variants:
        takes_threshold = FUSION_RULES.find(variant.fusion_rule).default_threshold_bytes is not None
        compared = thresholds and (takes_threshold or len(_several(rule)) == 1)
        singles[variant] = predict(workload, machine, plan_of(variant, 1, None))
        for count, layout in map(parse_devices, devices):
            for threshold in thresholds if compared and count > 1 else [None]:
                plans[plan_of(variant, count, threshold, layout)] = variant
    mechanism = choose_overlap(workload, machine, list(plans))[0] if overlap == "auto" else overlap
    groups: dict[tuple[_Variant, str], list[tuple[Record, _Predicted]]] = {}
    used = []
    for plan, variant in plans.items():
        used.append(Plan(**(msgspec.structs.asdict(plan) | {"overlap": mechanism})))
        predicted = predict_with_interval(workload, machine, used[-1])
        point = _point(workload, machine, used[-1], singles[variant], predicted[0])
        groups.setdefault((variant, point["layout"]), []).append((point, predicted))
    points = [point for rows in groups.values() for point, _ in rows]
    return points, {
        "scaling": "weak" if weak else "strong",
        "wire_dtype": wire_dtype,
        "best": [_best(rows) for rows in groups.values()],
        "interval_level": LEVEL,
        "extrapolated": any(point["extrapolated"] for point in points),
        "cautions": list(cautions(machine, used, workload)),
    }


def _check(overlap: str, global_batch: object, local_batch: object) -> None:
    if overlap != "auto" and overlap not in OVERLAPS:
        raise unknown("overlap", overlap, ("auto", *OVERLAPS))
    if global_batch is not None and local_batch is not None:
        raise ConfigError(
            f"a global batch of {global_batch} and a local batch of {local_batch}",
            allowed="one of the two",
            remedy="a global batch for strong scaling, a local batch for weak scaling",
        )


class _Variant(NamedTuple):
    """What is compared on every device count; ``batch`` is the global batch, or under weak scaling the local one."""

    fusion_rule: str
    algorithm: str
    batch: int


def _several(values: Any) -> tuple[Any, ...]:
    """Return one value or a sequence of values as a tuple."""
    return (values,) if values is None or isinstance(values, (str, int)) else tuple(values)


def _best(rows: Sequence[tuple[Record, _Predicted]]) -> Record:
    """Return the fastest point of a device count, and the thresholds that cannot be told apart from it."""
    row, fastest = min(rows, key=lambda item: item[1][0].step_s)
    keys = (
        "devices",
        "layout",
        "global_batch",
        "local_batch",
        "fusion_rule",
        "algorithm",
        "fusion_threshold_bytes",
        "overlap",
        "buckets",
        "predicted_step_s",
        "images_per_s",
    )
    near = [
        point["fusion_threshold_bytes"]
        for point, predicted in rows
        if point is not row and equally_fast(predicted, fastest)
    ]
    return {key: row[key] for key in keys} | {
        "speedup": row["predicted_speedup"],
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
    names = [table.algorithm for table in machine.allreduce]
    if wire_dtype in SIXTEEN_BITS:
        return next((name for name in names if ALGORITHMS.find(name).sixteen_bits), "direct")
    return next((name for name in ("auto", "mpi", *names) if name in names), "ring")


def _point(workload: Workload, machine: Machine, plan: Plan, single: Prediction, predicted: Prediction) -> Record:
    needed = memory(workload, plan, machine)
    has_threshold = plan.devices > 1 and FUSION_RULES.find(plan.fusion_rule).default_threshold_bytes is not None
    speedup = predicted.images_per_s / single.images_per_s
    return {
        "devices": plan.devices,
        "layout": plan.layout or str(plan.devices),
        "global_batch": plan.global_batch,
        "local_batch": plan.local_batch,
        "accumulate": plan.accumulate,
        "fusion_rule": plan.fusion_rule,
        "fusion_threshold_bytes": plan.threshold_bytes if has_threshold else None,
        "buckets": predicted.buckets,
        "algorithm": plan.algorithm,
        "overlap": plan.overlap,
        "strategy": plan.strategy,
        "network": machine.network,
        "emulated_compute": workload.emulated_compute,
        "emulated_network": machine.emulated_network,
        "predicted_step_s": predicted.step_s,
        "predicted_low_s": predicted.low_s,
        "predicted_high_s": predicted.high_s,
        "interval_level": predicted.interval_level,
        "predicted_exposed_communication_s": predicted.exposed_communication_s,
        "predicted_communication_cost_s": predicted.communication_cost_s,
        "waiting_for_slowest_s": predicted.waiting_for_slowest_s,
        "waiting_for_input_s": predicted.waiting_for_input_s,
        "images_per_s": predicted.images_per_s,
        "predicted_speedup": speedup if math.isfinite(speedup) else float(plan.devices),
        "calibrated_on": machine.calibrated_on,
        "extrapolated": predicted.extrapolated,
        "memory_bytes": needed.parts() | {"total": needed.total},
        "fits": needed.fits,
    }
