"""What tuning says: its tables, its records for programs, its sentences, and the line to paste."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec

from dpsim.frameworks import Framework
from dpsim.model.ranking import LEAST_SHARE, Growth, Tuned, Tuning
from dpsim.model.rows import PredictedRow, Ratio
from dpsim.plan import Plan
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.report.advice import MEASUREMENTS
from dpsim.report.prediction import declared
from dpsim.report.table import Column
from dpsim.report.words import counted, devices_name, enumerated, percent
from dpsim.units import ITEM_BYTES, format_duration, format_size
from dpsim.workload import Workload

Record = dict[str, Any]
_CAPS = 4
"""The caps that the table shows beside the default, and that sentences name."""


def cap_bytes(plan: Plan) -> str:
    """Return the bucket cap of a plan as tables write it; 0 is one bucket a tensor."""
    size = format_size(plan.threshold_bytes)
    return f"{size} (a bucket a tensor)" if size == "0" else size


def setting(plan: Plan, default: Plan) -> str:
    """Return what a plan has other than the default one: ``bucket cap 4 MiB, local batch 128``."""
    parts = []
    if plan.fusion_threshold_bytes != default.fusion_threshold_bytes:
        parts.append(f"bucket cap {cap_bytes(plan)}")
    if plan.local_batch != default.local_batch:
        parts.append(f"local batch {plan.local_batch:g}")
    if plan.accumulate != default.accumulate:
        parts.append(counted(plan.accumulate, "micro-batch").replace("batchs", "batches"))
    return ", ".join(parts) or (
        f"default: bucket cap {cap_bytes(plan)}, local batch {plan.local_batch:g}"
        + f", {plan.accumulate} micro-batches" * (plan.accumulate > 1)
    )


def records(tuning: Tuning) -> list[Record]:
    """Return every option of every number of devices as a flat record; ``field`` is what it varies."""
    options_of_all = []
    for tuned in tuning.tuned:
        lists = {"fusion_threshold_bytes": tuned.caps, "local_batch": tuned.batches, "accumulate": tuned.accumulations}
        for field, options in (lists | {"cap and batch": (tuned.together,)}).items():
            options_of_all += [_record(option, tuned, field) for option in options]
    return options_of_all


def _record(row: PredictedRow, tuned: Tuned, field: str) -> Record:
    names = ("fusion_threshold_bytes", "local_batch", "buckets", "predicted_step_s", "extrapolated")
    default = tuned.default.plan
    return (
        msgspec.structs.asdict(row.plan)
        | {"field": field, "setting": setting(row.plan, default)}
        | row.record(*names, "images_per_s")
        | {"default": row.plan == default, **_ratio("gain", row.gain)}
    )


def _ratio(name: str, ratio: Ratio) -> Record:
    return {name: ratio.value, f"{name}_low": ratio.low, f"{name}_high": ratio.high, f"{name}_certain": ratio.certain}


def growth_records(tuning: Tuning) -> list[Record]:
    """Return what each number of devices brings over the one before it."""
    tuned = {each.default.plan.devices: each for each in tuning.tuned}
    return [
        {
            "devices": each.more.devices,
            "layout": each.more.layout or str(each.more.devices),
            "fewer_devices": each.fewer.devices,
            "fewer_layout": each.fewer.layout or str(each.fewer.devices),
            "images_per_s": tuned[each.more.devices].default.images_per_s,
            "best_cap": cap_bytes(tuned[each.more.devices].caps[0].plan),
            "share": each.share,
            "pays": each.pays,
            **_ratio("cap_gain", tuned[each.more.devices].caps[0].gain),
            **_ratio("speedup", each.speedup),
        }
        for each in tuning.growth
    ]


def summary(tuning: Tuning, framework: Framework, workload: Workload) -> Record:
    """Return the answer for programs: what is advised on the most devices that pay, and the line to paste."""
    tuned = tuning.advised
    sentence, line = answer(tuned, framework, workload)
    return {
        "devices": tuned.default.plan.devices,
        "growth": growth_records(tuning),
        "advised": _record(tuned.advised, tuned, "fusion_threshold_bytes"),
        "undecided": tuned.undecided,
        "answer": sentence,
        "line": line,
        "from_script": tuning.script.sentence,
    }


def shown(tuned: Tuned) -> list[Record]:
    """Return the rows of the table of one number of devices: the default, the best caps, every batch, ..."""
    caps = [option for option in tuned.caps if option is not tuned.default][:_CAPS]
    rest = [*tuned.batches, *tuned.accumulations, tuned.together]
    plans = {option.plan: option for option in (tuned.default, *caps, *rest)}
    return [_record(option, tuned, "") for option in plans.values()]


def columns(rows: Sequence[Record]) -> tuple[Column[Record], ...]:
    """Return the columns of the table of one number of devices."""
    differ = len({row["extrapolated"] for row in rows}) > 1
    return (
        Column(head="setting", cell=lambda row: row["setting"], left=True),
        *declared("buckets", "predicted_step_s"),
        Column(head="samples/s", cell=lambda row: _speed(row["images_per_s"])),
        Column(head="gain", cell=lambda row: "" if row["default"] else f"{row['gain']:.2f}x"),
        Column(head="90% interval", cell=lambda row: "" if row["default"] else _ends(row, "gain")),
        Column(head="", cell=_verdict, left=True),
        Column(head="", cell=lambda row: "extrapolated" * row["extrapolated"], left=True, shown=differ),
    )


def _verdict(row: Record) -> str:
    if row["default"]:
        return ""
    return "faster" if row["gain_certain"] else "slower" if row["gain_high"] < 1 else "no certain gain"


def growth_columns() -> tuple[Column[Record], ...]:
    """Return the columns of the table of devices."""
    return (
        Column(head="devices", cell=lambda row: row["layout"], left=True),
        Column(head="best cap", cell=lambda row: row["best_cap"]),
        Column(head="its gain", cell=lambda row: f"{row['cap_gain']:.2f}x ({_ends(row, 'cap_gain')})"),
        Column(head="samples/s", cell=lambda row: _speed(row["images_per_s"])),
        Column(head="speedup", cell=lambda row: f"{row['speedup']:.2f}x ({_ends(row, 'speedup')})"),
        Column(head="over", cell=lambda row: row["fewer_layout"], left=True),
        Column(head="of the added", cell=lambda row: percent(row["share"])),
        Column(head="", cell=lambda row: "pays" if row["pays"] else "does not pay", left=True),
    )


def _speed(samples_per_s: float) -> str:
    return f"{samples_per_s:,.0f}" if samples_per_s >= 1000 else f"{samples_per_s:.4g}"


def _ends(row: Record, name: str) -> str:
    return f"{row[f'{name}_low']:.2f}-{row[f'{name}_high']:.2f}"


def sentences(tuning: Tuning, *, decide: str = "") -> Iterator[str]:
    """Yield what follows from the tables; ``decide`` is the command that would decide what is not certain."""
    tuned = tuning.advised
    yield _devices(tuning.growth, tuning.first_not_paying)
    best = tuned.caps[0]
    near = [cap_bytes(each.plan) for each in tuned.as_fast]
    if near and len(near) == len(tuned.caps) - 1:
        yield f"No bucket cap can be told from the fastest, {cap_bytes(best.plan)}."
    elif near:
        names = enumerated(near) if len(near) <= _CAPS else f"{enumerated(near[:_CAPS])} and {len(near) - _CAPS} more"
        yield f"Bucket caps of {names} may be as fast as the fastest, {cap_bytes(best.plan)}."
    yield from _batches(tuned)
    if tuned.undecided is not None:
        subject, remedy = MEASUREMENTS[tuned.undecided]
        command = f"{remedy} would decide" + f": {decide}" * bool(decide)
        yield f"It is not certain that {cap_bytes(best.plan)} is faster. Most of that is {subject}; {command}."


def _devices(growth: Sequence[Growth], stop: Growth | None) -> str:
    last = growth[-1]
    if stop is None:
        return (
            f"All {devices_name(last.more.devices)} pay: over {last.fewer.devices} they train"
            f" {_times(last.speedup)} as many samples per second. Those added bring {percent(last.share)} of what"
            " as many alone would."
        )
    why = (
        "which is slower"
        if stop.speedup.high < 1
        else "no certain gain"
        if not stop.speedup.certain
        else f"{percent(stop.share)} of what as many alone would add (less than {LEAST_SHARE:.0%} does not pay)"
    )
    return (
        f"Beyond {devices_name(stop.fewer.devices)} more stop paying: {stop.more.devices} train"
        f" {_times(stop.speedup)} as many samples per second, {why}."
    )


def _batches(tuned: Tuned) -> Iterator[str]:
    best = tuned.batches[0], tuned.accumulations[0]
    yield from _batch_sentence(tuned.default.plan, {each.plan: _times(each.gain) for each in best if each.gain.certain})


def measured_batches(rows: Sequence[Record]) -> Iterator[str]:
    """Yield the sentence of the batch and the accumulation that were measured to be faster by more than the noise."""
    default: Plan = next(row["plan"] for row in rows if row["default"])
    with_default_cap = [row for row in rows if row["plan"].fusion_threshold_bytes == default.fusion_threshold_bytes]
    gains = {
        row["plan"]: f"{row['gain']:.2f} times (noise {percent(row['noise'])})"
        for row in with_default_cap
        if row["gain"] > 1 + row["noise"]
    }
    yield from _batch_sentence(default, gains, "measured, ")


def _batch_sentence(default: Plan, gains: Mapping[Plan, str], how: str = "") -> Iterator[str]:
    """Yield the sentence of plans that have another batch or accumulation than the default; nothing of no plan."""
    parts = [
        f"a local batch of {plan.local_batch:g} trains {gain}"
        if plan.accumulate == default.accumulate
        else f"{plan.accumulate} micro-batches a step (no_sync) train {gain}"
        for plan, gain in gains.items()
    ]
    if parts:
        yield (
            "The batch is yours to choose, since more samples a step change how training converges:"
            f" {how}{' and '.join(parts)} as many samples per second as the default."
        )


def _times(ratio: Ratio) -> str:
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f})"


def answer(tuned: Tuned, framework: Framework, workload: Workload) -> tuple[str, str]:
    """Return the one sentence of the answer and the line to paste, which is empty where the default is to be left."""
    devices = devices_name(tuned.default.plan.devices)
    option = tuned.advised
    if option is tuned.default:
        return f"No bucket cap is certainly better than {framework.title}'s default on {devices}: leave it.", ""
    return (
        f"Set {framework.title}'s bucket cap to {cap_bytes(option.plan)}: {devices} train {_times(option.gain)} as many"
        " samples per second as with the default.",
        paste(option.plan, framework, workload),
    )


def paste(plan: Plan, framework: Framework, workload: Workload) -> str:
    """Return the line that sets a plan's bucket cap in a framework."""
    largest = max(workload.tensors, key=lambda tensor: tensor.size_bytes)
    return framework.line(plan.threshold_bytes, ITEM_BYTES[largest.dtype])


