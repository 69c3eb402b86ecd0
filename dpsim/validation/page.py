"""What ``python -m dpsim.validation`` shows: the tables of scores, on a terminal and on the page of the report."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dpsim.codec import write_text
from dpsim.columns import columns_of
from dpsim.grouping import grouped
from dpsim.model.cells import Cell
from dpsim.model.defaults import Default
from dpsim.report.charts import Chart, Dot, Rows
from dpsim.report.content import Card, Content, Tile
from dpsim.report.table import Column, Table, table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, digits, percent, skill_text, spreadsheet_text
from dpsim.report.write import figure, write_content
from dpsim.uncertainty import IntervalWidth
from dpsim.validation.contestants import MODELS
from dpsim.validation.defaults import NOBODY
from dpsim.validation.judge import JudgedRow
from dpsim.validation.published import FOLDER, Doubt, PublishedSet
from dpsim.validation.records import records_table
from dpsim.validation.run import Validation
from dpsim.validation.scores import Score, pooled, score_sets
from dpsim.validation.widths import conformal_widths

_ERRORS: tuple[Column[Score], ...] = (
    Column(head="cases", cell=lambda s: str(s.cases), dispensable=1),
    Column(head="rows", cell=lambda s: str(s.rows), dispensable=1),
    Column(head="median error", cell=lambda s: percent(s.median_abs_error)),
    Column(head="null", cell=lambda s: s.null, left=True, dispensable=3),
    Column(head="null's error", cell=lambda s: percent(s.null_median_abs_error)),
    Column(head="skill", cell=lambda s: skill_text(s.skill)),
    Column(head="best null", cell=lambda s: s.best_null, left=True, dispensable=4),
    Column(head="best null's error", cell=lambda s: percent(s.best_null_median_abs_error), dispensable=2),
    Column(head="skill over best null", cell=lambda s: skill_text(s.best_null_skill)),
    Column(head="better in cases", cell=lambda s: str(s.better_cases), dispensable=4),
    Column(head="inside 90%", cell=lambda s: f"{s.coverage:.0%}"),
    Column(head="interval score", cell=lambda s: digits(s.interval_score, 3), dispensable=1),
    Column(head="constant factor's interval score", cell=lambda s: digits(s.constant_interval_score, 3), dispensable=1),
    Column(head="too fast", cell=lambda s: f"{s.too_fast:.0%}"),
)
_HEADING = "Published measurements, predicted by dpsim"
_NOTE = (
    "An error is |predicted / measured - 1|; shown is the median over rows. A null is a simple guess that knows what "
    "the prediction knows and has seen no judged row. That of a set is chosen beforehand: it errs least on the other "
    "clusters. The best null errs least on the set itself, so it is chosen with hindsight. Skill is 1 - error / error "
    "of the null: 1 is perfect, and below 0 the null is better. The interval score is the mean of "
    "(width of the 90% interval + 20 times the distance outside) / measured: less is better. Beside it is the score "
    "of intervals that are a constant factor wide, chosen on the other clusters. Too fast is the share of rows that "
    "are predicted too fast. In the lines of all sets every cluster weighs the same."
)
UNKNOWNS = {
    "speed": "the speed of the machine later",
    "compute": "computing times and what devices lose",
    "network": "the collective alone",
    "overlapped": "collectives beside backward",
    "loss": "computation that collectives take away",
    "overhead": "what the host adds to a collective",
    "fixed_share": "what a step takes whatever the batch",
    "model": "the model itself",
}
"""What makes intervals wide, in words: the fields of ``dpsim.model.uncertainty.Uncertainty``, and ``model``."""
_TIE = 0.02
_ALONE = " A set that is alone of its kind has no others: its null and its constant factor are those of hindsight."
_FLOATS = "%.7g"
"""How numbers are written into ``points.csv``: times are published with six digits or fewer."""


def for_terminal(validation: Validation) -> TerminalReport:
    """Return what is printed: the line of each set and pooled, and what the defaults change."""
    tables = [scores_table(validation.scores, _HEADING)]
    return TerminalReport(tables=tables, answers=tuple(_answers(validation)))


def scores_table(scores: Sequence[Score], title: str, head: str = "set") -> Table:
    """Return the line of each set, and of all sets, collectives and steps apart."""
    summed = [] if head != "set" else pooled(scores)
    alone = head == "set" and any(len(of_quantity) == 1 for of_quantity in _by_quantity(scores).values())
    return table(
        title=title,
        columns=(Column(head=head, cell=lambda s: s.name, left=True), *_ERRORS),
        sections=_by_quantity([*scores, *summed]),
        note=_NOTE + (_ALONE if alone else ""),
        strong=lambda score: score in summed,
    )


def _by_quantity(scores: Sequence[Score]) -> dict[str, list[Score]]:
    return {f"{name}s": alike for name, alike in grouped(scores, lambda score: score.quantity).items()}


def clusters_table(validation: Validation) -> Table:
    """Return the line of each cluster, predicted with what the others imply, with its worst row."""

    def worst(score: Score) -> JudgedRow:
        return max(score.rows_judged, key=lambda row: abs(math.log(row.measured / row.predicted)))

    def verdict(score: Score) -> str:
        ratio = score.median_abs_error / max(score.null_median_abs_error, 1e-9)
        return "better" if ratio < 1 - _TIE else "worse" if ratio > 1 + _TIE else "alike"

    columns: tuple[Column[Score], ...] = (
        Column(head="cluster", cell=lambda s: s.name, left=True),
        Column(head="rows", cell=lambda s: str(s.rows)),
        Column(head="median error", cell=lambda s: percent(s.median_abs_error)),
        Column(head="null's error", cell=lambda s: percent(s.null_median_abs_error)),
        Column(head="verdict", cell=verdict, left=True),
        Column(head="inside 90%", cell=lambda s: f"{s.coverage:.0%}"),
        Column(head="interval score", cell=lambda s: digits(s.interval_score, 3)),
        Column(head="constant factor's interval score", cell=lambda s: digits(s.constant_interval_score, 3)),
        Column(head="worst row", cell=lambda s: worst(s).case, left=True, dispensable=2),
        Column(head="worst error", cell=lambda s: percent(worst(s).error)),
        Column(head="most in doubt", cell=lambda s: UNKNOWNS[worst(s).unknown], left=True, dispensable=1),
    )
    by_cluster = score_sets(validation.rows, key=lambda row: row.cluster)
    return table(
        title="Every cluster, predicted with what the others imply",
        columns=columns,
        sections=_by_quantity(by_cluster),
        note="Neither a default nor a width nor a null of a cluster has seen one of its rows. Alike: errors within 2%.",
    )


def _widths_table(validation: Validation) -> Table:
    """Return how wide intervals are in each cell, and what makes most of them."""
    raw = grouped(validation.raw, lambda row: row.cell)
    conformal = conformal_widths(validation.raw)
    rows = [(cell, width, raw[cell]) for cell, width in validation.widths.items()]

    def half_width(row: JudgedRow) -> float:
        return math.log(row.high / row.low) / 2

    def unknowns(members: Sequence[JudgedRow]) -> str:
        shares = {name: len(own) / len(members) for name, own in grouped(members, lambda row: row.unknown).items()}
        most = sorted(shares, key=lambda name: -shares[name])[:2]
        return ", ".join(f"{UNKNOWNS[name]} ({shares[name]:.0%} of the rows)" for name in most)

    columns: tuple[Column[tuple[Cell, IntervalWidth, Sequence[JudgedRow]]], ...] = (
        Column(head="question", cell=lambda row: row[0], left=True),
        Column(head="clusters", cell=lambda row: str(row[1].clusters)),
        Column(head="rows", cell=lambda row: str(len(row[2]))),
        Column(
            head="half width",
            cell=lambda row: percent(float(np.median([half_width(each) for each in row[2]]))),
        ),
        Column(head="wider by", cell=lambda row: digits(row[1].factor, 3)),
        Column(head="without assumptions", cell=lambda row: digits(conformal[row[0]], 3)),
        Column(head="most in doubt", cell=lambda row: unknowns(row[2]), left=True),
    )
    return table(
        title="How wide intervals are, and what makes them wide",
        columns=columns,
        sections={counted(len(rows), "question"): rows},
        note="Widths of a new cluster follow a two-level model: clusters differ in how wrong predictions are, and the "
        "rows of a cluster share that. Their factor multiplies the half width of the model's own intervals (the median "
        "over rows). Without assumptions it is that of split conformal prediction, which needs nine clusters.",
    )


def _contestants_tables(validation: Validation) -> Iterator[Table]:
    """Yield a table of everyone's median errors for collectives, and one for steps."""
    for quantity, scores in _by_quantity(validation.scores).items():
        names = dict.fromkeys(name for score in scores for row in score.rows_judged for name in row.others)
        ordered = [*(name for name in MODELS if name in names), *(name for name in names if name not in MODELS)]

        def error(name: str, score: Score) -> str:
            ratios = [row.others[name] / row.measured - 1 for row in score.rows_judged if name in row.others]
            return percent(float(np.median(np.abs(ratios)))) if ratios else ""

        yield table(
            title=f"The median error of everyone: {quantity}",
            columns=[
                Column(head="set", cell=lambda s: s.name, left=True),
                Column(head="dpsim", cell=lambda s: percent(s.median_abs_error)),
                *(Column(head=name, cell=partial(error, name)) for name in ordered),
            ],
            sections={quantity: scores},
            note="Calculon and PyTorch Inductor are the formulas of an allreduce that these projects publish; their "
            "step is computation, and then one allreduce of all gradients. The others are nulls.",
        )


