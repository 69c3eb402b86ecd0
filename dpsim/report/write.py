"""Writes a report's files: the page, the Markdown, and the figures as SVG and PNG."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.records.comparison import Comparison
from dpsim.records.reproduce import ReproduceRecord
from dpsim.records.sweep import Predictions, Results
from dpsim.report.sweep.facts import environment_facts, run_facts
from dpsim.report.sweep.timelines import Timelines

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from dpsim.report.content import Content

_STEP_TIME = (
    "Step time against the fusion threshold. Dots: measured medians with their 95% intervals; line: predicted "
    "beforehand, with its assumed band; dashed: what the four nulls say. Threshold 0 is one allreduce per tensor, inf "
    "one per step."
)
_SPEEDUP = (
    "Speedup against the number of devices: samples/s over those of one device. Dots: measured, with the 95% interval "
    "of the step; line: predicted beforehand, with its assumed band; dashed: what the nulls say; perfect scaling is "
    "the ideal."
)
DRIFT = (
    "Drift from the run on one device against the number of devices. Dots: measured, one per configuration; line: "
    "predicted beforehand. Both axes are logarithmic; what is promised to be identical has no drift and is not drawn."
)
_TIMELINE = (
    "One training step of the fastest setting on the most devices, of one rank: measured above, predicted below, on "
    "one time axis. Hatched: computation waits for communication."
)
_WHERE = "Where a step's time goes at each setting: measured on the left, predicted (hatched) on the right."


def write_report(
    folder: Path,
    predictions: Predictions,
    results: Results,
    comparison: Comparison,
    drift: ReproduceRecord | None = None,
) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figures into ``folder``; returns the paths written.

    ``comparison`` is ``dpsim.harness.sweep.compare.compare(predictions, results, drift)``. Loads matplotlib.
    Raises ``ConfigError`` when the folder cannot be written to.
    """
    from dpsim.report.content import content

    facts = run_facts(comparison, predictions, results), environment_facts(results.environment)
    figures = _figures(comparison, Timelines.of(predictions, results), drift)
    return write_content(folder, content(comparison, *facts), figures)


def write_content(folder: Path, content: Content, figures: list[tuple[str, str, str, Figure, Figure]]) -> list[Path]:
    """Write a report and its figures: (name, title, caption, for wide windows, for narrow ones) each.

    Raises ``ConfigError`` when the folder cannot be written to.
    """
    from dpsim.report.markdown import markdown
    from dpsim.report.page import PageFigure, page

    written: list[Path] = []
    shown: list[PageFigure] = []
    linked: list[tuple[str, str]] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, title, caption, wide, narrow in figures:
            from dpsim.report.figures import inline_svg, save

            written += save(wide, folder, name)
            linked.append((f"{name}.svg", caption))
            shown.append(
                PageFigure(
                    title=title,
                    caption=caption,
                    wide=inline_svg(wide, f"{name}-wide", caption),
                    narrow=inline_svg(narrow, f"{name}-narrow", caption),
                )
            )
    except OSError as error:
        raise ConfigError(
            f"cannot write the report into {folder}: {error.strerror or error}",
            allowed="a folder that you may write to",
            remedy="choose another one with --output",
        ) from error
    for path, text in (
        (folder / "index.html", page(content, shown, _links(folder))),
        (folder / "report.md", markdown(content, linked)),
    ):
        codec.write_text(path, text)
        written.append(path)
    return written


def _links(folder: Path) -> list[tuple[str, str]]:
    """The Markdown, the records that are there, and the pages of folders below."""
    records = sorted(path.name for path in folder.glob("*.json"))
    below = sorted(path.parent.name for path in folder.glob("*/index.html"))
    return [
        ("as Markdown", "report.md"),
        *((name, name) for name in records),
        *((f"{name}: report", f"{name}/index.html") for name in below),
    ]


def _figures(
    comparison: Comparison, timelines: Timelines, record: ReproduceRecord | None
) -> list[tuple[str, str, str, Figure, Figure]]:
    """Name, title, caption, and the figure for wide and narrow windows."""
    if not comparison.groups:
        return []
    from dpsim.report.figures import drift, speedup, step_time, timeline, where_time_goes

    if comparison.scaling is None:
        main, of_narrow = step_time.draw(comparison), step_time.draw(comparison, narrow=True)
        found = [("step_time", "Step time", _STEP_TIME, main, of_narrow)]
    else:
        main, of_narrow = speedup.draw(comparison), speedup.draw(comparison, narrow=True)
        found = [("speedup", "Speedup", _SPEEDUP, main, of_narrow)]
    if record is not None and record.drift:
        found.append(("drift", "Drift", DRIFT, drift.draw(record), drift.draw(record, narrow=True)))
    wide, narrow = timeline.draw(comparison, timelines), timeline.draw(comparison, timelines, narrow=True)
    if wide is not None and narrow is not None:
        found.append(("timeline", "One step, measured and predicted", _TIMELINE, wide, narrow))
    wide, narrow = where_time_goes.draw(comparison, timelines), where_time_goes.draw(comparison, timelines, narrow=True)
    found.append(("where_time_goes", "Where the time goes", _WHERE, wide, narrow))
    return found
