"""The tables of compared runs: the settings, the means, the environments, and what was not compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from dpsim.grouping import grouped
from dpsim.records.run_comparison import Row, RunComparison
from dpsim.report.content import environment_facts
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted, field_name, milliseconds, percent
from dpsim.units import format_duration, format_size

_UNITS = {"step": ("ms", 1e3), "allreduce": ("us", 1e6)}
_SAME_NOTE = "A difference is not refused: it may be what is compared."
Rows = list[Row]
"""The points of one setting, one for each run that has it beside the first."""
_HEADS = {
    "system": "system",
    "backend": "backend",
    "model": "model",
    "devices": "devices",
    "layout": "layout",
    "global_batch": "batch",
    "fusion_rule": "rule",
    "fusion_threshold_bytes": "threshold",
    "size_bytes": "size",
    "algorithm": "algorithm",
    "overlap": "overlap",
    "wire_dtype": "messages",
    "accumulate": "micro-batches",
    "batch_norm": "batch norm",
    "leaves": "leaves",
    "strategy": "strategy",
    "compute_dtype": "products in",
    "optimizer": "optimizer",
    "cycle_s": "cycle",
    "dtype": "type",
    "in_place": "place",
    "cached": "buffers",
    "runtime": "runtime",
    "compute": "computation",
    "network": "network",
}
"""The heads of the columns of fields, in the order in which a setting's name has them."""
_IN_TITLES = ("system", "network", "layout")
"""Fields without a column: those of groups, and the layout, which stands in the column of devices."""
_CELLS: dict[str, Callable[[Any], str]] = {
    "fusion_threshold_bytes": lambda value: "" if value is None else format_size(value),
    "size_bytes": format_size,
    "cycle_s": lambda value: f"cycle {format_duration(value)}",
    "wire_dtype": lambda value: f"messages {value or 'as computed'}",
    "compute_dtype": "products in {}".format,
    "in_place": lambda value: "in place" if value else "out of place",
    "cached": lambda value: "cached" if value else "",
}
_NAMES: dict[str, Callable[[Any], str]] = _CELLS | {
    "devices": lambda value: counted(value, "device"),
    "layout": lambda value: value if "x" in value else "",
    "overlap": lambda value: "no overlap" if value == "off" else f"overlap {value}",
    "global_batch": "batch {}".format,
    "accumulate": "micro-batches {}".format,
    "batch_norm": "batch norm {}".format,
    "leaves": "leaves {}".format,
    "compute": "computation {}".format,
}
"""How the value of a field is written in a column, and in the name of a setting; others as they are."""


def varying_fields(settings: Iterable[Mapping[str, Any]]) -> tuple[str, ...]:
    """Return the fields that do not have one value in all settings; without any, the number of devices."""
    listed = list(settings)
    names = dict.fromkeys((*_HEADS, *itertools.chain(*listed)))
    varying = [name for name in names if len({setting[name] for setting in listed if name in setting}) > 1]
    return tuple(varying) or ("devices",)


def setting_name(setting: Mapping[str, Any], fields: Iterable[str]) -> str:
    """Return ``2 devices, 64 KiB, ring, overlap thread``, of the given fields."""
    return ", ".join(part for name in fields if name in setting and (part := _NAMES.get(name, str)(setting[name])))


def _cell(setting: Mapping[str, Any], field: str) -> str:
    if field == "devices":
        return str(setting.get("layout") or setting.get(field, ""))
    return _CELLS.get(field, str)(setting[field]) if field in setting else ""


def group_name(points: Iterable[Row], group: str) -> str:
    """Return a group's name, marked where its network or its computation is emulated."""
    words = {"emulated_network": "emulated network", "emulated_compute": "emulated computation"}
    parts = [text for name, text in words.items() if any(p[name] for p in points if p["group"] == group)]
    return f"{group} ({', '.join(parts)})" if parts else group