def measured_point(comparison: Comparison, plan: Plan) -> ComparedPoint | None:
    """Return what was measured of a plan; ``None`` where it was not."""
    key = _key(plan)
    on_several = (point for point in comparison.scored if point.devices > 1)
    settings = ((point, (point.setting, *point.predicted.same_buckets)) for point in on_several)
    return next((point for point, same in settings if any(_key(each.plan) == key for each in same)), None)


def _key(plan: Plan) -> tuple[float | None, int, int]:
    return plan.fusion_threshold_bytes, plan.global_batch, plan.accumulate


def measured_records(comparison: Comparison, tuned: Tuned) -> list[Record]:
    """Return what was measured of the default and of each option, with the gain that was predicted.

    ``noise`` is the largest of the A/A difference (``aa``: that of the medians of two runs of one setting) and of the
    half widths of the two medians' intervals.
    """
    default = measured_point(comparison, tuned.default.plan)
    assert default is not None
    every = (tuned.default, *tuned.caps, *tuned.batches, *tuned.accumulations, tuned.together)
    measured = {each.plan: (each, measured_point(comparison, each.plan)) for each in every}
    caps = [each.plan for each in tuned.caps]
    return [
        {
            "setting": setting(option.plan, tuned.default.plan),
            "default": point is default,
            "cap_alone": option.plan in caps,
            "plan": option.plan,
            "measured_step_s": point.measured_step_s,
            "images_per_s": 1 / point.measured_s_per_sample,
            "gain": default.measured_s_per_sample / point.measured_s_per_sample,
            "predicted_gain": option.gain.value,
            "noise": max(default.measured_noise, point.measured_noise),
            "aa": point.noise or 0.0,
        }
        for option, point in measured.values()
        if point is not None
    ]


