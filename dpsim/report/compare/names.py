"""How settings of compared runs are named: only by the fields in which they differ."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from dpsim.records.run_comparison import RatioPoint, RunComparison, SettingValue
from dpsim.report.words import counted
from dpsim.units import format_duration, format_size

_WORDS: dict[str, Callable[[SettingValue], str]] = {
    "system": str,
    "backend": str,
    "model": str,
    "devices": lambda value: counted(int(value or 0), "device"),
    "layout": lambda value: str(value) if "x" in str(value) else "",
    "global_batch": lambda value: f"batch {value}",
    "fusion_rule": str,
    "fusion_threshold_bytes": lambda value: format_size(float(value or 0)),
    "size_bytes": lambda value: format_size(float(value or 0)),
    "algorithm": str,
    "overlap": lambda value: "no overlap" if value == "off" else f"overlap {value}",
    "wire_dtype": lambda value: f"messages {value or 'as computed'}",
    "accumulate": lambda value: f"micro-batches {value}",
    "batch_norm": lambda value: f"batch norm {value}",
    "leaves": lambda value: f"leaves {value}",
    "strategy": str,
    "compute_dtype": lambda value: f"products in {value}",
    "optimizer": str,
    "cycle_s": lambda value: f"cycle {format_duration(float(value or 0))}",
    "dtype": str,
    "in_place": lambda value: "in place" if value else "out of place",
    "cached": lambda value: "cached" if value else "",
    "network": str,
}
"""How each field is written, in the order in which a setting's name has them."""

_PLAIN = ("global_batch", "overlap", "accumulate", "batch_norm", "leaves")
"""Fields that a table writes without the word that its head has."""


def varying_fields(settings: Iterable[Mapping[str, SettingValue]]) -> tuple[str, ...]:
    """Return the fields that do not have one value in all settings; without any, the number of devices."""
    known = list(settings)
    names = [name for name in _WORDS if len({setting.get(name) for setting in known if name in setting}) > 1]
    return tuple(names) or ("devices",)


def setting_name(setting: Mapping[str, SettingValue], fields: Iterable[str]) -> str:
    """Return ``2 devices, 64 KiB, ring, overlap thread``, of the given fields."""
    return ", ".join(part for name in fields if name in setting and (part := _WORDS[name](setting[name])))


def cell(setting: Mapping[str, SettingValue], field: str) -> str:
    """Return one field of a setting as the cell of a table."""
    if field == "devices":
        return str(setting.get("layout") or setting.get(field, ""))
    if field in _PLAIN:
        return str(setting.get(field, ""))
    return _WORDS[field](setting[field]) if field in setting else ""


def group_name(points: Iterable[RatioPoint], group: str) -> str:
    """Return a group's name, marked where its network or its computation is emulated."""
    members = [point for point in points if point.group == group]
    parts = [name for name in ("network", "compute") if any(getattr(point, f"emulated_{name}") for point in members)]
    words = {"network": "emulated network", "compute": "emulated computation"}
    return f"{group} ({', '.join(words[part] for part in parts)})" if parts else group


def rows(comparison: RunComparison) -> list[list[RatioPoint]]:
    """Return the points of each setting, one for each run that has it beside the first, in the order of the runs."""
    by_setting: dict[tuple[tuple[str, SettingValue], ...], list[RatioPoint]] = {}
    for point in comparison.points:
        by_setting.setdefault(tuple(point.setting.items()), []).append(point)
    return list(by_setting.values())
