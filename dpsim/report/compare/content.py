"""What a report of compared runs says, as a page, as Markdown, on a terminal, and for programs."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from dpsim.codec import to_builtins, write_text
from dpsim.records.run_comparison import ComparedRun, Row, RunComparison
from dpsim.report.charts import Chart, Dot, Rows
from dpsim.report.compare.tables import (
    differences_table,
    environments,
    environments_table,
    furthest,
    group_name,
    mean_text,
    means_table,
    mixed,
    not_compared_table,
    pair_points,
    setting_name,
    settings_table,
    varying_fields,
)
from dpsim.report.content import Card, Content, ReportFigure, ReportWarning, Tile
from dpsim.report.sweep.warnings import instant
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, listed, spreadsheet_text
from dpsim.report.write import write_content

FEW_ROUNDS = 5
_TERMINAL_ROWS = 40
_RULES = (
    "A setting is compared where both runs measured it: all fields that name it are equal.",
    "Ratios are of medians, with 95% percentile bootstrap intervals: the rounds of each run are resampled on their "
    "own, and each round as a whole, because its samples are not independent.",
    "A setting is called faster or slower where its interval does not contain 1 and its ratio differs from 1 by more "
    "than the larger A/A difference of the two runs. Of many settings that do not differ, chance may still call about "
    "one in twenty different.",
    "The interval of the geometric mean comes from the same resampled rounds for all settings of a run.",
)
_CAPTION = (
    "Ratio of each setting's time to that of {first}, with its 95% interval, sorted: left of the line at 1 it is "
    "faster. Filled: called faster or slower; hollow: not distinguishable. Band: A/A noise, by how much two "
    "runs of the same setting differ. The axis is logarithmic."
)


def content(comparison: RunComparison) -> Content:
    """Return what the report says."""
    first, *others = (run.label for run in comparison.runs)
    heading = f"{', '.join(others)} against {first}"
    tables = (
        settings_table(comparison),
        means_table(comparison),
        environments_table(comparison),
        not_compared_table(comparison),
    )
    declared = comparison.runs[0].declared
    subject = f", {declared['model']} on {declared['data set']}" if comparison.kind == "sweep" else ""
    return Content(
        name=heading,
        heading=heading,
        question=f"What changed in the time of one {comparison.quantity}{subject}, setting by setting?",
        answers=tuple(answers(comparison)),
        cards=tuple(_card(pair) for pair in comparison.pairs),
        tables=tuple(each for each in tables if each is not None),
        warnings=warnings(comparison),
        rules=_RULES,
        facts=tuple(
            (
                run.label,
                f"{run.path}; {counted(run.settings, 'setting')}; measured {run.measured_from} to {run.measured_until}",
            )
            for run in comparison.runs
        ),
        environment=tuple((f"SHA-256 of {run.label}", run.sha256) for run in comparison.runs),
    )


def for_terminal(comparison: RunComparison) -> TerminalReport:
    """Return what ``rich.print`` shows: the settings, the means, what differs between the environments."""
    tables = (
        settings_table(comparison, most=_TERMINAL_ROWS),
        means_table(comparison),
        differences_table(comparison),
    )
    return TerminalReport(
        tables=[each for each in tables if each is not None],
        warnings=warnings(comparison),
        answers=tuple(answers(comparison)),
    )


def answers(comparison: RunComparison) -> Iterator[str]:
    """Yield a sentence for each run beside the first."""
    for pair in comparison.pairs:
        a, b, mean = pair["a"], pair["b"], pair["overall"]
        settings = counted(mean["settings"], "setting")
        settings += " on real and emulated networks" * mixed(pair_points(comparison, pair))
        if pair["same_record"]:
            yield f"{b} is the same record as {a}: the ratio is exactly 1 in all of {settings}."
            continue
        yield (
            f"{b} takes {mean_text(mean)} times as long as {a} in the geometric mean of {settings}: "
            f"{mean['faster']} faster, {mean['slower']} slower, {mean['not_distinguishable']} not distinguishable."
        )


def _card(pair: Row) -> Card:
    mean = pair["overall"]
    tiles = {
        f"geometric mean of the ratios ({mean['low']:.3g} to {mean['high']:.3g})": f"{mean['ratio']:.3g}",
        "settings faster": str(mean["faster"]),
        "settings slower": str(mean["slower"]),
        "settings not distinguishable": str(mean["not_distinguishable"]),
    }
    return Card(
        title=f"{pair['b']} against {pair['a']}",
        tiles=tuple(Tile(value=value, label=label) for label, value in tiles.items()),
    )


def warnings(comparison: RunComparison) -> tuple[ReportWarning, ...]:
    """Return every reason to doubt a comparison, each with what to do about it."""
    of_pairs = [warning for pair in comparison.pairs for warning in _pair_warnings(comparison, pair)]
    return (*of_pairs, *_point_warnings(comparison))


def _pair_warnings(comparison: RunComparison, pair: Row) -> Iterator[ReportWarning]:
    a, b = (next(run for run in comparison.runs if run.label == pair[side]) for side in "ab")
    if pair["same_record"]:
        yield ReportWarning(
            kind="same-record",
            text=f"{a.label} and {b.label} are the same record, so every ratio is exactly 1",
            remedy="give the folders of two different runs",
        )
        return
    if _overlapping(a, b):
        yield ReportWarning(
            kind="measured-together",
            text=f"{a.label} and {b.label} were measured at the same time: if it was on one machine, they slowed each "
            "other",
            remedy="measure one after the other",
        )
    if a.environment.processor == b.environment.processor:
        yield ReportWarning(
            kind="not-interleaved",
            text=f"{a.label} and {b.label} were not measured in turns: what changed on the machine between them, such "
            "as other users of its cores, is in the ratios and not in their intervals",
            remedy="measure both again, in the order A B A B, and compare the two runs of A with each other: their "
            "difference is the noise between runs",
        )


def _overlapping(*runs: ComparedRun) -> bool:
    begun, ended = ([instant(getattr(run, name)) for run in runs] for name in ("measured_from", "measured_until"))
    instants = [each for each in (*begun, *ended) if each is not None]
    return len(instants) == 2 * len(runs) and max(instants[: len(runs)]) < min(instants[len(runs) :])


def _point_warnings(comparison: RunComparison) -> Iterator[ReportWarning]:
    points = comparison.points
    if comparison.kind == "sweep" and len(set(environments(comparison).get("optimizer", ()))) > 1:
        yield ReportWarning(
            kind="other-declaration",
            text="the runs differ in optimizer, which changes the work of a step",
            remedy="read the table of environments: compare them only if this difference is what you want to measure",
        )
    if few := sum(min(point["a_rounds"], point["b_rounds"]) < FEW_ROUNDS for point in points):
        yield ReportWarning(
            kind="few-rounds",
            text=f"{counted(few, 'ratio')} with fewer than {FEW_ROUNDS} rounds in a run: the interval is a guess",
            remedy="raise the budget of the runs",
        )
    if without := sum(point["noise"] is None and point["setting"].get("devices") != 1 for point in points):
        yield ReportWarning(
            kind="no-noise",
            text=f"neither run has an A/A pair for {counted(without, 'ratio')}: their noise is unknown, and the "
            "verdict rests on the interval alone",
            remedy="measure again with the A/A pairs that dpsim chooses",
        )
    if emulated := sum(point["emulated_network"] or point["emulated_compute"] for point in points):
        yield ReportWarning(
            kind="emulated",
            text=f"{counted(emulated, 'ratio')} of emulated networks or computation: they say how the programs "
            "compare there, not how fast the hardware is",
            remedy="measure on the network itself",
        )
    if comparison.not_compared:
        reasons = Counter(each["reason"] for each in comparison.not_compared)
        parts = [f"{number}: {reason}" for reason, number in reasons.most_common()]
        yield ReportWarning(
            kind="not-compared",
            text=f"{counted(len(comparison.not_compared), 'setting')} not compared ({listed(parts)})",
            remedy="measure them in all runs with the same flags; --output and --json list them",
        )


def points_json(comparison: RunComparison) -> list[Row]:
    """Return the points of ``--json``: the fields that name the setting stand beside all others."""
    flat = [{"a": p["a"], "b": p["b"]} | p["setting"] | p for p in to_builtins(comparison.points)]
    return [{name: value for name, value in point.items() if name != "setting"} for point in flat]


def summary_json(comparison: RunComparison) -> Row:
    """Return the summary of ``--json``: the runs, the means of each pair of them, and what was not compared."""
    return {name: to_builtins(value) for name, value in comparison._asdict().items() if name != "points"}


def points_csv(comparison: RunComparison) -> str:
    """Return the points as CSV, with one header line; what a setting does not have is empty."""
    points = points_json(comparison)
    settings = dict.fromkeys(name for point in comparison.points for name in point["setting"])
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, dict.fromkeys(["a", "b", *settings, *points[0]]), lineterminator="\n")
    writer.writeheader()
    writer.writerows({name: spreadsheet_text(value) for name, value in point.items()} for point in points)
    return text.getvalue()


def write_comparison(folder: Path, comparison: RunComparison) -> list[Path]:
    """Write ``index.html``, ``report.md``, the figure and ``points.csv``; returns the paths. Raises ``ConfigError``."""
    caption = _CAPTION.format(first=comparison.runs[0].label)
    shown, left_out = furthest(comparison, MOST_ROWS)
    if left_out:
        caption += f" Shown are the {len(shown)} settings that differ the most; {left_out} more are in the table."
    figure = ReportFigure(
        name="ratio",
        title="Ratio by setting",
        caption=caption,
        chart=ratio_chart(comparison),
    )
    path = folder / "points.csv"
    write_text(path, points_csv(comparison))
    return [*write_content(folder, content(comparison), [figure]), path]


MOST_ROWS = 40


def ratio_chart(comparison: RunComparison) -> Chart:
    """Return one panel with a row for each setting, and a dot in it for each run beside the first."""
    shown = sorted(furthest(comparison, MOST_ROWS)[0], key=lambda row: row[0]["ratio"])
    labels, first = [run.label for run in comparison.runs[1:]], comparison.runs[0].label
    fields = varying_fields(point["setting"] for point in comparison.points)
    named = [name for name in fields if name != "network"]
    noises = [max((point["noise"] or 0.0 for point in row), default=0.0) for row in shown]
    rows = {
        setting_name(row[0]["setting"], named)
        + (f", {group_name(comparison.points, row[0]['group'])}" if "network" in fields else ""): [
            Dot(
                value=point["ratio"],
                low=point["ratio_low"],
                high=point["ratio_high"],
                look=labels.index(point["b"]),
                faint=point["verdict"] == "not_distinguishable",
            )
            for point in row
        ]
        for row in shown
    }
    panel = Rows(
        title=f"{labels[0]} against {first}" if len(labels) == 1 else f"against {first}",
        subtitle=f"time of one {comparison.quantity} / that in {first}",
        x_label="",
        rows=rows,
        bands=[(1 / (1 + noise), 1 + noise) if noise else None for noise in noises],
        log=True,
        legend=labels,
    )
    return Chart(panels=[panel], height_in=1.25 + (0.3 + 0.09 * (len(labels) - 1)) * len(shown), columns=1)
