"""What ``dpsim validate`` shows: the tables of scores, on a terminal and on the page of the report."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from dpsim.codec import write_text
from dpsim.columns import columns_of
from dpsim.predict.prices import FREE_NETWORK
from dpsim.predict.step import price, scheduled
from dpsim.report.charts import Chart, Dot, Lines, Rows, Series
from dpsim.report.content import Card, Content, Tile
from dpsim.report.table import Column, Table, table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, digits, percent, skill_text
from dpsim.report.write import figure, write_content
from dpsim.validation.audit import Doubt, audit
from dpsim.validation.contestants import MODELS
from dpsim.validation.judge import JudgedRow, scored
from dpsim.validation.published import PublishedSet
from dpsim.validation.run import Validation
from dpsim.validation.scores import Score, pooled, score_sets

_ERRORS: tuple[Column[Score], ...] = (
    Column(head="cases", cell=lambda s: str(s.cases), dispensable=1),
    Column(head="rows", cell=lambda s: str(s.rows), dispensable=1),
    Column(head="median error", cell=lambda s: percent(s.median_abs_error)),
    Column(head="best null", cell=lambda s: s.null, left=True, dispensable=3),
    Column(head="its error", cell=lambda s: percent(s.null_median_abs_error)),
    Column(head="null with hindsight", cell=lambda s: percent(s.hindsight_median_abs_error), dispensable=2),
    Column(head="skill", cell=lambda s: skill_text(s.skill)),
    Column(head="better in cases", cell=lambda s: str(s.better_cases), dispensable=4),
    Column(head="inside 90%", cell=lambda s: f"{s.coverage:.0%}"),
    Column(head="interval score", cell=lambda s: digits(s.interval_score, 3), dispensable=1),
    Column(head="of a constant", cell=lambda s: digits(s.constant_interval_score, 3), dispensable=1),
    Column(head="too fast", cell=lambda s: f"{s.too_fast:.0%}"),
)
_NOTE = (
    "Errors are |predicted / measured - 1|, medians over rows. The best null is the one with the least median error of "
    "those that saw no judged row; with hindsight it is multiplied by one constant that is chosen on the judged rows. "
    "Skill is 1 - error / error of the best null. The interval score is compared with that of a constant factor whose "
    "width is the best one for the other sets. Where all are pooled every set weighs the same."
)
_DOUBTS: tuple[Column[Doubt], ...] = (
    Column(head="set", cell=lambda d: d.dataset, left=True),
    Column(head="kind", cell=lambda d: d.kind, left=True),
    Column(head="lines", cell=lambda d: d.lines, left=True),
    Column(head="what", cell=lambda d: d.text, left=True),
)
_RATIOS = {0.25: "-75%", 0.5: "-50%", 0.8: "-20%", 1.0: "0%", 1.25: "+25%", 2.0: "+100%", 4.0: "+300%"}
_IMAGES = 90 * 1_281_167


def for_terminal(validation: Validation) -> TerminalReport:
    """Return what is printed: the line of each set and pooled, and what the defaults change."""
    tables = [scores_table(validation.scores, f"Published measurements, predicted by {validation.predictor}")]
    return TerminalReport(tables=tables, answers=tuple(_answers(validation)))


def audit_report(doubts: Sequence[Doubt]) -> TerminalReport:
    """Return what ``--audit`` prints."""
    return TerminalReport(tables=[_audit_table(doubts)])


def scores_table(scores: Sequence[Score], title: str, head: str = "set") -> Table:
    """Return the line of each set, and of all sets, collectives and steps apart."""
    summed = [] if head != "set" else pooled(scores)
    return table(
        title=title,
        columns=(Column(head=head, cell=lambda s: s.name, left=True), *_ERRORS),
        sections=_by_quantity([*scores, *summed]),
        note=_NOTE,
        strong=lambda score: score in summed,
    )


def _by_quantity(scores: Sequence[Score]) -> dict[str, list[Score]]:
    names = dict.fromkeys(score.quantity for score in scores)
    return {f"{name}s": [score for score in scores if score.quantity == name] for name in names}


def _contestants_table(validation: Validation) -> Table:
    scores = validation.scores
    names = dict.fromkeys(name for score in scores for row in score.rows_judged for name in row.others)
    ordered = [*(name for name in MODELS if name in names), *(name for name in names if name not in MODELS)]

    def error(name: str, score: Score) -> str:
        ratios = [row.others[name] / row.measured - 1 for row in score.rows_judged if name in row.others]
        return percent(float(np.median(np.abs(ratios)))) if ratios else ""

    return table(
        title="The median error of everyone",
        columns=[
            Column(head="set", cell=lambda s: s.name, left=True),
            Column(head=validation.predictor, cell=lambda s: percent(s.median_abs_error)),
            *(Column(head=name, cell=partial(error, name)) for name in ordered),
        ],
        sections=_by_quantity(scores),
        note="Calculon and PyTorch Inductor are the published formulas of an allreduce; their step is computation and "
        "then one allreduce of all gradients.",
    )


def _audit_table(doubts: Sequence[Doubt]) -> Table:
    return table(
        title="What is wrong in the published tables, or hardly so",
        columns=_DOUBTS,
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


def _records_table(rows: Sequence[JudgedRow]) -> Table | None:
    """Return what explains each large-batch record: rate of a device, efficiency, and where the time of a step goes."""
    records = [row for row in rows if row.dataset == "records"]
    if not records:
        return None

    def alone_s(row: JudgedRow) -> float:
        times = row.inputs.workload.times(row.inputs.plan.local_batch)
        return float(times.forward_s.sum() + times.backward_s.sum()) + times.overhead_s

    def free_s(row: JudgedRow) -> float:
        own = row.inputs
        return price(scheduled(own.workload, own.machine, own.plan), own.machine, FREE_NETWORK).step_s

    def steps(row: JudgedRow) -> float:
        return _IMAGES / row.inputs.plan.global_batch

    def minutes(row: JudgedRow, seconds: float) -> str:
        return f"{steps(row) * seconds / 60:.3g}"

    columns: tuple[Column[JudgedRow], ...] = (
        Column(head="record", cell=lambda r: str(r.published.values["work"]), left=True),
        Column(head="devices", cell=lambda r: str(r.devices)),
        Column(head="steps", cell=lambda r: f"{steps(r):.0f}"),
        Column(head="images/s a device", cell=lambda r: f"{r.inputs.plan.local_batch / r.measured:.0f}"),
        Column(head="one device alone", cell=lambda r: f"{r.inputs.plan.local_batch / alone_s(r):.0f}"),
        Column(head="efficiency", cell=lambda r: f"{alone_s(r) / r.measured:.0%}"),
        Column(
            head="predicted",
            cell=lambda r: f"{alone_s(r) / r.predicted:.0%} ({alone_s(r) / r.high:.0%} to {alone_s(r) / r.low:.0%})",
        ),
        Column(head="computation", cell=lambda r: f"{alone_s(r) / r.predicted:.0%}"),
        Column(head="waiting", cell=lambda r: f"{(free_s(r) - alone_s(r)) / r.predicted:.0%}"),
        Column(head="communication", cell=lambda r: f"{1 - free_s(r) / r.predicted:.0%}"),
        Column(head="minutes", cell=lambda r: minutes(r, r.measured)),
        Column(
            head="predicted minutes",
            cell=lambda r: f"{minutes(r, r.predicted)} ({minutes(r, r.low)} to {minutes(r, r.high)})",
        ),
    )
    return table(
        title="The large-batch records",
        columns=columns,
        sections={counted(len(records), "record"): records},
        note="The rate of a device is implied by 90 epochs in the published time. Efficiency is over one device alone; "
        "computation, waiting for the slowest and exposed communication are shares of the predicted step.",
    )


def _answers(validation: Validation) -> Iterator[str]:
    shipped = {score.quantity: score for score in pooled(validation.shipped_scores)}
    for score in pooled(validation.scores):
        text = (
            f"{score.quantity.capitalize()}s: {percent(score.median_abs_error)} median error of "
            f"{validation.predictor} against {percent(score.null_median_abs_error)} of the best nulls (skill "
            f"{skill_text(score.skill)}), {score.coverage:.0%} inside the 90% intervals, {score.too_fast:.0%} too "
            f"fast, over {score.rows} rows of {score.cases} cases."
        )
        before = shipped.get(score.quantity)
        if before is not None and before.median_abs_error != score.median_abs_error:
            text += (
                f" With the defaults that come with dpsim, taken from all of these sets: "
                f"{percent(before.median_abs_error)}, {before.coverage:.0%} inside, {before.too_fast:.0%} too fast."
            )
        yield text
    if validation.sealed:
        yield f"{validation.sealed} rows are sealed: their outcomes are not published yet, and they are not scored."


def tables(validation: Validation) -> list[Table]:
    """Return the tables of the page: scores, contestants, records, doubts, and where the measurements come from."""
    shipped = scores_table(validation.shipped_scores, "The same with the defaults that come with dpsim")
    by_case = score_sets(scored(validation.rows), key=lambda row: row.part.case.name)
    shown = (
        scores_table(validation.scores, "Every set"),
        shipped if validation.as_shipped else None,
        scores_table(by_case, "Every question", head="question"),
        _contestants_table(validation),
        _records_table(scored(validation.rows)),
        _audit_table(audit(validation.sets)),
        _sets_table(validation.sets),
    )
    return [each for each in shown if each is not None]


def _content(validation: Validation) -> Content:
    return Content(
        name="validation",
        heading=f"Published measurements, predicted by {validation.predictor}",
        question="How far are predictions from what other people measured and published, against nulls that know the "
        "same, and do the stated intervals hold it?",
        answers=tuple(_answers(validation)),
        cards=tuple(
            Card(
                title=score.name,
                tiles=(
                    Tile(value=percent(score.median_abs_error), label="median error"),
                    Tile(value=skill_text(score.skill), label="skill over the best null of each set"),
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
            "An input that published machines leave open is what the other sets imply, never the set itself.",
            *(f"{case.name}: {case.question} {' '.join(case.assumptions)}".rstrip() for case in validation.cases),
        ),
        facts=tuple(
            (f"{each.field} for {name}", f"{each.value:.3g} (doubt {each.doubt:.0%}): {each.text}")
            for name, of_set in validation.assumed.items()
            for each in of_set
        ),
        environment=(),
    )


def _skill_chart(scores: Sequence[Score]) -> Chart:
    """Return the error over that of the best null of each set, with the quartiles over its cases."""

    def dot(score: Score) -> Dot:
        names = np.array([row.case for row in score.rows_judged])
        least = 1e-3
        ratios = [
            max(float(np.median(score.errors[names == name])), least)
            / max(float(np.median(score.null_errors[names == name])), least)
            for name in score.cases_named
        ]
        value = max(score.median_abs_error, least) / max(score.null_median_abs_error, least)
        low, high = np.quantile(ratios, [0.25, 0.75])
        return Dot(value=value, low=min(float(low), value), high=max(float(high), value), look="predicted")

    rows = Rows(
        title="Error over that of the best null",
        subtitle="left of the line at 1 the prediction has skill; bars: the middle half of the cases",
        x_label="median error over that of the best null",
        rows={score.name: [dot(score)] for score in scores},
        log=True,
    )
    return Chart(panels=[rows], height_in=0.8 + 0.3 * len(scores), columns=1)


def _ratio_chart(scores: Sequence[Score]) -> Chart:
    """Return predicted over measured against the measured time, a panel for collectives and one for steps."""

    def panel(title: str, members: Sequence[Score]) -> Lines:
        rows = [row for score in members for row in score.rows_judged]
        ends = min(row.measured for row in rows) / 1.3, max(row.measured for row in rows) * 1.3
        series = [Series(name="", x=ends, y=(1.0, 1.0), look="ideal")]
        for number, score in enumerate(members):
            own = score.rows_judged
            ratio, low, high = ([getattr(r, n) / r.measured for r in own] for n in ("predicted", "low", "high"))
            x = [row.measured for row in own]
            series.append(Series(name=score.name, x=x, y=ratio, low=low, high=high, look=number, dots=True))
        return Lines(
            title=title,
            subtitle="predicted over measured, with its 90% interval",
            x_label="measured, s",
            series=series,
            y_ticks=_RATIOS,
            log_x=True,
            log_y=True,
            x_span=ends,
            y_span=(min(_RATIOS), max(_RATIOS)),
            names="legend",
        )

    return Chart(panels=[panel(name, members) for name, members in _by_quantity(scores).items()], height_in=4.4)


def write_validation(folder: Path, validation: Validation) -> list[Path]:
    """Write ``index.html``, ``report.md``, the figures and ``points.csv``; return the paths. Raises ``ConfigError``."""
    from dpsim.report.frames import table as frame

    scores = validation.scores
    figures = [
        figure(
            "skill",
            "Skill on every set",
            "The median error of each set over that of its best null without hindsight.",
            _skill_chart(scores) if scores else None,
        ),
        figure(
            "predicted_over_measured",
            "Predicted over measured",
            "Every judged row of every set with its predicted 90% interval.",
            _ratio_chart(scores) if scores else None,
        ),
    ]
    points = folder / "points.csv"
    columns = list(columns_of(JudgedRow).values())
    write_text(
        points, frame([row.values() for row in validation.rows], columns).to_csv(index=False, lineterminator="\n")
    )
    return [points, *write_content(folder, _content(validation), figures)]
