"""The tables of compared runs: the settings, the means, the environments, and what was not compared."""

from __future__ import annotations

from collections.abc import Sequence

from dpsim.records.run_comparison import ComparedRun, MeanRatio, NotCompared, RatioPoint, RunComparison, RunPair
from dpsim.report.compare.names import cell, group_name, rows, setting_name, varying_fields
from dpsim.report.content import environment_facts
from dpsim.report.table import Column, Table, table
from dpsim.report.words import milliseconds, percent

VERDICTS = {"faster": "faster", "slower": "slower", "not_distinguishable": "unclear"}
_HEADS = {
    "system": "system",
    "backend": "backend",
    "model": "model",
    "devices": "devices",
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
}
_RIGHT = ("devices", "global_batch", "fusion_threshold_bytes", "size_bytes", "accumulate", "leaves", "cycle_s")
_UNITS = {"step": ("ms", 1e3), "allreduce": ("us", 1e6)}
Row = list[RatioPoint]


def ratio_text(point: RatioPoint | MeanRatio) -> str:
    """Return ``0.95 (0.93 to 0.97)``."""
    low, high = (point.ratio_low, point.ratio_high) if isinstance(point, RatioPoint) else (point.low, point.high)
    return f"{point.ratio:.3g} ({low:.3g} to {high:.3g})"


def settings_table(comparison: RunComparison, *, most: int | None = None) -> Table:
    """Return a row for each setting, grouped by network or system, with the columns of every run beside the first.

    With ``most`` only that many rows are shown: those that differ the most.
    """
    of_all = rows(comparison)
    shown = of_all
    if most is not None and len(of_all) > most:
        furthest = sorted(of_all, key=lambda row: -max(max(point.ratio, 1 / point.ratio) for point in row))[:most]
        shown = [row for row in of_all if row in furthest]
    fields = [name for name in varying_fields(row[0].setting for row in of_all) if name in _HEADS]
    first, others = comparison.runs[0].label, [run.label for run in comparison.runs[1:]]
    groups = dict.fromkeys(row[0].group for row in shown)
    left_out = len(of_all) - len(shown)
    note = (
        f"Times are medians of one {comparison.quantity}. Ratio = time / time in {first} with its 95% interval: below "
        "1 is faster. Unclear: the interval contains 1, or the ratio is within the noise, the larger A/A "
        "difference of the two runs."
    )
    if left_out:
        note += f" {left_out} more settings differ less than these; --json and --output have all of them."
    return table(
        title="Settings that differ the most" if left_out else "Settings in common",
        columns=(
            *(_field_column(name) for name in fields if name != "system"),
            _time_column(first, comparison.quantity, None),
            *(column for label in others for column in _run_columns(label, comparison.quantity, len(others))),
        ),
        sections={
            group_name(comparison.points, group): [row for row in shown if row[0].group == group] for group in groups
        },
        strong=lambda row: any(point.verdict != "not_distinguishable" for point in row),
        note=note,
    )


def _field_column(name: str) -> Column[Row]:
    return Column(head=_HEADS[name], cell=lambda row: cell(row[0].setting, name), left=name not in _RIGHT)


def _time_column(label: str, quantity: str, b: str | None) -> Column[Row]:
    """Return the column of one run's times: of the first run, or of run ``b``, which a narrow terminal leaves out."""
    unit, scale = _UNITS[quantity]

    def time(row: Row) -> str:
        point = row[0] if b is None else _of(row, b)
        if point is None:
            return ""
        seconds = point.a_time_s if b is None else point.b_time_s
        return milliseconds(seconds * scale / 1e3)

    return Column(head=f"{label} {unit}", cell=time, dispensable=2)


def _run_columns(label: str, quantity: str, count: int) -> tuple[Column[Row], ...]:
    """Return the columns of a run beside the first."""
    of = f" {label}" if count > 1 else ""

    def noise(row: Row) -> str:
        point = _of(row, label)
        return "" if point is None else "unknown" if point.noise is None else percent(point.noise)

    def text(row: Row) -> str:
        point = _of(row, label)
        return "" if point is None else ratio_text(point)

    def verdict(row: Row) -> str:
        point = _of(row, label)
        return "" if point is None else VERDICTS[point.verdict]

    return (
        _time_column(label, quantity, label),
        Column(head=f"ratio{of} (95%)", cell=text, left=True),
        Column(head=f"noise{of}", cell=noise, dispensable=3),
        Column(head=f"verdict{of}", cell=verdict, left=True, dispensable=1 if count > 1 else 0),
    )


def _of(row: Row, label: str) -> RatioPoint | None:
    return next((point for point in row if point.b == label), None)