def measured_columns() -> tuple[Column[Record], ...]:
    """Return the columns of the table of what was measured."""
    return (
        Column(head="setting", cell=lambda row: row["setting"], left=True),
        Column(head="measured step", cell=lambda row: format_duration(row["measured_step_s"])),
        Column(head="samples/s", cell=lambda row: _speed(row["images_per_s"])),
        Column(head="gain", cell=lambda row: "" if row["default"] else f"{row['gain']:.3f}x"),
        Column(head="predicted", cell=lambda row: "" if row["default"] else f"{row['predicted_gain']:.3f}x"),
        Column(head="noise", cell=lambda row: "" if row["default"] else percent(row["noise"])),
    )


def regret_sentence(regret: float, rows: Sequence[Record]) -> str:
    """Return what following the prediction costs, by what was measured."""
    return (
        f"The advised cap is {percent(max(regret, 0.0))} slower than the best of those measured, chosen on other rounds"
        f" than timed; two runs of one setting differ by {percent(max(row['aa'] for row in rows))}."
    )


def measured_answer(rows: Sequence[Record], framework: Framework, workload: Workload) -> tuple[str, str]:
    """Return the sentence of what was measured and the line to paste; batches are the user's to choose."""
    caps = [row for row in rows if row["cap_alone"]]
    best = max(caps, key=lambda row: row["gain"])
    plan: Plan = best["plan"]
    devices = devices_name(plan.devices)
    if best["default"] or best["gain"] <= 1 + best["noise"]:
        return (
            f"No bucket cap was faster than {framework.title}'s default on {devices} by more than the noise: leave it.",
            "",
        )
    return (
        f"Set {framework.title}'s bucket cap to {cap_bytes(plan)}: measured, {devices} train {best['gain']:.2f} times"
        f" as many samples per second as with the default (noise {percent(best['noise'])}).",
        paste(plan, framework, workload),
    )
