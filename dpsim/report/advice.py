"""What advice says: its table, its records for programs, and its sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from dpsim.algorithms import ALGORITHMS
from dpsim.model.advise import Advice
from dpsim.model.ranking import Refusal
from dpsim.model.rows import PredictedRow
from dpsim.plan import Plan
from dpsim.report.prediction import band, declared
from dpsim.report.table import Column
from dpsim.report.words import FORMS, enumerated, interval_name, listed, percent
from dpsim.units import format_duration, format_size
from dpsim.workload import Workload

Record = dict[str, Any]
_OF_COLLECTIVES = "a calibration of collectives on as many devices"
MEASUREMENTS = {
    "speed": ("the machine's speed from one run to the next", "a longer calibration"),
    "compute": ("the layer times", "a profile at the local batches of both"),
    "network": ("the times of collectives", _OF_COLLECTIVES),
    "overlapped": ("the times of collectives beside computation", _OF_COLLECTIVES),
    "loss": ("the computing time that collectives beside it take away", _OF_COLLECTIVES),
    "overhead": ("what the host adds to each collective", _OF_COLLECTIVES),
    "fixed_share": ("what a step takes whatever the batch", "a profile at the local batches of both"),
    "model": ("the model's own error, which no calibration makes smaller", "some steps of training with each of them"),
}
"""What is uncertain, and what would measure it, by the names of ``Advice.undecided``."""


def typed(plan: Plan) -> str:
    """Return the flags that choose a plan's strategy and settings, as one types them."""
    flags = {"strategy": plan.strategy, "accumulate": str(plan.accumulate) if plan.accumulate > 1 else ""}
    if plan.data_devices > 1:
        threshold = plan.fusion_threshold_bytes
        flags |= {"fusion-threshold": "" if threshold is None else format_size(threshold).replace(" ", "")}
        flags |= {"set": f"overlap={plan.overlap}"}
    return " ".join(f"--{name} {value}" for name, value in flags.items() if value)


def columns(advice: Advice) -> tuple[Column[Record], ...]:
    """Return the columns of the table, whose rows are ``records``."""
    level = advice.advised.prediction.interval_level if advice.advised else None
    return (
        *declared("predicted_step_s"),
        Column(
            head=interval_name(level),
            cell=lambda row: (
                "-" if row["predicted_low_s"] is None else band(row["predicted_low_s"], row["predicted_high_s"])
            ),
        ),
        *declared("images_per_s"),
        Column(head="memory", cell=lambda row: _memory(row, advice.machine.memory_bytes)),
        Column(head="fit", cell=_fit, left=True),
        Column(head="settings", cell=lambda row: row["flags"], left=True),
    )


def _memory(row: Record, available: float) -> str:
    needed = FORMS["memory"](row["memory_bytes"])
    return needed if math.isinf(available) else f"{needed} of {format_size(available)}"


def _fit(row: Record) -> str:
    if row["fits"] is None:
        return "not known"
    return "fits" if row["fits"] else f"does not fit (needs {format_size(row['memory_bytes']['total'])})"


def records(advice: Advice, *, every: bool) -> list[Record]:
    """Return the best candidate of each strategy as flat records, or with ``every`` all that were priced.

    Intervals are those of the best ones alone.
    """
    rows = advice.candidates if every else advice.choices
    return [_record(row, with_interval=row in advice.choices) for row in rows]


def _record(row: PredictedRow, *, with_interval: bool) -> Record:
    interval = ("predicted_low_s", "predicted_high_s", "interval_level", "extrapolated")
    return (
        row.record("layout", "local_batch")
        | {"flags": typed(row.plan), "predicted_step_s": row.step_s}
        | {name: getattr(row, name) if with_interval else None for name in interval}
        | {name: getattr(row, name) for name in ("images_per_s", "memory_bytes", "fits")}
    )


def summary(advice: Advice, workload: Workload) -> Record:
    """Return what holds for all candidates: the advised one, those that may be as fast, and what was refused."""
    advised, over = advice.advised, advice.over_plain
    return {
        "advised": advised and typed(advised.plan),
        "speedup_over_data_parallel": over and over.value,
        "speedup_low": over and over.low,
        "speedup_high": over and over.high,
        "equally_fast": [typed(choice.plan) for choice in advice.equally_fast],
        "undecided": advice.undecided,
        "measure": measurement(advice, workload),
        "memory_available_bytes": advice.machine.memory_bytes,
        "least_memory_bytes": min(each.memory.total for each in advice.candidates),
        "refused": [
            {"strategies": refusal.strategies, "reason": refusal.error.given, "allowed": refusal.error.allowed}
            for refusal in advice.refusals
        ],
        "from_script": advice.script.sentence,
    }


