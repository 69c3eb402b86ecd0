"""The tables of compared runs: the settings, the means, the environments, and what was not compared."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from dpsim.records.run_comparison import ComparedRun, MeanRatio, RatioPoint, RunComparison, RunPair, SettingValue
from dpsim.report.content import environment_facts
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted, milliseconds, percent
from dpsim.units import format_duration, format_size

_VERDICTS = {"faster": "faster", "slower": "slower", "not_distinguishable": "unclear"}
_UNITS = {"step": ("ms", 1e3), "allreduce": ("us", 1e6)}
_SAME_NOTE = "A difference is not refused: it may be what is compared."
Row = list[RatioPoint]


class _Words(NamedTuple):
    """How a field is written in the name of a setting, and in a column under ``head`` (empty: it has no column)."""

    head: str = ""
    name: Callable[[SettingValue], str] = str
    cell: Callable[[SettingValue], str] | None = None
    left: bool = True


def _size(value: SettingValue) -> str:
    return format_size(float(value or 0))


def _plainly(head: str, prefix: str = "", *, left: bool = True) -> _Words:
    return _Words(head, lambda value: f"{prefix or head} {value}", str, left)


_WORDS = {
    "system": _Words("system"),
    "backend": _Words("backend"),
    "model": _Words("model"),
    "devices": _Words("devices", lambda value: counted(int(value or 0), "device"), str, left=False),
    "layout": _Words(name=lambda value: str(value) if "x" in str(value) else ""),
    "global_batch": _plainly("batch", left=False),
    "fusion_rule": _Words("rule"),
    "fusion_threshold_bytes": _Words("threshold", _size, left=False),
    "size_bytes": _Words("size", _size, left=False),
    "algorithm": _Words("algorithm"),
    "overlap": _Words("overlap", lambda value: "no overlap" if value == "off" else f"overlap {value}", str),
    "wire_dtype": _Words("messages", lambda value: f"messages {value or 'as computed'}"),
    "accumulate": _plainly("micro-batches", left=False),
    "batch_norm": _plainly("batch norm"),
    "leaves": _plainly("leaves", left=False),
    "strategy": _Words("strategy"),
    "compute_dtype": _Words("products in", lambda value: f"products in {value}"),
    "optimizer": _Words("optimizer"),
    "cycle_s": _Words("cycle", lambda value: f"cycle {format_duration(float(value or 0))}", left=False),
    "dtype": _Words("type"),
    "in_place": _Words("place", lambda value: "in place" if value else "out of place"),
    "cached": _Words("buffers", lambda value: "cached" if value else ""),
    "runtime": _Words("runtime"),
    "compute": _plainly("computation"),
    "network": _Words(),
}
"""How each field is written, in the order in which a setting's name has them."""


def varying_fields(settings: Iterable[Mapping[str, SettingValue]]) -> tuple[str, ...]:
    """Return the fields that do not have one value in all settings; without any, the number of devices."""
    known = list(settings)
    names = [name for name in _WORDS if len({setting.get(name) for setting in known if name in setting}) > 1]
    return tuple(names) or ("devices",)


def setting_name(setting: Mapping[str, SettingValue], fields: Iterable[str]) -> str:
    """Return ``2 devices, 64 KiB, ring, overlap thread``, of the given fields."""
    return ", ".join(part for name in fields if name in setting and (part := _WORDS[name].name(setting[name])))


def _cell(setting: Mapping[str, SettingValue], field: str) -> str:
    if field == "devices":
        return str(setting.get("layout") or setting.get(field, ""))
    return (_WORDS[field].cell or _WORDS[field].name)(setting[field]) if field in setting else ""


def group_name(points: Iterable[RatioPoint], group: str) -> str:
    """Return a group's name, marked where its network or its computation is emulated."""
    members = [point for point in points if point.group == group]
    words = {"emulated_network": "emulated network", "emulated_compute": "emulated computation"}
    parts = [text for name, text in words.items() if any(getattr(point, name) for point in members)]
    return f"{group} ({', '.join(parts)})" if parts else group


