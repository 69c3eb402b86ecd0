"""What a report of compared runs says, as a page, as Markdown, on a terminal, and for programs."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dpsim.codec import to_builtins, write_text
from dpsim.records.run_comparison import MeanRatio, RunComparison, RunPair
from dpsim.report.compare.chart import MOST_ROWS, ratio_chart
from dpsim.report.compare.tables import (
    differences_table,
    differing,
    environments_table,
    furthest,
    means_table,
    mixed,
    not_compared_table,
    ratio_text,
    settings_table,
)
from dpsim.report.content import Card, Content, ReportWarning, Tile
from dpsim.report.sweep.warnings import instant
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, listed, spreadsheet_text
from dpsim.report.write import ReportFigure, write_content

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
        mean = pair.overall
        settings = counted(mean.settings, "setting") + " on real and emulated networks" * mixed(comparison, pair)
        if pair.same_record:
            yield f"{pair.b} is the same record as {pair.a}: the ratio is exactly 1 in all of {settings}."
            continue
        yield (
            f"{pair.b} takes {_ratio(mean)} times as long as {pair.a} in the geometric mean of {settings}: "
            f"{mean.faster} faster, {mean.slower} slower, {mean.not_distinguishable} not distinguishable."
        )


def _ratio(mean: MeanRatio) -> str:
    return ratio_text(mean.ratio, mean.low, mean.high)


def _card(pair: RunPair) -> Card:
    mean = pair.overall
    tiles = {
        f"geometric mean of the ratios ({mean.low:.3g} to {mean.high:.3g})": f"{mean.ratio:.3g}",
        "settings faster": str(mean.faster),
        "settings slower": str(mean.slower),
        "settings not distinguishable": str(mean.not_distinguishable),
    }
    return Card(
        title=f"{pair.b} against {pair.a}",
        tiles=tuple(Tile(value=value, label=label) for label, value in tiles.items()),
    )


def warnings(comparison: RunComparison) -> tuple[ReportWarning, ...]:
    """Return every reason to doubt a comparison, each with what to do about it."""
    of_pairs = [warning for pair in comparison.pairs for warning in _pair_warnings(comparison, pair)]
    return (*of_pairs, *_point_warnings(comparison))


def _pair_warnings(comparison: RunComparison, pair: RunPair) -> Iterator[ReportWarning]:
    if pair.same_record:
        yield ReportWarning(
            kind="same-record",
            text=f"{pair.a} and {pair.b} are the same record, so every ratio is exactly 1",
            remedy="give the folders of two different runs",
        )
        return
    if _overlapping(comparison, pair):
        yield ReportWarning(
            kind="measured-together",
            text=f"{pair.a} and {pair.b} were measured at the same time: if it was on one machine, they slowed each "
            "other",
            remedy="measure one after the other",
        )
    if _same_processor(comparison, pair):
        yield ReportWarning(
            kind="not-interleaved",
            text=f"{pair.a} and {pair.b} were not measured in turns: what changed on the machine between them, such as "
            "other users of its cores, is in the ratios and not in their intervals",
            remedy="measure both again, in the order A B A B, and compare the two runs of A with each other: their "
            "difference is the noise between runs",
        )


def _same_processor(comparison: RunComparison, pair: RunPair) -> bool:
    """Return whether both runs of a pair name the same model of processor, so that they may be of one machine."""
    return len({run.environment.processor for run in comparison.runs if run.label in (pair.a, pair.b)}) == 1


def _overlapping(comparison: RunComparison, pair: RunPair) -> bool:
    runs = {run.label: (instant(run.measured_from), instant(run.measured_until)) for run in comparison.runs}
    (from_a, until_a), (from_b, until_b) = runs[pair.a], runs[pair.b]
    if from_a is None or until_a is None or from_b is None or until_b is None:
        return False
    return from_a < until_b and from_b < until_a


def _point_warnings(comparison: RunComparison) -> Iterator[ReportWarning]:
    if comparison.kind == "sweep" and differing(comparison.runs).get("optimizer"):
        yield ReportWarning(
            kind="other-declaration",
            text="the runs differ in optimizer, which changes the work of a step",
            remedy="read the table of environments: compare them only if this difference is what you want to measure",
        )
    few = [point for point in comparison.points if min(point.a_rounds, point.b_rounds) < FEW_ROUNDS]
    if few:
        yield ReportWarning(
            kind="few-rounds",
            text=f"{counted(len(few), 'ratio')} with fewer than {FEW_ROUNDS} rounds in a run: the interval is a guess",
            remedy="raise the budget of the runs",
        )
    without = [point for point in comparison.points if point.noise is None and point.setting.get("devices") != 1]
    if without:
        yield ReportWarning(
            kind="no-noise",
            text=f"neither run has an A/A pair for {counted(len(without), 'ratio')}: their noise is unknown, and the "
            "verdict rests on the interval alone",
            remedy="measure again with the A/A pairs that dpsim chooses",
        )
    emulated = [point for point in comparison.points if point.emulated_network or point.emulated_compute]
    if emulated:
        yield ReportWarning(
            kind="emulated",
            text=f"{counted(len(emulated), 'ratio')} of emulated networks or computation: they say how the programs "
            "compare there, not how fast the hardware is",
            remedy="measure on the network itself",
        )
    if comparison.not_compared:
        reasons = Counter(each.reason for each in comparison.not_compared)
        parts = [f"{number}: {reason}" for reason, number in reasons.most_common()]
        yield ReportWarning(
            kind="not-compared",
            text=f"{counted(len(comparison.not_compared), 'setting')} not compared ({listed(parts)})",
            remedy="measure them in all runs with the same flags; --output and --json list them",
        )


def points_json(comparison: RunComparison) -> list[dict[str, Any]]:
    """Return the points of ``--json``: the fields that name the setting stand beside all others."""
    points = []
    for point in to_builtins(comparison.points):
        setting = point.pop("setting")
        points.append({"a": point.pop("a"), "b": point.pop("b")} | setting | point)
    return points


def summary_json(comparison: RunComparison) -> dict[str, Any]:
    """Return the summary of ``--json``: the runs, the means of each pair of them, and what was not compared."""
    return {name: value for name, value in to_builtins(comparison).items() if name != "points"}


def points_csv(comparison: RunComparison) -> str:
    """Return the points as CSV, with one header line; what a setting does not have is empty."""
    points = points_json(comparison)
    settings = dict.fromkeys(name for point in comparison.points for name in point.setting)
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
