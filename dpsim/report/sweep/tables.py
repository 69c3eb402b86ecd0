"""The tables of a report as text cells, once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

from dpsim.records.comparison import NULL_NAMES, ComparedPoint, Comparison, Group, Overall, Score
from dpsim.report.words import (
    EMULATED_COMPUTE,
    devices_name,
    milliseconds_beside,
    network_name,
    percent,
    skill_text,
)
from dpsim.units import format_size

MEASURED_MARK, PREDICTED_MARK = "★", "◆"
LEGEND = f"{MEASURED_MARK} best measured   {PREDICTED_MARK} best predicted"
_SHORT_NULLS = {
    "constant": "constant",
    "perfect_scaling": "perfect scaling",
    "alpha_beta_no_overlap": "no overlap",
    "largest_bucket": "largest bucket",
}
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column's head and alignment; where width is short the columns of highest ``dispensable`` go first, 0 never."""

    head: str
    left: bool = False
    dispensable: int = 0


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of cells under a title; ``strong`` are the rows to stress."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    strong: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, a note, and sections of rows under one set of columns."""

    title: str
    columns: tuple[Column, ...]
    sections: tuple[Section, ...]
    note: str = ""


def tables(comparison: Comparison) -> tuple[Table, ...]:
    """The main table, and ``score_tables``."""
    return points_table(comparison), *score_tables(comparison)


def score_tables(comparison: Comparison) -> tuple[Table, ...]:
    """The scores, and (where it was run with and without) what overlap does."""
    found = []
    if comparison.groups:
        found.append(scores_table(comparison))
    if comparison.overlap:
        found.append(overlap_table(comparison))
    return tuple(found)