def furthest(comparison: RunComparison, most: int | None = None) -> tuple[list[Row], int]:
    """Return the points of each setting, one for each run that has it, and how many settings are left out.

    With ``most`` there are only so many settings: those that differ the most.
    """
    by_setting: dict[tuple[tuple[str, SettingValue], ...], Row] = {}
    for point in comparison.points:
        by_setting.setdefault(tuple(point.setting.items()), []).append(point)
    rows = list(by_setting.values())
    differing = sorted(rows, key=lambda row: -max(abs(math.log(point.ratio)) for point in row))[:most]
    return [row for row in rows if row in differing], len(rows) - len(differing)


def ratio_text(ratio: float, low: float, high: float) -> str:
    """Return ``0.95 (0.93 to 0.97)``."""
    return f"{ratio:.3g} ({low:.3g} to {high:.3g})"


def settings_table(comparison: RunComparison, *, most: int | None = None) -> Table:
    """Return a row for each setting, grouped by network or system, with the columns of every run beside the first.

    With ``most`` only that many rows are shown: those that differ the most.
    """
    rows, left_out = furthest(comparison, most)
    fields = varying_fields(point.setting for point in comparison.points)
    first, others = comparison.runs[0].label, [run.label for run in comparison.runs[1:]]
    unit, scale = _UNITS[comparison.quantity]
    note = (
        f"Times are medians of one {comparison.quantity}. Ratio = time / time in {first} with its 95% interval: below "
        "1 is faster. Unclear: the interval contains 1, or the ratio is within the noise, the larger A/A "
        "difference of the two runs."
    )
    if left_out:
        note += f" {left_out} more settings differ less than these; --json and --output have all of them."

    columns: list[Column[Row]] = [
        Column(head=_WORDS[name].head, cell=lambda row, name=name: _cell(row[0].setting, name), left=_WORDS[name].left)  # type: ignore[misc]
        for name in fields
        if name != "system" and _WORDS[name].head
    ]
    columns.append(
        Column(head=f"{first} {unit}", cell=lambda row: milliseconds(row[0].a_time_s * scale / 1e3), dispensable=2)
    )
    return table(
        title="Settings that differ the most" if left_out else "Settings in common",
        columns=[*columns, *(column for label in others for column in _run_columns(label, unit, scale, len(others)))],
        sections={
            group_name(comparison.points, group): [row for row in rows if row[0].group == group]
            for group in dict.fromkeys(row[0].group for row in rows)
        },
        strong=lambda row: any(point.verdict != "not_distinguishable" for point in row),
        note=note,
    )


def _run_columns(label: str, unit: str, scale: float, count: int) -> tuple[Column[Row], ...]:
    """Return the columns of a run beside the first."""
    of = f" {label}" if count > 1 else ""

    def cell(text: Callable[[RatioPoint], str]) -> Callable[[Row], str]:
        return lambda row: next((text(point) for point in row if point.b == label), "")

    return (
        Column(head=f"{label} {unit}", cell=cell(lambda p: milliseconds(p.b_time_s * scale / 1e3)), dispensable=2),
        Column(head=f"ratio{of} (95%)", cell=cell(lambda p: ratio_text(p.ratio, p.ratio_low, p.ratio_high)), left=True),
        Column(
            head=f"noise{of}", cell=cell(lambda p: "unknown" if p.noise is None else percent(p.noise)), dispensable=3
        ),
        Column(head=f"verdict{of}", cell=cell(lambda p: _VERDICTS[p.verdict]), left=True, dispensable=int(count > 1)),
    )