def _doubts_table(sets: Mapping[str, PublishedSet]) -> Table:
    doubts = [(name, doubt) for name, published in sets.items() for doubt in published.provenance.doubts]
    columns: tuple[Column[tuple[str, Doubt]], ...] = (
        Column(head="set", cell=lambda row: row[0], left=True),
        Column(head="kind", cell=lambda row: row[1].kind, left=True),
        Column(head="lines", cell=lambda row: row[1].lines, left=True),
        Column(head="doubt", cell=lambda row: row[1].text, left=True),
    )
    return table(
        title="Doubts about the published tables",
        columns=columns,
        sections={counted(len(doubts), "doubt"): doubts},
        note="Lines are those of the sets' CSV files. Rows in doubt are judged all the same.",
    )


def _sets_table(sets: Mapping[str, PublishedSet]) -> Table:
    columns: tuple[Column[PublishedSet], ...] = (
        Column(head="set", cell=lambda s: s.name, left=True),
        Column(head="what", cell=lambda s: s.provenance.title, left=True),
        Column(head="rows", cell=lambda s: str(len(s.rows))),
        Column(head="source", cell=lambda s: s.provenance.source, left=True),
        Column(head="citation", cell=lambda s: s.provenance.citation, left=True),
        Column(head="licence", cell=lambda s: s.provenance.licence, left=True),
    )
    return table(
        title="Where the measurements come from",
        columns=columns,
        sections={counted(len(sets), "set"): list(sets.values())},
    )