def nothing_fits(advice: Advice) -> str:
    """Return what is said first where nothing fits, with the least memory that any plan needs; else nothing."""
    if advice.advised is not None:
        return ""
    least = min((each for each in advice.candidates), key=lambda each: each.memory.total)
    return (
        f"Nothing fits into the {format_size(advice.machine.memory_bytes)} that a device has. The least that any plan"
        f" needs is {format_size(least.memory.total)}: {typed(least.plan)}."
    )


def sentences(advice: Advice, workload: Workload) -> Iterator[str]:
    """Yield what follows from the table, as whole sentences."""
    if advice.advised is not None:
        yield _advised(advice)
        yield from _over_plain(advice)
        if others := advice.equally_fast:
            names = enumerated(choice.plan.strategy for choice in others)
            yield (
                f"{names} may be as fast: the intervals overlap, by more than what is uncertain about all plans alike."
            )
            subject, remedy = MEASUREMENTS.get(advice.undecided or "", ("the times of messages", _OF_COLLECTIVES))
            yield f"Most of that is {subject}; {remedy} would decide: {measurement(advice, workload)}"
    yield from _unknown_fit(advice)
    yield from map(_refused, advice.refusals)


def _advised(advice: Advice) -> str:
    assert advice.advised is not None
    plan, predicted = advice.advised.plan, advice.advised.prediction
    fastest = min(advice.choices, key=lambda choice: choice.rank)
    name = "plain data parallelism" if advice.advised is advice.plain else plan.strategy
    what = f"with {format_duration(predicted.step_s)} a step: {typed(plan)}"
    if fastest is not advice.advised:
        gain = predicted.step_s / fastest.prediction.step_s - 1
        return (
            f"The advice is {name}, {what}. The fastest is {fastest.plan.strategy}, by {percent(gain)}: less"
            " than predictions err by."
        )
    of_those = " of the plans that fit" if advice.advised.memory.fits else ""
    return f"The fastest{of_those} is {name}, {what}."


def _over_plain(advice: Advice) -> Iterator[str]:
    needed, over = advice.plain.memory, advice.over_plain
    if needed.fits is False:
        yield (
            f"Plain data parallelism does not fit: it needs at least {format_size(needed.total)} a device, which has"
            f" {format_size(advice.machine.memory_bytes)}."
        )
    elif over is not None and advice.advised is not advice.plain:
        ratio, low, high = over
        certain = "" if low > 1 else ", no certain gain"
        yield f"It is {ratio:.2f} times as fast as plain data parallelism ({low:.2f} to {high:.2f}{certain})."


def _unknown_fit(advice: Advice) -> Iterator[str]:
    if all(each.memory.fits is not None for each in advice.candidates):
        return
    if any(each.memory.activations is None for each in advice.candidates):
        yield (
            "Whether plans fit is not known: no layer of the workload file states activation_bytes_per_sample, and"
            " activations come on top (+)."
        )
    else:
        yield "Whether plans fit is not known: the machine file states no memory_bytes; --memory 16GiB does."


def _refused(refusal: Refusal) -> str:
    allowed = f" (allowed: {refusal.error.allowed})" * bool(refusal.error.allowed)
    return f"{listed(refusal.strategies)} cannot be used: {refusal.error.given}{allowed}."


def measurement(advice: Advice, workload: Workload) -> str | None:
    """Return the command that measures what would decide between the advised plan and the one that comes nearest."""
    if advice.advised is None or advice.undecided is None:
        return None
    plans = advice.advised.plan, advice.equally_fast[0].plan
    own = workload.source.startswith("dpsim profile: ")
    model = f"--model {workload.name}" if own else "--torch-script train.py"
    if advice.undecided == "compute":
        batches = ",".join(str(batch) for batch in sorted({math.ceil(plan.local_batch) for plan in plans}))
        return f"dpsim profile {model} --local-batch {batches} --output workload.json"
    where, batch = plans[0].layout or plans[0].devices, plans[0].global_batch
    if advice.undecided == "model" and not own:
        sharded = any(plan.parallelism.name == "zero3" for plan in plans)
        return f"dpsim sweep {model} --devices {plans[0].devices}{' --strategy zero3' * sharded}"
    if advice.undecided == "model":
        return f"dpsim train {model} --devices {where} --global-batch {batch} --steps 50 {typed(plans[0])}"
    plan = max(plans, key=lambda plan: (plan.data_devices > 1, len(plan.parallelism.collectives)))
    collective = plan.of_all_data if plan.data_devices > 1 else plan
    devices = collective.layout or collective.devices
    if ALGORITHMS.find(plan.algorithm).place == "elsewhere":
        return f"dpsim calibrate --from all_reduce_perf.txt --devices {devices} --output machine.json"
    return (
        f"dpsim calibrate --network {advice.machine.network} --devices {devices} --algorithm {plan.algorithm}"
        f" --strategy {plan.strategy}{' --budget 60s' * (advice.undecided == 'speed')} --output machine.json"
    )