def furthest(comparison: RunComparison, most: int | None = None) -> tuple[list[Rows], int]:
    """Return the points of each setting, one for each run that has it, and how many settings are left out.

    With ``most`` there are only so many settings: those that differ the most.
    """
    every = [*grouped(comparison.points, lambda point: tuple(point["setting"].items())).values()]
    differing = sorted(every, key=lambda rows: -max(abs(math.log(point["ratio"])) for point in rows))[:most]
    return [rows for rows in every if rows in differing], len(every) - len(differing)


def mean_text(mean: Row) -> str:
    """Return ``0.95 (0.93 to 0.97)``."""
    return f"{mean['ratio']:.3g} ({mean['low']:.3g} to {mean['high']:.3g})"


def settings_table(comparison: RunComparison, *, most: int | None = None) -> Table:
    """Return a row for each setting, grouped by network or system, with the columns of every run beside the first.

    With ``most`` only that many rows are shown: those that differ the most.
    """
    shown, left_out = furthest(comparison, most)
    first, *others = (run.label for run in comparison.runs)
    unit, scale = _UNITS[comparison.quantity]
    note = (
        f"Times are medians of one {comparison.quantity}. Ratio = time / time in {first} with its 95% interval: below "
        "1 is faster. Unclear: the interval contains 1, or the ratio is within the noise, the larger A/A "
        "difference of the two runs."
    )
    if left_out:
        note += f" {left_out} more settings differ less than these; --json and --output have all of them."
    fields = varying_fields(point["setting"] for point in comparison.points)
    columns = [_field_column(name, comparison) for name in fields if name not in _IN_TITLES]
    columns.append(
        Column(head=f"{first} {unit}", cell=lambda rows: milliseconds(rows[0]["a_time_s"] * scale / 1e3), dispensable=2)
    )
    return table(
        title="Settings that differ the most" if left_out else "Settings in common",
        columns=[*columns, *(column for label in others for column in _run_columns(label, unit, scale, len(others)))],
        sections={
            group_name(comparison.points, group): [rows for rows in shown if rows[0]["group"] == group]
            for group in dict.fromkeys(rows[0]["group"] for rows in shown)
        },
        strong=lambda rows: any(point["verdict"] != "not_distinguishable" for point in rows),
        note=note,
    )


def _field_column(name: str, comparison: RunComparison) -> Column[Rows]:
    values = [point["setting"].get(name) for point in comparison.points]
    words = any(isinstance(value, str | bool) for value in values)
    return Column(
        head=_HEADS.get(name) or field_name(name), cell=lambda rows: _cell(rows[0]["setting"], name), left=words
    )


def _run_columns(label: str, unit: str, scale: float, count: int) -> tuple[Column[Rows], ...]:
    """Return the columns of a run beside the first."""
    of = f" {label}" if count > 1 else ""

    def cell(text: Callable[[Row], str]) -> Callable[[Rows], str]:
        return lambda rows: next((text(point) for point in rows if point["b"] == label), "")

    def ratio(p: Row) -> str:
        return mean_text({"ratio": p["ratio"], "low": p["ratio_low"], "high": p["ratio_high"]})

    def noise(p: Row) -> str:
        return "unknown" if p["noise"] is None else percent(p["noise"])

    return (
        Column(head=f"{label} {unit}", cell=cell(lambda p: milliseconds(p["b_time_s"] * scale / 1e3)), dispensable=2),
        Column(head=f"ratio{of} (95%)", cell=cell(ratio), left=True),
        Column(head=f"noise{of}", cell=cell(noise), dispensable=3),
        Column(head=f"verdict{of}", cell=cell(_verdict), left=True, dispensable=int(count > 1)),
    )


def _verdict(point: Row) -> str:
    return "unclear" if point["verdict"] == "not_distinguishable" else str(point["verdict"])


