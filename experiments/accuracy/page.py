"""The table of accuracy, as Markdown and on its page, the picture beside it, and the short table for the README."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.experiments.accuracy.lines import STEP, Line, covered, stratum
from dpsim.machine import NODE, Network
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.records.coverage import CoveredPoint
from dpsim.report.charts import Chart, Lines, Series
from dpsim.report.content import Card, Content, ReportFigure, Tile
from dpsim.report.table import Column, Table, table
from dpsim.report.words import counted, percent
from dpsim.report.write import write_content

FIGURE = "predicted_against_measured"
BEGIN, END = "<!-- accuracy: begin -->", "<!-- accuracy: end -->"
_SHORT = {
    STEP: "median error",
    "mean regret of the predicted best": "following the prediction costs",
    "coverage": "inside the 90 % interval",
}
_WIDE = "as wide as the errors of the other sweeps on that network and as many devices call for"
_RATIOS = {0.5: "-50%", 0.7: "-30%", 1.0: "0%", 1.4: "+40%", 2.0: "+100%"}
_NUMBERS = ("skill on the shape", "interval score")
_COLUMNS: tuple[Column[Line], ...] = (
    Column(head="what", cell=lambda line: line.quantity + (f" ({line.note})" if line.note else ""), left=True),
    Column(head="measured", cell=lambda line: number(line, line.value)),
    Column(head="target", cell=lambda line: line.target, left=True),
    Column(head="met", cell=lambda line: {None: "", True: "yes", False: "no"}[line.met], left=True),
    Column(head="best null", cell=lambda line: number(line, line.null)),
    Column(head="points", cell=lambda line: str(line.points)),
    Column(head="sweeps", cell=lambda line: str(line.calibrations)),
)


def markdown(lines: Sequence[Line], note: str) -> str:
    """Return a table with a row for each line; equal places stand once."""
    rows = ["| where | what | measured | target | met | best null | points |", "|---|---|---|---|---|---|---|"]
    for where, members in itertools.groupby(lines, lambda line: line.where):
        for row, line in enumerate(members):
            what, measured, target, met, null, points, sweeps = (column.cell(line) for column in _COLUMNS)
            cells = ("" if row else where, what, measured, target, "**no**" if met == "no" else met, null)
            rows.append(f"| {' | '.join(cells)} | {points} of {sweeps} |")
    return "\n".join([*rows, "", note])


def summary(lines: Sequence[Line]) -> str:
    """Return the short table: a row for each place with communication, and for one device of this machine.

    Conditions of shaped hosts, each of a few sweeps, are in the long one alone.
    """
    rows = [f"| where | {' | '.join(_SHORT.values())} | best simple guess |", "|---" * (len(_SHORT) + 2) + "|"]
    for where, members in itertools.groupby(lines, lambda line: line.where):
        of_quantity = {line.quantity.partition(" of the 90%")[0]: line for line in members}
        if STEP in of_quantity and ("coverage" in of_quantity or _on_shaped_hosts(where)) and _counts(where):
            cells = [number(line, line.value) if (line := of_quantity.get(key)) else "-" for key in _SHORT]
            guess = number(of_quantity[STEP], of_quantity[STEP].null)
            rows.append(f"| {' | '.join([where, *cells, guess])} |")
    return "\n".join(rows)


def _on_shaped_hosts(where: str) -> bool:
    """Whether it is a place of shaped hosts, which have too few sweeps to say what share intervals hold."""
    return re.match(r"shaped hosts, (2 devices$|[48] )", where) is not None


def _counts(where: str) -> bool:
    """Whether several devices communicate there, or it is this machine."""
    return where.startswith("this machine") or ", 1 device" not in where


def note(lines: Sequence[Line], processor: str, finished: str = "") -> str:
    """Return what the columns mean, and where it was measured; ``finished``: of how many sweeps it is."""
    noises = [line.noise for line in lines if line.noise is not None]
    noise = (
        f" Two runs of one setting differ by {min(noises):.1%} to {max(noises):.1%} (medians by place)."
        if noises
        else ""
    )
    return (
        f"Measured on {processor}{finished}. Points: of so many sweeps, each with its own profile and "
        f"calibration.{noise} The constant width that intervals compete with is chosen for each calibration on all "
        "others."
    )


def number(line: Line, value: float | None) -> str:
    """Return the value, or the null, of a line as the table shows it; nothing for ``None``."""
    if value is None:
        return ""
    return f"{value:.2f}" if line.quantity in _NUMBERS else f"{value:.1%}"


def into(readme: Path, short: str) -> None:
    """Put the table between the marks in a file. Raises ``ConfigError`` for a file without them."""
    text = readme.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ConfigError(f"{readme} has no place for the table", allowed=f"a file with the lines {BEGIN} and {END}")
    codec.write_text(readme, f"{before}{BEGIN}\n{short}\n{END}{after}")


def points_by_environment(comparisons: Mapping[str, Comparison]) -> dict[str, list[ComparedPoint]]:
    """Return all points that are scored, by where they ran."""
    places = (
        "this machine",
        "emulated link",
        "emulated link and ranks",
        "shaped hosts",
        "shaped hosts, emulated ranks",
    )
    found: dict[str, list[ComparedPoint]] = {place: [] for place in places}
    real, link, emulated, hosts, waiting = found.values()
    for comparison in comparisons.values():
        for point in comparison.scored:
            if Network.parse(point.network).shaped:
                (waiting if point.emulated_compute else hosts).append(point)
            else:
                (emulated if point.emulated_compute else real if point.network == NODE else link).append(point)
    return {where: points for where, points in found.items() if points}


def agreement_chart(places: Mapping[str, Sequence[ComparedPoint]]) -> Chart:
    """Return one panel with predicted against measured times, and one with their ratios; a colour for each place."""
    every = [point for points in places.values() for point in points]
    ends_s = [end(p.measured_step_s, p.predicted_step_s) for p in every for end in (min, max)]
    ends = (min(ends_s) * 1e3 / 1.3, max(ends_s) * 1e3 * 1.3)

    def panel(title: str, subtitle: str, unit: Callable[[ComparedPoint], float], line: tuple[float, float]) -> Lines:
        series = [Series(name="", x=ends, y=line, look="ideal")]
        for number, (where, points) in enumerate(places.items()):
            y, low, high = (
                [getattr(p, f"predicted_{end}_s") * unit(p) for p in points] for end in ("step", "low", "high")
            )
            x = [p.measured_step_s * 1e3 for p in points]
            series.append(Series(name=where, x=x, y=y, low=low, high=high, look=number, dots=True))
        return Lines(
            title=title,
            subtitle=subtitle,
            x_label="measured, ms per step",
            series=series,
            y_ticks=_RATIOS if line == (1.0, 1.0) else None,
            log_x=True,
            log_y=True,
            x_span=ends,
            y_span=(min(_RATIOS), max(_RATIOS)) if line == (1.0, 1.0) else ends,
            names="legend" if line == ends else "none",
        )

    times = panel("Predicted step time", "ms per step; on the line: as measured", lambda point: 1e3, ends)
    errors = "over measured; it holds where its line crosses 0%"
    ratios = panel("Error of the prediction", errors, lambda point: 1 / point.measured_step_s, (1.0, 1.0))
    return Chart(panels=[times, ratios], height_in=4.4)


def write_page(
    folder: Path, comparisons: Mapping[str, Comparison], lines: Sequence[Line], processor: str, note: str
) -> tuple[Content, list[Path]]:
    """Write ``index.html`` and the picture, also in dark colours; returns what the page says, and the paths.

    Raises ``ConfigError``.
    """
    from dpsim.report.figures import draw, save_dark

    by_environment = points_by_environment(comparisons)
    figure = ReportFigure(
        name=FIGURE,
        title="Predicted against measured",
        caption="Every setting of every sweep: the step time that was predicted from what was profiled and calibrated "
        "in turns with the samples, without any of them, and the 90% interval that was stated with it, against the "
        "measured median. Emulated ranks wait for profiled times instead of computing, so that 8 of them fit on 2 "
        "cores.",
        chart=agreement_chart(by_environment),
    )
    shown = _content(comparisons, by_environment, lines, processor, note)
    written = write_content(folder, shown, [figure], ("html",))
    save_dark(draw(figure.chart), dark := folder / f"{FIGURE}-dark.svg")
    return shown, [*written, dark]


def _content(
    comparisons: Mapping[str, Comparison],
    by_environment: Mapping[str, Sequence[ComparedPoint]],
    lines: Sequence[Line],
    processor: str,
    note: str,
) -> Content:
    """Return what the page says."""
    every = [point for points in by_environment.values() for point in points]
    judged = covered(comparisons)
    return Content(
        name="accuracy",
        heading="How right the predictions are",
        question="How far from the measured step times are those that were predicted without them, and how often do "
        "intervals hold them?",
        answers=(
            f"Half of all predictions are within {_median_error(every)} of the measured step "
            f"({counted(len(comparisons), 'sweep')}, each with its own profile and calibration).",
            *(
                [f"{_inside(judged)} of {counted(len(judged), 'measured step')} lie inside 90% intervals {_WIDE}."]
                if judged
                else []
            ),
        ),
        cards=tuple(
            Card(
                title=where,
                tiles=(
                    Tile(value=_median_error(points), label="median error of the step time"),
                    *_inside_tiles(comparisons, points),
                    Tile(value=str(len(points)), label="settings, each predicted and measured"),
                ),
            )
            for where, points in by_environment.items()
        ),
        tables=(_promises(lines, note),),
        warnings=(),
        rules=(
            "Every sweep profiled the model and calibrated the machine for itself, before its samples and in turns "
            "with them, and was predicted from that alone: beforehand, and from the same minutes as the samples, which "
            "is what is shown.",
            f"Every share inside intervals, of this page and of its tables, is of intervals {_WIDE}. The picture has "
            "the intervals that were stated with the predictions.",
            "Sweeps that did not finish are not in the picture; none that did was left out.",
        ),
        facts=(("processor", processor), ("sweeps", str(len(comparisons)))),
        environment=(),
    )


def _promises(lines: Sequence[Line], note: str) -> Table:
    """Return the table of what is promised, in sections by environment."""
    environments = dict.fromkeys(line.where for line in lines)
    return table(
        title="What is promised, and what was reached",
        columns=_COLUMNS,
        sections={where: [line for line in lines if line.where == where] for where in environments},
        note=note,
    )


def _median_error(points: Sequence[ComparedPoint]) -> str:
    return percent(float(np.median([abs(point.error) for point in points])))


def _inside_tiles(comparisons: Mapping[str, Comparison], points: Sequence[ComparedPoint]) -> list[Tile]:
    """Return the share of the measured steps of some places inside their intervals, where other sweeps give them."""
    places = {stratum(point) for point in points}
    judged = [point for point in covered(comparisons) if point.stratum in places]
    label = f"of {counted(len(judged), 'measured step')} inside 90% intervals {_WIDE}"
    return [Tile(value=_inside(judged), label=label)] if judged else []


def _inside(points: Sequence[CoveredPoint]) -> str:
    """Return the share of measured steps inside their intervals, to the digits of the tables."""
    return f"{np.mean([point.low_s <= point.measured_s <= point.high_s for point in points]):.1%}"