def means_table(comparison: RunComparison) -> Table:
    """Return the geometric means: of each group, and over all of them."""
    sections: dict[str, list[tuple[str, MeanRatio]]] = {}
    for pair in comparison.pairs:
        points = pair_points(comparison, pair)
        name = "all settings, real and emulated" if mixed(comparison, pair) else "all settings"
        rows = [(group_name(points, mean.name), mean) for mean in pair.groups if len(pair.groups) > 1]
        rows.append((name, pair.overall))
        sections[f"{pair.b} against {pair.a}"] = rows
    return table(
        title="Geometric means",
        columns=(
            Column(head="over", cell=lambda row: row[0], left=True),
            Column(head="settings", cell=lambda row: str(row[1].settings)),
            Column(head="ratio (95%)", cell=lambda row: ratio_text(row[1].ratio, row[1].low, row[1].high), left=True),
            Column(head="faster", cell=lambda row: str(row[1].faster)),
            Column(head="slower", cell=lambda row: str(row[1].slower)),
            Column(head="not distinguishable", cell=lambda row: str(row[1].not_distinguishable)),
        ),
        sections=sections,
        strong=lambda row: row[1].name == "all",
        note="Whole rounds of each run are resampled, the same ones for all settings of a run.",
    )


def pair_points(comparison: RunComparison, pair: RunPair) -> list[RatioPoint]:
    """Return the points of a pair of runs."""
    return [point for point in comparison.points if (point.a, point.b) == (pair.a, pair.b)]


def mixed(comparison: RunComparison, pair: RunPair) -> bool:
    """Return whether the settings of a pair of runs are partly on real and partly on emulated networks."""
    return len({point.emulated_network for point in pair_points(comparison, pair)}) > 1


def _facts(run: ComparedRun) -> dict[str, str]:
    return dict(environment_facts(run.environment)) | run.declared


def differing(runs: Sequence[ComparedRun]) -> dict[str, bool]:
    """Return the names of all facts of the runs' environments and declarations, and whether each differs."""
    facts = [_facts(run) for run in runs]
    names = dict.fromkeys(name for each in facts for name in each)
    return {name: len({each.get(name, "") for each in facts}) > 1 for name in names}


def environments_table(comparison: RunComparison) -> Table:
    """Return the environments and the declarations of the runs; what differs is stressed."""
    names = differing(comparison.runs)
    facts = {run.label: _facts(run) for run in comparison.runs}
    titles = {"what differs": True, "what is the same in all": False}
    return table(
        title="Environments",
        columns=(
            Column(head="", cell=lambda name: name, left=True),
            *(
                Column(head=label, cell=lambda name, label=label: facts[label].get(name, "none"), left=True)  # type: ignore[misc]
                for label in facts
            ),
        ),
        sections={
            title: rows
            for title, other in titles.items()
            if (rows := [n for n, differs in names.items() if differs is other])
        },
        strong=lambda name: names[name],
        note=_SAME_NOTE,
    )


def differences_table(comparison: RunComparison) -> Table | None:
    """Return what differs between the environments, a line for each run, or ``None`` where nothing differs.

    A table with a column for each run would be wider than a terminal.
    """
    rows = [
        ("" if number else name, run.label, _facts(run).get(name, "none"))
        for name, differs in differing(comparison.runs).items()
        if differs
        for number, run in enumerate(comparison.runs)
    ]
    if not rows:
        return None
    heads = ("", "run", "value")
    return table(
        title="Environments: what differs",
        columns=[Column(head=head, cell=lambda row, i=i: row[i], left=True) for i, head in enumerate(heads)],  # type: ignore[misc]
        sections={"": rows},
        note=_SAME_NOTE,
    )


def not_compared_table(comparison: RunComparison) -> Table | None:
    """Return the settings that were not compared, with the reasons; ``None`` where there are none."""
    if not comparison.not_compared:
        return None
    fields = varying_fields([each.setting for each in comparison.not_compared])
    pairs = dict.fromkeys((each.b, each.a) for each in comparison.not_compared)
    return table(
        title="Not compared",
        columns=(
            Column(head="setting", cell=lambda each: setting_name(each.setting, fields), left=True),
            Column(head="why", cell=lambda each: each.reason, left=True),
        ),
        sections={
            f"{b} against {a}": [each for each in comparison.not_compared if (each.b, each.a) == (b, a)]
            for b, a in pairs
        },
    )