def means_table(comparison: RunComparison) -> Table:
    """Return the geometric means: of each group, and over all of them."""
    sections = {}
    for pair in comparison.pairs:
        points = pair_points(comparison, pair)
        everything = "all settings, real and emulated" if mixed(points) else "all settings"
        groups = {group_name(points, mean["name"]): mean for mean in pair["groups"]} if len(pair["groups"]) > 1 else {}
        means = {**groups, everything: pair["overall"]}
        sections[f"{pair['b']} against {pair['a']}"] = [mean | {"over": name} for name, mean in means.items()]
    counts = {"faster": "faster", "slower": "slower", "not_distinguishable": "not distinguishable"}
    return table(
        title="Geometric means",
        columns=(
            Column(head="over", cell=lambda mean: mean["over"], left=True),
            Column(head="settings", cell=lambda mean: str(mean["settings"])),
            Column(head="ratio (95%)", cell=mean_text, left=True),
            *(Column(head=head, cell=lambda mean, name=name: str(mean[name])) for name, head in counts.items()),  # type: ignore[misc]
        ),
        sections=sections,
        strong=lambda mean: mean["name"] == "all",
        note="Whole rounds of each run are resampled, the same ones for all settings of a run.",
    )


def pair_points(comparison: RunComparison, pair: Row) -> list[Row]:
    """Return the points of a pair of runs."""
    return [point for point in comparison.points if (point["a"], point["b"]) == (pair["a"], pair["b"])]


def mixed(points: Iterable[Row]) -> bool:
    """Return whether settings are partly on real and partly on emulated networks."""
    return len({point["emulated_network"] for point in points}) > 1


def environments(comparison: RunComparison) -> dict[str, list[str]]:
    """Return what each run says of its environment and its declaration, by the name of the fact."""
    facts = [dict(environment_facts(run.environment)) | run.declared for run in comparison.runs]
    return {name: [each.get(name, "none") for each in facts] for name in dict.fromkeys(itertools.chain(*facts))}


def environments_table(comparison: RunComparison) -> Table:
    """Return the environments and the declarations of the runs; what differs is stressed."""
    facts = environments(comparison)
    differing = [name for name, values in facts.items() if len(set(values)) > 1]
    sections = {"what differs": differing, "what is the same in all": [name for name in facts if name not in differing]}
    return table(
        title="Environments",
        columns=(
            Column(head="", cell=lambda name: name, left=True),
            *(
                Column(head=run.label, cell=lambda name, i=i: facts[name][i], left=True)  # type: ignore[misc]
                for i, run in enumerate(comparison.runs)
            ),
        ),
        sections={title: names for title, names in sections.items() if names},
        strong=lambda name: name in differing,
        note=_SAME_NOTE,
    )


def differences_table(comparison: RunComparison) -> Table | None:
    """Return what differs between the environments, a line for each run, or ``None`` where nothing differs.

    A table with a column for each run would be wider than a terminal.
    """
    rows = [
        ("" if number else name, run.label, values[number])
        for name, values in environments(comparison).items()
        if len(set(values)) > 1
        for number, run in enumerate(comparison.runs)
    ]
    heads = ("", "run", "value")
    columns = [Column(head=head, cell=lambda row, i=i: row[i], left=True) for i, head in enumerate(heads)]  # type: ignore[misc]
    title = "Environments: what differs"
    return table(title=title, columns=columns, sections={"": rows}, note=_SAME_NOTE) if rows else None


def not_compared_table(comparison: RunComparison) -> Table | None:
    """Return the settings that were not compared, with the reasons; ``None`` where there are none."""
    if not comparison.not_compared:
        return None
    fields = varying_fields([each["setting"] for each in comparison.not_compared])
    return table(
        title="Not compared",
        columns=(
            Column(head="setting", cell=lambda each: setting_name(each["setting"], fields), left=True),
            Column(head="why", cell=lambda each: each["reason"], left=True),
        ),
        sections=grouped(comparison.not_compared, lambda each: f"{each['b']} against {each['a']}"),
    )
