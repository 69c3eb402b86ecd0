"""What a training step would gain by a faster link, other buckets, accumulation, 16 bits, or another strategy."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import msgspec

from dpsim.dtypes import SIXTEEN_BITS
from dpsim.errors import ConfigError
from dpsim.fusion_rules import DDP_RULES
from dpsim.machine import Machine
from dpsim.model.explanation import Remedy
from dpsim.model.rows import PredictedRow
from dpsim.model.thresholds import plan_thresholds
from dpsim.plan import Plan
from dpsim.units import format_size
from dpsim.workload import Workload

_FASTER = (2, 10)
_MORE = (2, 8)
_LARGER_BATCH = 4
_LEAST_CAP_BYTES = 2.0**20


def remedies(workload: Workload, machine: Machine, plan: Plan, step_s: float) -> tuple[Remedy, ...]:
    """Return what each change of plan or machine is predicted to take off a step of ``step_s``, in seconds.

    The gain is that part of the step by which two predictions differ, and its interval that of their ratio. Where a
    change lets a step train more samples, its time is that of as many samples as now. Of several bucket caps the best
    is kept. Changes that cannot be predicted are left out.
    """
    now = PredictedRow(workload=workload, machine=machine, plan=plan)
    best: dict[str, Remedy] = {}
    for kind, text, changed_machine, changed in _changes(workload, machine, plan):
        with contextlib.suppress(ConfigError):
            then = now.replaced(machine=changed_machine, plan=changed)
            ratio = then.over(now, of_two_machines=changed_machine is not machine)
            gain_s, *ends = (step_s * (1 - 1 / each) for each in ratio)
            remedy = Remedy(text=text, gain_s=gain_s, low_s=min(ends), high_s=max(ends))
            if kind not in best or gain_s > best[kind].gain_s * (1 + 1e-3):
                best[kind] = remedy
    return tuple(best.values())


def _changes(workload: Workload, machine: Machine, plan: Plan) -> Iterator[tuple[str, str, Machine, Plan]]:
    """Yield (what it changes, in words, the machine, the plan) of each change."""
    for times in _FASTER:
        yield f"link {times}", f"a link {times} times as fast", faster(machine, times), plan
    if plan.fusion_rule in DDP_RULES and plan.parallelism.name == "data-parallel":
        for cap in filter(None, plan_thresholds(workload, machine, plan, _LEAST_CAP_BYTES)[1:]):
            text = f"buckets of {format_size(cap)} (bucket_cap_mb={cap / 2**20:g})"
            yield "buckets", text, machine, msgspec.structs.replace(plan, fusion_threshold_bytes=cap)
    for times in _MORE:
        more = {"accumulate": plan.accumulate * times, "global_batch": plan.global_batch * times}
        text = f"accumulation over {plan.accumulate * times} micro-batches (fewer, larger steps)"
        yield f"accumulation {times}", text, machine, msgspec.structs.replace(plan, **more)
    text = f"local batches {_LARGER_BATCH} times as large (fewer, larger steps)"
    larger = msgspec.structs.replace(plan, global_batch=plan.global_batch * _LARGER_BATCH)
    yield "batch", text, machine, larger
    in_sixteen = {plan.wire_dtype, workload.most_common_dtype("reduced")} & {*SIXTEEN_BITS}
    if not in_sixteen and plan.parallelism.name == "data-parallel":
        yield "16 bits", "gradients sent in 16 bits (fp16_compress_hook)", halved(machine), plan
    other = "data-parallel" if plan.parallelism.name != "data-parallel" else "zero1"
    with contextlib.suppress(ConfigError):
        yield "strategy", f"strategy {other}", machine, msgspec.structs.replace(plan, strategy=other)


def faster(machine: Machine, times: float) -> Machine:
    """Return a machine whose collectives take 1 / times as long: its tables, and the links between devices or nodes."""

    def table(each: object) -> object:
        return msgspec.structs.replace(each, time_s=tuple(t / times for t in each.time_s), p10_s=(), p90_s=())  # type: ignore[attr-defined, type-var]

    link = machine.link and msgspec.structs.replace(
        machine.link,
        bandwidth_bytes_per_s=machine.link.bandwidth_bytes_per_s * times,
        latency_s=machine.link.latency_s / times,
    )
    tables = {name: tuple(map(table, getattr(machine, name))) for name in ("allreduce", "halves", "overlap")}
    return msgspec.structs.replace(machine, link=link, **tables)


def halved(machine: Machine) -> Machine:
    """Return a machine on which messages have half of their bytes: what 16 bits save, without converting them."""

    def table(each: object) -> object:
        return msgspec.structs.replace(each, sizes_bytes=tuple(2 * size for size in each.sizes_bytes))  # type: ignore[attr-defined, type-var]

    link = machine.link and msgspec.structs.replace(
        machine.link, bandwidth_bytes_per_s=machine.link.bandwidth_bytes_per_s * 2
    )
    tables = {name: tuple(map(table, getattr(machine, name))) for name in ("allreduce", "halves", "overlap")}
    return msgspec.structs.replace(machine, link=link, **tables)
