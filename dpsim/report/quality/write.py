"""Writes the report of a study of training quality."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any

from dpsim.records.quality_results import QualityResults
from dpsim.report.charts import Chart, Lines
from dpsim.report.quality.charts import HEIGHT_IN, divergence_panel, gap_panel, steps_panel
from dpsim.report.quality.content import content
from dpsim.report.write import PAGES, ReportFigure, write_content

GAP_CAPTION = (
    "The gap of batch norm against the local batch: log of the training loss over that with the global batch's "
    "statistics. Filled dots were fitted, open dots were held out; bars are 95 % intervals over seeds. Line: the fit. "
    "Devices are emulated as leaves of one rank."
)
DIVERGENCE_CAPTION = (
    "Divergence of a local batch's statistics from the global batch's, predicted against measured, one dot a norm "
    "and local batch. On the line they are equal. Faint: the baseline of independent rows. Devices are emulated as "
    "leaves of one rank."
)
STEPS_CAPTION = (
    "Steps to the target loss against the global batch. Filled dots were fitted, open dots were held out; bars span "
    "all seeds. Line: S_min (1 + B_noise / B); dashed: the power law. Both axes are logarithmic."
)


def write_quality_report(folder: Path, results: QualityResults, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write the page, the Markdown and the figures. Raises ``ConfigError``."""
    return write_content(folder, content(results), list(quality_figures(results)), pages)


def quality_figures(results: QualityResults) -> Iterator[ReportFigure]:
    """Yield the figures of the parts that the study has."""
    parts: tuple[tuple[str, str, str, Sequence[Any], Callable[[Any], Lines]], ...] = (
        ("gap", "Gap of batch norm", GAP_CAPTION, results.gap, gap_panel),
        ("divergence", "Divergence of statistics", DIVERGENCE_CAPTION, results.divergence, divergence_panel),
        ("steps_to_target", "Steps to target", STEPS_CAPTION, results.steps_to_target, steps_panel),
    )
    for name, title, caption, results_of, panel in parts:
        if results_of:
            chart = Chart(panels=[panel(result) for result in results_of], height_in=HEIGHT_IN)
            yield ReportFigure(name=name, title=title, caption=caption, chart=chart)