def _answers(validation: Validation) -> Iterator[str]:
    for score in pooled(validation.scores):
        yield (
            f"{score.quantity.capitalize()}s: dpsim is {percent(score.median_abs_error)} off in the "
            f"median, the null of each set {percent(score.null_median_abs_error)} (skill {skill_text(score.skill)}), "
            f"and its best null with hindsight {percent(score.best_null_median_abs_error)} (skill "
            f"{skill_text(score.best_null_skill)}). {score.coverage:.0%} of the measurements lie inside the 90% "
            f"intervals, and "
            f"{score.too_fast:.0%} are predicted too fast: {score.rows} rows in {score.cases} cases."
        )
        inside, scored = score.coverage_of_clusters, score.interval_score_of_clusters
        yield (
            f"Every cluster is predicted with what the others imply, and weighs the same. Over {score.clusters} "
            f"clusters of {score.quantity}s {score.coverage:.0%} (90%: {inside[0]:.0%} to {inside[1]:.0%}) lie inside; "
            f"the interval score is {digits(score.interval_score, 3)} ({digits(scored[0], 3)} to "
            f"{digits(scored[1], 3)}), that of the best constant factor {digits(score.constant_interval_score, 3)}."
        )


def tables(validation: Validation) -> list[Table]:
    """Return the tables of the page: scores, contestants, records, doubts, and where the measurements come from."""
    by_case = score_sets(validation.rows, key=lambda row: row.part.case.name)
    shown = (
        scores_table(validation.scores, "Every set"),
        clusters_table(validation),
        _widths_table(validation),
        scores_table(by_case, "Every question", head="question"),
        *_contestants_tables(validation),
        records_table(validation.rows),
        _doubts_table(validation.sets),
        _sets_table(validation.sets),
    )
    return [each for each in shown if each is not None]


