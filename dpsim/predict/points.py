"""The predicted points of a sweep, as flat records with the fixed names of ``dpsim ... --json``."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import msgspec

from dpsim.errors import ConfigError, unknown
from dpsim.layout import parse_devices
from dpsim.machine import Machine
from dpsim.plan import OVERLAPS, THRESHOLD_RULES, Plan
from dpsim.predict.compare import choose_overlap
from dpsim.predict.memory import memory
from dpsim.predict.step import RELATIVE_UNCERTAINTY, Prediction, interval, predict
from dpsim.wire_dtype import SIXTEEN_BIT_ALGORITHMS, SIXTEEN_BITS, WireDtype
from dpsim.workload import Workload

Record = dict[str, Any]


def predict_points(
    workload: Workload,
    machine: Machine,
    devices: Sequence[int | str],
    thresholds: Sequence[float],
    rule: str = "tarantella",
    *,
    global_batch: int | None = None,
    local_batch: int | None = None,
    algorithm: str | None = None,
    overlap: str = "auto",
    accumulate: int = 1,
    relative_uncertainty: float = RELATIVE_UNCERTAINTY,
    wire_dtype: WireDtype | None = None,
) -> tuple[list[Record], Record]:
    """(points, summary) of every device count or layout with every threshold, at one global or one local batch.

    With ``global_batch`` it is the same on any device count (strong scaling). With ``local_batch`` it grows with
    the devices (weak scaling), as it does without either: then the workload's largest profiled local batch is taken.
    Without ``algorithm`` it is the machine's own: ``default_algorithm``. One device has no threshold and is
    predicted once; no ``thresholds`` means the rule's default. ``overlap`` may be ``auto``: the mechanism
    ``choose_overlap`` picks for the point. The summary names the best point of each device count, with speedup
    (samples/s over one device's at the same global batch, or local batch under weak scaling) and scaling efficiency
    (speedup / n).
    Raises ``ConfigError``.
    """
    if overlap != "auto" and overlap not in OVERLAPS:
        raise unknown("overlap", overlap, ("auto", *OVERLAPS))
    if global_batch is not None and local_batch is not None:
        raise ConfigError(
            f"a global batch of {global_batch} and a local batch of {local_batch}",
            allowed="one of the two",
            remedy="a global batch for strong scaling, a local batch for weak scaling",
        )
    algorithm = algorithm or default_algorithm(machine, wire_dtype)
    share = (local_batch or workload.local_batches[-1]) * accumulate

    def plan_of(count: int, threshold: float | None, layout: str = "") -> Plan:
        return Plan(
            devices=count, layout=layout, global_batch=global_batch if global_batch is not None else share * count,
            accumulate=accumulate, fusion_rule=rule,  # type: ignore[arg-type]
            fusion_threshold_bytes=threshold, algorithm=algorithm,  # type: ignore[arg-type]
            overlap="off" if overlap == "auto" else overlap,  # type: ignore[arg-type]
            wire_dtype=wire_dtype,
        )  # fmt: skip

    points: list[Record] = []
    best: list[Record] = []
    single = predict(workload, machine, msgspec.structs.replace(plan_of(1, None), overlap="off"))
    for count, layout in map(parse_devices, devices):
        rows = []
        choices: list[float | None] = [None] if count == 1 or not thresholds else [*thresholds]
        for threshold in choices:
            plan = plan_of(count, threshold, layout)
            if overlap == "auto":
                mechanism = choose_overlap(workload, machine, plan)[0]
                plan = msgspec.structs.replace(plan, overlap=mechanism)
            row = _point(workload, machine, plan, relative_uncertainty)
            ratio = row["images_per_s"] / single.images_per_s
            rows.append(row | {"predicted_speedup": ratio if math.isfinite(ratio) else float(count)})
        points += rows
        row = min(rows, key=lambda point: float(point["predicted_step_s"]))
        speedup = row["predicted_speedup"]
        keys = ("devices", "layout", "fusion_threshold_bytes", "overlap", "buckets", "predicted_step_s", "images_per_s")
        best.append({key: row[key] for key in keys} | {"speedup": speedup, "scaling_efficiency": speedup / count})
    scaling = "weak" if global_batch is None else "strong"
    return points, {
        "scaling": scaling,
        "wire_dtype": wire_dtype,
        "best": best,
        "extrapolated": any(point["extrapolated"] for point in points),
    }


def default_algorithm(machine: Machine, wire_dtype: str | None = None) -> str:
    """``auto`` or MPI's own where the machine has a table of it, else its first table's algorithm, else ``ring``.

    With 16 bits on the wire the first of those that can send them, else ``direct``.
    """
    names = [table.algorithm for table in machine.allreduce]
    if wire_dtype in SIXTEEN_BITS:
        return next((name for name in names if name in SIXTEEN_BIT_ALGORITHMS), "direct")
    return next((name for name in ("auto", "mpi", *names) if name in names), "ring")


def _point(workload: Workload, machine: Machine, plan: Plan, relative_uncertainty: float) -> Record:
    predicted: Prediction = predict(workload, machine, plan)
    low_s, high_s = interval(predicted, machine, workload, relative_uncertainty)
    needed = memory(workload, plan, machine)
    has_threshold = plan.devices > 1 and plan.fusion_rule in THRESHOLD_RULES
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
        "predicted_exposed_communication_s": predicted.exposed_communication_s,
        "images_per_s": predicted.images_per_s,
        "calibrated_on": machine.calibrated_on,
        "extrapolated": predicted.extrapolated,
        "memory_bytes": needed.parts() | {"total": needed.total},
        "fits": needed.fits,
    }
