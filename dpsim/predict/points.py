"""The predicted points of a sweep, as flat records with the fixed names of ``dpsim ... --json``."""

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
from dpsim.plan import OVERLAPS, Plan
from dpsim.predict.cautions import cautions
from dpsim.predict.compare import choose_overlap
from dpsim.predict.memory import memory
from dpsim.predict.step import RELATIVE_UNCERTAINTY, Prediction, interval, predict
from dpsim.wire_dtype import SIXTEEN_BITS, WireDtype
from dpsim.workload import Workload

Record = dict[str, Any]


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
    relative_uncertainty: float = RELATIVE_UNCERTAINTY,
    wire_dtype: WireDtype | None = None,
    cycle_s: float = 1e-3,
) -> tuple[list[Record], Record]:
    """(points, summary) of every device count or layout with every threshold, rule, algorithm and batch.

    With ``global_batch`` it is the same on any device count (strong scaling). With ``local_batch`` it grows with
    the devices (weak scaling), as it does without either: then the workload's largest profiled local batch is taken.
    Without ``algorithm`` it is the machine's own: ``default_algorithm``. One device has no threshold and is
    predicted once; no ``thresholds`` means the rule's default, and where rules are compared, those that take no
    threshold get none. ``overlap`` may be ``auto``: the one mechanism that ``choose_overlap`` picks for all points.
    ``cycle_s`` is that of the rule ``horovod``.

    The summary names the best point of each device count, rule, algorithm and batch, with speedup (samples/s over one
    device's at the same global batch, or local batch under weak scaling), scaling efficiency (speedup / n) and the
    thresholds that are within the uncertainty of it (``equally_fast_bytes``); and ``cautions``: the assumptions behind
    the points, in sentences. Raises ``ConfigError``.
    """
    _check(overlap, global_batch, local_batch)
    weak = global_batch is None
    batches = _several(workload.local_batches[-1] if weak and local_batch is None else local_batch or global_batch)
    ways = [
        _Way(fusion_rule=one, algorithm=name or default_algorithm(machine, wire_dtype), batch=batch)
        for batch, one, name in itertools.product(batches, _several(rule), _several(algorithm))
    ]
    plans: dict[Plan, _Way] = {}
    singles: dict[_Way, Prediction] = {}

    def plan_of(way: _Way, count: int, threshold: float | None, layout: str = "") -> Plan:
        return Plan(
            devices=count,
            layout=layout,
            global_batch=way.batch * accumulate * count if weak else way.batch,
            accumulate=accumulate,
            fusion_rule=way.fusion_rule,
            fusion_threshold_bytes=threshold,
            algorithm=way.algorithm,
            wire_dtype=wire_dtype,
            cycle_s=cycle_s,
        )

    for way in ways:
        has_none = len(_several(rule)) > 1 and FUSION_RULES.find(way.fusion_rule).default_threshold_bytes is None
        singles[way] = predict(workload, machine, plan_of(way, 1, None))
        for count, layout in map(parse_devices, devices):
            for threshold in [None] if count == 1 or has_none or not thresholds else thresholds:
                plans[plan_of(way, count, threshold, layout)] = way
    mechanism = choose_overlap(workload, machine, list(plans))[0] if overlap == "auto" else overlap
    by_way: dict[tuple[_Way, str], list[Record]] = {}
    used = []
    for plan, way in plans.items():
        used.append(Plan(**(msgspec.structs.asdict(plan) | {"overlap": mechanism})))
        point = _point(workload, machine, used[-1], singles[way], relative_uncertainty)
        by_way.setdefault((way, point["layout"]), []).append(point)
    points = [point for rows in by_way.values() for point in rows]
    return points, {
        "scaling": "weak" if weak else "strong",
        "wire_dtype": wire_dtype,
        "best": [_best(rows, relative_uncertainty) for rows in by_way.values()],
        "relative_uncertainty": relative_uncertainty,
        "extrapolated": any(point["extrapolated"] for point in points),
        "cautions": list(cautions(machine, used)),
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


class _Way(NamedTuple):
    """What is compared on every device count; ``batch`` is the global one, or under weak scaling the local one."""

    fusion_rule: str
    algorithm: str
    batch: int


def _several(given: Any) -> tuple[Any, ...]:
    """A value, or several of them, as several."""
    return (given,) if given is None or isinstance(given, (str, int)) else tuple(given)


def _best(rows: Sequence[Record], relative_uncertainty: float) -> Record:
    """The fastest of a device count's points, and which thresholds cannot be told from it."""
    row = min(rows, key=lambda point: float(point["predicted_step_s"]))
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
        for point in rows
        if point is not row and point["predicted_step_s"] <= (1 + relative_uncertainty) * row["predicted_step_s"]
    ]
    return {key: row[key] for key in keys} | {
        "speedup": row["predicted_speedup"],
        "scaling_efficiency": row["predicted_speedup"] / row["devices"],
        "thresholds_compared": len(rows),
        "equally_fast_bytes": near,
        "any_threshold": len(near) == len(rows) - 1 and len(rows) > 1,
    }


def default_algorithm(machine: Machine, wire_dtype: str | None = None) -> str:
    """``auto`` or MPI's own where the machine has a table of it, else its first table's algorithm, else ``ring``.

    With 16 bits on the wire the first of those that can send them, else ``direct``.
    """
    names = [table.algorithm for table in machine.allreduce]
    if wire_dtype in SIXTEEN_BITS:
        return next((name for name in names if ALGORITHMS.find(name).sixteen_bits), "direct")
    return next((name for name in ("auto", "mpi", *names) if name in names), "ring")


def _point(workload: Workload, machine: Machine, plan: Plan, single: Prediction, relative_uncertainty: float) -> Record:
    predicted: Prediction = predict(workload, machine, plan)
    low_s, high_s = interval(predicted, machine, workload, relative_uncertainty)
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
        "network": machine.network,
        "emulated_compute": workload.emulated_compute,
        "emulated_network": machine.emulated_network,
        "predicted_step_s": predicted.step_s,
        "predicted_low_s": low_s,
        "predicted_high_s": high_s,
        "predicted_interval": "assumed",
        "predicted_exposed_communication_s": predicted.exposed_communication_s,
        "images_per_s": predicted.images_per_s,
        "predicted_speedup": speedup if math.isfinite(speedup) else float(plan.devices),
        "calibrated_on": machine.calibrated_on,
        "extrapolated": predicted.extrapolated,
        "memory_bytes": needed.parts() | {"total": needed.total},
        "fits": needed.fits,
    }