def content(validation: Validation) -> Content:
    """Return what the report says."""
    return Content(
        name="validation",
        heading=_HEADING,
        question="How far are predictions from what other people measured and published? Are they better than simple "
        "guesses that know the same (nulls), and do their intervals hold the measurements?",
        answers=tuple(_answers(validation)),
        cards=tuple(
            Card(
                title=score.name,
                tiles=(
                    Tile(value=percent(score.median_abs_error), label="median error"),
                    Tile(value=skill_text(score.skill), label="skill (1: perfect, 0: as good as the null)"),
                    Tile(value=f"{score.coverage:.0%}", label="inside the 90% interval"),
                    Tile(value=f"{score.too_fast:.0%}", label="predicted too fast"),
                ),
            )
            for score in pooled(validation.scores)
        ),
        tables=tuple(tables(validation)),
        warnings=(),
        rules=(
            "No row is predicted from itself: what is held out is predicted from the rest of its system.",
            "An input that published machines leave open is what the other clusters imply, never the cluster itself."
            if validation.folder == FOLDER
            else "An input that published machines leave open is the default of dpsim, which saw none of these sets.",
            *(f"{default.field}: {default.text}." for default in _defaults(validation)),
            *(f"{case.name}: {case.question} {' '.join(case.assumptions)}".rstrip() for case in validation.cases),
        ),
        facts=tuple(
            (
                name,
                ", ".join(f"{each.field} {each.value:.3g} (standard error {each.doubt:.2g})" for each in of_cluster),
            )
            for name, of_cluster in {**validation.assumed, "a new cluster": validation.assumed[NOBODY]}.items()
            if name and of_cluster
        ),
        environment=(),
    )


def _defaults(validation: Validation) -> list[Default]:
    """Return the defaults of which something is assumed."""
    named = {each.field: each for of_cluster in validation.assumed.values() for each in of_cluster}
    return list(named.values())


def _skill_chart(scores: Sequence[Score]) -> Chart:
    """Return the error over that of the null of each set, with the quartiles over its cases."""

    def dot(score: Score) -> Dot:
        least = 1e-3
        medians = score.table.groupby("case")[["error", "null_error"]].median().clip(lower=least)
        value = max(score.median_abs_error, least) / max(score.null_median_abs_error, least)
        low, high = np.quantile(medians.error / medians.null_error, [0.25, 0.75])
        return Dot(value=value, low=min(float(low), value), high=max(float(high), value), look="predicted")

    rows = Rows(
        title="Error over that of the null",
        subtitle="left of 1: better than the null; bars: half of the cases",
        x_label="median error over that of the null",
        rows={score.name: [dot(score)] for score in scores},
        log=True,
    )
    return Chart(panels=[rows], height_in=0.8 + 0.3 * len(scores), columns=1)


def _errors_chart(scores: Sequence[Score]) -> Chart:
    """Return where measured over predicted lies for each set, and the ends of its intervals over predicted."""

    def dots(score: Score) -> list[Dot]:
        own = score.table
        low, median, high = np.quantile(own.measured / own.predicted, [0.05, 0.5, 0.95]).tolist()
        ends = [float(np.median(own[end] / own.predicted)) for end in ("low", "high")]
        return [
            Dot(value=median, low=low, high=high, look="measured"),
            Dot(value=1.0, low=ends[0], high=ends[1], look="predicted"),
        ]

    rows = Rows(
        title="Measured over predicted",
        subtitle="dots: median and 90% of the rows; boxes: the predicted 90% interval",
        x_label="measured over predicted; right of 1: predicted too fast",
        rows={score.name: dots(score) for score in scores},
        log=True,
    )
    return Chart(panels=[rows], height_in=0.8 + 0.4 * len(scores), columns=1)


def write_validation(folder: Path, validation: Validation) -> list[Path]:
    """Write ``index.html``, ``report.md``, the figures and ``points.csv``; return the paths. Raises ``ConfigError``."""
    from dpsim.report.frames import table as frame

    scores = validation.scores
    figures = [
        figure(
            "skill",
            "Skill on every set",
            "The median error of each set over that of its null: left of 1 the prediction has skill. The bars "
            "hold the middle half of the cases of a set.",
            _skill_chart(scores) if scores else None,
        ),
        figure(
            "errors",
            "Errors and intervals of every set",
            "Measured over predicted: the median of each set and where 90% of its rows lie, above the 90% interval "
            "that is predicted (the median of its ends). An interval that is as wide as the line above it is right.",
            _errors_chart(scores) if scores else None,
        ),
    ]
    points = folder / "points.csv"
    columns = list(columns_of(JudgedRow).values())
    rows = frame([row.values() for row in validation.rows], columns)
    write_text(points, rows.map(spreadsheet_text).to_csv(index=False, lineterminator="\n", float_format=_FLOATS))
    return [points, *write_content(folder, content(validation), figures)]
