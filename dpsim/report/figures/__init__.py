"""The figures of a report. Loading this package loads matplotlib; nothing that ``import dpsim`` loads does so."""

from dpsim.report.figures import step_time, timeline, where_time_goes
from dpsim.report.figures.style import inline_svg, save

__all__ = ["inline_svg", "save", "step_time", "timeline", "where_time_goes"]
