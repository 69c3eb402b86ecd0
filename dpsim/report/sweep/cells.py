"""The cells and columns of a point that the tables of several questions have."""

from __future__ import annotations

from dataclasses import dataclass

from dpsim.records.comparison import ComparedPoint, Comparison
from dpsim.report.table import Column
from dpsim.report.words import milliseconds_to, percent


def is_best(point: ComparedPoint) -> bool:
    """Return whether a point was measured or predicted to be the fastest of its group."""
    return point.is_best_measured or point.is_best_predicted


@dataclass(frozen=True, kw_only=True)
class PointCells:
    """Cells with the times of a point; ``largest_s`` is the longest step of the table."""

    largest_s: float

    @classmethod
    def of(cls, comparison: Comparison) -> PointCells:
        """The cells of a table with points of this comparison."""
        return cls(largest_s=max(point.measured_step_s for point in comparison.points))

    def measured(self, point: ComparedPoint) -> str:
        return milliseconds_to(point.measured_step_s, self.largest_s)

    def interval(self, point: ComparedPoint) -> str:
        low, high = (milliseconds_to(s, self.largest_s) for s in (point.measured_low_s, point.measured_high_s))
        return f"{low} to {high}"

    def predicted(self, point: ComparedPoint) -> str:
        return milliseconds_to(point.predicted_step_s, self.largest_s) + "*" * point.extrapolated

    def predicted_interval(self, point: ComparedPoint) -> str:
        low, high = (milliseconds_to(s, self.largest_s) for s in (point.predicted_low_s, point.predicted_high_s))
        return f"{low} to {high}"

    def own_runtime(self, point: ComparedPoint) -> str:
        return "" if point.dpsim_step_s is None else milliseconds_to(point.dpsim_step_s, self.largest_s)

    def exposed(self, point: ComparedPoint) -> str:
        return milliseconds_to(point.exposed_communication_s, self.largest_s) if point.devices > 1 else ""

    def predicted_exposed(self, point: ComparedPoint) -> str:
        return milliseconds_to(point.predicted_exposed_communication_s, self.largest_s) if point.devices > 1 else ""


def error(point: ComparedPoint) -> str:
    return percent(point.error, sign=True)


def algorithm(point: ComparedPoint) -> str:
    return point.algorithm if point.devices > 1 else ""


def speedup(point: ComparedPoint) -> str:
    return _times(point, point.measured_speedup)


def predicted_speedup(point: ComparedPoint) -> str:
    return _times(point, point.predicted_speedup)


def _times(point: ComparedPoint, value: float | None) -> str:
    return "" if value is None or point.devices == 1 else f"{value:.2f}x"


def best_marks(point: ComparedPoint) -> str:
    return "★" * point.is_best_measured + "◆" * point.is_best_predicted


def samples_per_s(point: ComparedPoint) -> str:
    """Return the measured samples per second with three digits."""
    return f"{float(f'{point.global_batch / point.measured_step_s:.3g}'):,.0f}"


def efficiency(point: ComparedPoint) -> str:
    """Return speedup over devices; nothing on one device."""
    if point.devices == 1 or point.measured_speedup is None:
        return ""
    return percent(point.measured_speedup / point.devices)


def own_runtime_column(comparison: Comparison, cells: PointCells) -> Column[ComparedPoint]:
    """Return the column of dpsim's own runtime, shown where that was measured beside PyTorch's DDP."""
    measured = any(point.dpsim_step_s is not None for point in comparison.scored)
    return Column(head="dpsim's runtime (emulated computation) ms", cell=cells.own_runtime, shown=measured)