def means_table(comparison: RunComparison) -> Table:
    """Return the geometric means: of each group, over all of them, and at equal speed of the machine."""
    sections = {}
    for pair in comparison.pairs:
        of_pair = [point for point in comparison.points if (point.a, point.b) == (pair.a, pair.b)]
        named = [(group_name(of_pair, mean.name), mean) for mean in pair.groups]
        sections[f"{pair.b} against {pair.a}"] = [*(named if len(named) > 1 else ()), *_overall(comparison, pair)]
    return table(
        title="Geometric means",
        columns=(
            Column(head="over", cell=lambda row: row[0], left=True),
            Column(head="settings", cell=lambda row: str(row[1].settings)),
            Column(head="ratio (95%)", cell=lambda row: ratio_text(row[1]), left=True),
            Column(head="faster", cell=lambda row: str(row[1].faster)),
            Column(head="slower", cell=lambda row: str(row[1].slower)),
            Column(head="not distinguishable", cell=lambda row: str(row[1].not_distinguishable)),
        ),
        sections=sections,
        strong=lambda row: row[1].name == "all",
        note="Whole rounds of each run are resampled, the same ones for all settings of a run. At equal speed: each "
        "ratio is divided by that of the reference computation, which both runs timed in the same rounds.",
    )


def _overall(comparison: RunComparison, pair: RunPair) -> list[tuple[str, MeanRatio]]:
    name = "all settings, real and emulated" if mixed(comparison, pair) else "all settings"
    rows = [(name, pair.overall)]
    if pair.at_equal_speed is not None and not pair.same_record:
        rows.append((f"{name}, at equal speed", pair.at_equal_speed))
    return rows


def mixed(comparison: RunComparison, pair: RunPair) -> bool:
    """Return whether the settings of a pair of runs are partly on real and partly on emulated networks."""
    of_pair = [point for point in comparison.points if (point.a, point.b) == (pair.a, pair.b)]
    return len({point.emulated_network for point in of_pair}) > 1


def facts(run: ComparedRun) -> dict[str, str]:
    """Return the environment of a run and what it declared, by name."""
    return dict(environment_facts(run.environment)) | run.declared


def differing(runs: Sequence[ComparedRun]) -> list[str]:
    """Return the names of the facts that are not the same in all runs."""
    of_runs = [facts(run) for run in runs]
    names = dict.fromkeys(name for each in of_runs for name in each)
    return [name for name in names if len({each.get(name, "") for each in of_runs}) > 1]


def environments_table(comparison: RunComparison) -> Table:
    """Return the environments and the declarations of the runs; what differs is stressed."""
    of_runs = [facts(run) for run in comparison.runs]
    others = differing(comparison.runs)
    names = [name for name in dict.fromkeys(name for each in of_runs for name in each) if name not in others]
    return table(
        title="Environments",
        columns=(
            Column(head="", cell=lambda name: name, left=True),
            *(_environment_column(run) for run in comparison.runs),
        ),
        sections={name: rows for name, rows in (("what differs", others), ("what is the same in all", names)) if rows},
        strong=lambda name: name in others,
        note="A difference is not refused: it may be what is compared.",
    )


def _environment_column(run: ComparedRun) -> Column[str]:
    of_run = facts(run)
    return Column(head=run.label, cell=lambda name: of_run.get(name, "none"), left=True)


def differences_table(comparison: RunComparison) -> Table | None:
    """Return what differs between the environments, a line for each run, or ``None`` where nothing differs.

    A table with a column for each run would be wider than a terminal.
    """
    names = differing(comparison.runs)
    if not names:
        return None
    rows = [
        ("" if number else name, run.label, facts(run).get(name, "none"))
        for name in names
        for number, run in enumerate(comparison.runs)
    ]
    return table(
        title="Environments: what differs",
        columns=(
            Column(head="", cell=lambda row: row[0], left=True),
            Column(head="run", cell=lambda row: row[1], left=True),
            Column(head="value", cell=lambda row: row[2], left=True),
        ),
        sections={"": rows},
        note="A difference is not refused: it may be what is compared.",
    )


def not_compared_table(comparison: RunComparison) -> Table | None:
    """Return the settings that were not compared, with the reasons; ``None`` where there are none."""
    if not comparison.not_compared:
        return None
    by_pair: dict[str, list[NotCompared]] = {}
    for each in comparison.not_compared:
        by_pair.setdefault(f"{each.b} against {each.a}", []).append(each)
    fields = varying_fields([each.setting for each in comparison.not_compared])
    return table(
        title="Not compared",
        columns=(
            Column(head="setting", cell=lambda each: setting_name(each.setting, fields), left=True),
            Column(head="why", cell=lambda each: each.reason, left=True),
        ),
        sections=by_pair,
    )
