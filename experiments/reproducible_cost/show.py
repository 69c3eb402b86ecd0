"""The costs as lines of text, and as a report with the curve over the batch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from dpsim import codec
from dpsim.experiments.reproducible_cost.cases import AGAIN, PLAIN, SCHEMA, Case, CostRecord, Measured
from dpsim.harness.measurement.statistics import Interval, median_ratio
from dpsim.report.content import Content, environment_facts
from dpsim.report.figures.style import MUTED, RULE, labels_at_right, panels, styled
from dpsim.report.table import Column, Table, table
from dpsim.report.write import ReportFigure, write_content

RECORD = "cost.json"
_COLOURS = ("#0071b1", "#d45d00", "#009e73")
_RULES = (
    "Plain and reproducible training of one model at one global batch, each on a replica of its own, take turns of a "
    "few steps in random order, in one run on ranks pinned to cores. The first two steps of a turn and the first "
    "round do not count.",
    "A step lasts from the slowest rank's end to the next one's. A turn gives one median; ratios are those of the "
    "medians over rounds, with their 95 % interval over paired rounds.",
    "Plain training runs twice: its ratio to itself is the noise.",
)


def ratio(measured: Measured, name: str) -> Interval:
    """A mode's step over the plain one's. The ratio of ``plain again`` is the noise."""
    return median_ratio(measured.step_s[name], measured.step_s[PLAIN])


def _title(case: Case) -> str:
    return f"{case.model} on {case.dataset}, B = {case.global_batch}"


def _devices(count: int) -> str:
    return f"{count} device{'s' * (count > 1)}"


def _limit(case: Case, name: str) -> float | None:
    return case.limit if name == case.modes[0].name else None


def lines(measured: Measured) -> Iterator[str]:
    """A case as lines of text for the terminal."""
    case = measured.case
    yield f"{_title(case)}, {_devices(case.devices)}, {len(measured.step_s[PLAIN])} rounds"
    for name, steps_s in measured.step_s.items():
        over, limit = ratio(measured, name), _limit(case, name)
        step = f"{np.median(steps_s) * 1e3:9.2f} ms  {over.median:.3f}  ({over.low:.3f} to {over.high:.3f})"
        yield f"  {name:<30} {step}" + (f"  limit {limit:.2f}" if limit else "")


def write(folder: Path, record: CostRecord) -> Path:
    """Write the record and its report into a folder; returns the page. Raises ``ConfigError``."""
    folder.mkdir(parents=True, exist_ok=True)
    codec.write(folder / RECORD, record)
    return next(path for path in write_report(folder, record) if path.suffix == ".html")


def read(folder: Path) -> CostRecord:
    """Read the record in a folder. Raises ``FileFormatError``."""
    return codec.read(folder / RECORD, CostRecord, "record of reproducible_cost", SCHEMA)


def write_report(folder: Path, record: CostRecord) -> list[Path]:
    """Write the page, the Markdown and the figure of the curve over the batch. Raises ``ConfigError``."""
    figures = []
    if curves := _curves(record):
        caption = (
            "Reproducible training's step over the plain one's at the same global batch, against the batch: "
            f"{curves[0].case.model}, whose weights take 40 MB. Bars: 95 % intervals."
        )
        wide, narrow = _figure(curves), _figure(curves, narrow=True)
        title = "Cost against the global batch"
        figures.append(ReportFigure(name="cost", title=title, caption=caption, wide=wide, narrow=narrow))
    return write_content(folder, content(record), figures)


def content(record: CostRecord) -> Content:
    """Return what the report of the costs says."""
    return Content(
        name="cost of reproducible training",
        heading="What do the same bits on any number of devices cost?",
        question="How much longer does a step take with --reproducible than without, at the same global batch?",
        answers=tuple(_answers(record)),
        cards=(),
        tables=(_table(record),),
        warnings=(),
        rules=_RULES,
        facts=(("measured", f"{record.measured_from} to {record.measured_until}"),),
        environment=environment_facts(record.environment),
    )


def _answers(record: CostRecord) -> Iterator[str]:
    for measured in record.measured:
        case = measured.case
        if case.limit is not None:
            over, noise = ratio(measured, case.modes[0].name), ratio(measured, AGAIN)
            verdict = "within" if over.median <= case.limit else "OVER"
            yield (
                f"{_title(case)}, {_devices(case.devices)}: {over.median - 1:+.1%} with {case.modes[0].name} "
                f"({over.low - 1:+.1%} to {over.high - 1:+.1%}; plain against plain {noise.median - 1:+.1%}), "
                f"{verdict} the limit of {case.limit - 1:+.0%}."
            )


def _table(record: CostRecord) -> Table:
    sections: dict[str, list[tuple[Measured, str]]] = {}
    for measured in record.measured:
        case = measured.case
        rows = sections.setdefault(f"{case.model} on {case.dataset}, {_devices(case.devices)}", [])
        rows += [(measured, name) for name in measured.step_s]
    return table(
        title="Steps",
        columns=(
            Column(head="B", cell=lambda row: str(row[0].case.global_batch)),
            Column(head="mode", cell=lambda row: row[1], left=True),
            Column(head="step", cell=lambda row: f"{np.median(row[0].step_s[row[1]]) * 1e3:.2f} ms"),
            Column(head="over plain", cell=lambda row: f"{ratio(*row).median:.3f}"),
            Column(
                head="95 %",
                cell=lambda row: f"{ratio(*row).low:.3f} to {ratio(*row).high:.3f}",
                left=True,
                dispensable=1,
            ),
            Column(head="limit", cell=lambda row: f"{limit:.2f}" if (limit := _limit(row[0].case, row[1])) else ""),
            Column(head="rounds", cell=lambda row: str(len(row[0].step_s[row[1]])), dispensable=2),
        ),
        sections=sections,
        note="Plain: batch norm local, gradients summed rank after rank; medians.",
    )


def _curves(record: CostRecord) -> list[Measured]:
    """The cases of the first model with several batches."""
    batches: dict[str, set[int]] = {}
    for measured in record.measured:
        batches.setdefault(measured.case.model, set()).add(measured.case.global_batch)
    several = [model for model, sizes in batches.items() if len(sizes) > 1]
    return [measured for measured in record.measured if measured.case.model in several[:1]]


def _figure(curves: Sequence[Measured], *, narrow: bool = False) -> Figure:
    counts = sorted({measured.case.devices for measured in curves})

    def make() -> Figure:
        figure, axes = panels(len(counts), narrow=narrow, height_in=3.4)
        for axis, count in zip(axes, counts, strict=True):
            curve = sorted((m for m in curves if m.case.devices == count), key=lambda m: m.case.global_batch)
            _panel(axis, _devices(count), curve)
        return figure

    return styled(make)


def _panel(axis: Axes, title: str, curve: Sequence[Measured]) -> None:
    batches = [measured.case.global_batch for measured in curve]
    axis.set_xscale("log", base=2)
    axis.grid(axis="y", color=RULE, linewidth=0.6)
    axis.axhline(1.0, color=MUTED, linewidth=0.8)
    labels = []
    for mode, colour in zip(curve[0].case.modes, _COLOURS, strict=False):
        ratios = [ratio(measured, mode.name) for measured in curve]
        medians = [ratio.median for ratio in ratios]
        bars = [[ratio.median - ratio.low for ratio in ratios], [ratio.high - ratio.median for ratio in ratios]]
        axis.errorbar(batches, medians, yerr=bars, color=colour, marker="o", markersize=4, linewidth=1.5, capsize=2)
        labels.append((medians[-1], f"{mode.leaves} leaves", colour))
    axis.set_ylim(bottom=min(0.9, axis.get_ylim()[0]))
    labels_at_right(axis, labels, gap=0.07)
    axis.set_xticks(batches, [str(batch) for batch in batches], minor=False)
    axis.xaxis.minorticks_off()
    axis.set_xlabel("global batch")
    axis.set_title(title, loc="left", fontsize=10.5, fontweight="bold", pad=18)
    axis.text(0, 1.02, "step over the plain one", transform=axis.transAxes, color=MUTED, fontsize=8.5, va="bottom")