def by_network(items: Iterable[Item], name: Callable[[Item], str]) -> dict[str, list[Item]]:
    """The items under the names of their networks, in the order in which these appear."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(name(item), []).append(item)
    return found


def points_table(comparison: Comparison) -> Table:
    """Every scored point: measured, predicted, and what it means."""
    algorithms = len({p.algorithm for p in comparison.scored if p.devices > 1}) > 1
    columns = [
        Column(head="devices"),
        Column(head="fusion threshold", left=True),
        Column(head="buckets", dispensable=3),
        Column(head="measured ms"),
        Column(head="95% interval", left=True),
        Column(head="predicted ms"),
        Column(head="error"),
        Column(head="at equal speed", dispensable=6),
        Column(head="exposed ms", dispensable=1),
        Column(head="predicted exposed", dispensable=4),
        Column(head="speedup"),
        Column(head="predicted speedup", dispensable=2),
        Column(head="samples", dispensable=5),
        Column(head="best", left=True),
    ]
    if algorithms:
        columns.insert(2, Column(head="algorithm", left=True))
    longest = max(p.measured_step_s for p in comparison.points)
    sections = []
    for network, points in by_network(comparison.scored, lambda p: network_name(p.network, p.emulated_network)).items():
        rows = [_point_row(p, longest, algorithms) for p in points]
        strong = tuple(i for i, p in enumerate(points) if p.is_best_measured or p.is_best_predicted)
        overlap = comparison.chosen_overlap.get(points[0].network, "")
        title = f"{network}, overlap {overlap}" if any(p.devices > 1 for p in points) else network
        sections.append(Section(title=title, rows=tuple(rows), strong=strong))
    emulated = " Computation is emulated." if any(p.emulated_compute for p in comparison.points) else ""
    return Table(
        title="Measured and predicted",
        columns=tuple(columns),
        sections=tuple(sections),
        note=f"{LEGEND}. Median step, 95% bootstrap interval of the median; error = predicted / measured - 1, at equal "
        f"speed as it would be predicted for the speeds that the run had; "
        f"exposed = communication not hidden by computation; speedup over 1 device at the same global batch. "
        f"Threshold 0 is one allreduce per tensor, inf one per step.{emulated}",
    )


def _point_row(point: ComparedPoint, longest: float, algorithms: bool) -> tuple[str, ...]:
    several = point.devices > 1

    def ms(seconds: float) -> str:
        return milliseconds_beside(seconds, longest)

    def times(speedup: float | None) -> str:
        return "" if speedup is None or not several else f"{speedup:.2f}x"

    mark = MEASURED_MARK * point.is_best_measured + PREDICTED_MARK * point.is_best_predicted
    cells = [
        point.layout,
        format_size(point.fusion_threshold_bytes) if several else "",
        str(point.buckets) if several else "",
        ms(point.measured_step_s),
        f"{ms(point.measured_low_s)} to {ms(point.measured_high_s)}",
        ms(point.predicted_step_s) + ("*" if point.extrapolated else ""),
        percent(point.error, sign=True),
        "" if point.error_at_equal_speed is None else percent(point.error_at_equal_speed, sign=True),
        ms(point.exposed_communication_s) if several else "",
        ms(point.predicted_exposed_communication_s) if several else "",
        times(point.measured_speedup),
        times(point.predicted_speedup),
        str(point.samples),
        mark,
    ]
    if algorithms:
        cells.insert(2, point.algorithm if several else "")
    return tuple(cells)


def scores_table(comparison: Comparison) -> Table:
    """The model's median absolute error against the nulls', a network and device count each, or a network."""
    of_devices = comparison.scaling is not None
    nulls = comparison.groups[0].step.null_errors
    columns = (
        Column(head="devices"),
        Column(head="of", left=True),
        Column(head="model"),
        Column(head="p90", dispensable=2),
        *(Column(head=_SHORT_NULLS[name]) for name in NULL_NAMES if name in nulls),
        Column(head="skill"),
        Column(head="regret"),
        Column(head="A/A noise", dispensable=3),
        Column(head="effect", dispensable=4),
    )
    sections = []
    for network, groups in by_network(comparison.groups, lambda g: network_name(g.network, g.emulated_network)).items():
        rows = [row for g in groups for row in _score_rows(str(g.devices or "above 1"), g)]
        if len(groups) > 1:
            overall = next(o for o in comparison.networks if o.network == groups[0].network)
            rows += _score_rows("all", overall)
        sections.append(Section(title=network, rows=tuple(rows), strong=tuple(range(0, len(rows), 2))))
    if comparison.overall is not None and len(sections) > 1:
        rows = _score_rows("all", comparison.overall)
        sections.append(Section(title="all networks, real and emulated", rows=tuple(rows), strong=(0,)))
    return Table(
        title=f"The model against {'three' if of_devices else 'four'} nulls",
        columns=columns,
        sections=tuple(sections),
        note="Median absolute errors. Skill = 1 - model / best null: above 0 the model knows more than the null. "
        f"Constant: the median of the measured steps of that network{'' if of_devices else ' and device count'}, known "
        f"only with hindsight{' (one device is among them)' if of_devices else ''}. "
        "The error of exposed communication is given as a percentage of the step time. Regret: what following the "
        "prediction costs, best chosen on one half of the rounds and timed on the other (so chance can make it "
        "negative). "
        f"Effect: worst over best measured {'device count by samples/s' if of_devices else 'threshold'}, minus 1."
        + _single(comparison),
    )


def _single(comparison: Comparison) -> str:
    error = comparison.single_device_median_abs_error
    if error is None:
        return ""
    return (
        " One device is scored apart, because without communication the prediction only repeats the profiled times: "
        f"median error {percent(error)}."
    )


def _score_rows(devices: str, group: Group | Overall) -> list[tuple[str, ...]]:
    def row(first: str, name: str, score: Score, rest: tuple[str, ...]) -> tuple[str, ...]:
        nulls = (percent(score.null_errors[n]) for n in NULL_NAMES if n in score.null_errors)
        model = percent(score.median_abs_error), percent(score.p90_abs_error)
        return (first, name, *model, *nulls, skill_text(score.skill), *rest)

    noise = "unknown" if group.noise is None else percent(group.noise)
    return [
        row(devices, "step time", group.step, (percent(group.regret, sign=True), noise, percent(group.effect))),
        row("", "exposed", group.exposed_communication, ("", "", "")),
    ]


def overlap_table(comparison: Comparison) -> Table:
    """What overlap does to the step, measured and predicted."""
    signs = {True: "right", False: "wrong", None: "within noise"}
    columns = (
        Column(head="devices"),
        Column(head="fusion threshold", left=True),
        Column(head="overlap", left=True),
        Column(head="measured"),
        Column(head="predicted"),
        Column(head="noise"),
        Column(head="predicted sign", left=True),
    )
    sections = tuple(
        Section(
            title=network,
            rows=tuple(
                (
                    str(e.devices),
                    format_size(e.fusion_threshold_bytes),
                    e.overlap,
                    percent(e.measured_effect, sign=True),
                    percent(e.predicted_effect, sign=True),
                    percent(e.noise),
                    signs[e.sign_right],
                )
                for e in effects
            ),
            strong=tuple(i for i, e in enumerate(effects) if e.sign_right is False),
        )
        for network, effects in by_network(
            comparison.overlap, lambda e: network_name(e.network, e.emulated_network)
        ).items()
    )
    return Table(
        title="What overlap does",
        columns=columns,
        sections=sections,
        note="Step time with overlap over step time with overlap off, minus 1: negative is faster. Noise: the larger "
        "of the A/A difference and the half widths of both intervals.",
    )


def where(point: ComparedPoint) -> str:
    """``2 devices on node``, for captions."""
    text = f"{devices_name(point.devices)} on {network_name(point.network, point.emulated_network)}"
    return text + (EMULATED_COMPUTE if point.emulated_compute else "")
