"""The figures of a report. Loading this package loads matplotlib; nothing that ``import dpsim`` loads does so."""

from dpsim.report.figures import bandwidth, drift, loss, speedup, step_time, timeline, where_time_goes
from dpsim.report.figures.style import inline_svg, save, save_as

__all__ = [
    "bandwidth",
    "drift",
    "inline_svg",
    "loss",
    "save",
    "save_as",
    "speedup",
    "step_time",
    "timeline",
    "where_time_goes",
]
