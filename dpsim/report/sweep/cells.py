"""The columns of the tables of points: those that ``ComparedPoint`` declares, as tables show them, and a few more."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dpsim.columns import columns_of
from dpsim.records.compared_point import ComparedPoint
from dpsim.records.comparison import Comparison
from dpsim.report.sweep.tables import band_name, group_title
from dpsim.report.sweep.verdict import marker
from dpsim.report.table import Column, Table, table
from dpsim.report.words import FORMS, milliseconds_to

_OF_SEVERAL = {
    "algorithm",
    "buckets",
    "exposed_communication_s",
    "predicted_exposed_communication_s",
    "measured_speedup",
    "predicted_speedup",
    "efficiency",
}
"""Columns that say nothing about one device."""


def samples_per_s(point: ComparedPoint) -> str:
    """Return the measured samples per second with three digits."""
    return f"{float(f'{point.global_batch / point.measured_step_s:.3g}'):,.0f}"


@dataclass(frozen=True, kw_only=True)
class PointColumns:
    """The columns of a table of points of this comparison. Times have the decimals that the longest step needs."""

    comparison: Comparison

    @property
    def largest_s(self) -> float:
        """The longest measured step."""
        return max(point.measured_step_s for point in self.comparison.points)

    def __call__(self, name: str, dispensable: int = 0, *, head: str = "", shown: bool = True) -> Column[ComparedPoint]:
        """Return a declared column, dispensable in narrow terminals as ``report.table`` has it."""
        declared, largest_s = columns_of(ComparedPoint)[name], self.largest_s

        def cell(point: ComparedPoint) -> str:
            value = getattr(point, name)
            if value is None or (point.devices == 1 and name in _OF_SEVERAL):
                return ""
            text = milliseconds_to(value, largest_s) if declared.form == "ms" else FORMS[declared.form](value)
            return text + "*" * (name == "predicted_step_s" and point.extrapolated)

        return declared.in_table(
            cell,
            head=head or declared.head or name.replace("_", " "),
            left=declared.unit in ("name", "text") and name != "layout",
            dispensable=dispensable,
            shown=shown,
        )

    def interval(self, dispensable: int = 0) -> Column[ComparedPoint]:
        """Return the column of measured intervals."""
        return self._span("95% interval", "measured", dispensable)

    def predicted_interval(self) -> Column[ComparedPoint]:
        """Return the column of predicted intervals."""
        return self._span(f"predicted {band_name(self.comparison)}", "predicted", 8)

    def _span(self, head: str, source: str, dispensable: int) -> Column[ComparedPoint]:
        largest_s = self.largest_s

        def cell(point: ComparedPoint) -> str:
            ends = (getattr(point, f"{source}_{end}_s") for end in ("low", "high"))
            return " to ".join(milliseconds_to(end_s, largest_s) for end_s in ends)

        return Column(head=head, cell=cell, left=True, dispensable=dispensable)

    def exposed(self, dispensable: int, predicted: int) -> tuple[Column[ComparedPoint], ...]:
        """Return the columns of exposed communication, measured and predicted, with how dispensable each is."""
        return self("exposed_communication_s", dispensable), self("predicted_exposed_communication_s", predicted)

    def other_runtimes(self) -> tuple[Column[ComparedPoint], ...]:
        """Return the columns of what was measured beside PyTorch's DDP, each shown where it was."""
        return tuple(
            self(name, shown=any(getattr(point, name) is not None for point in self.comparison.scored))
            for name in ("dpsim_step_s", "hook_step_s", "ddp_step_s")
        )

    def samples_per_s(self, dispensable: int = 0) -> Column[ComparedPoint]:
        """Return the column of measured samples per second."""
        return Column(head="samples/s", cell=samples_per_s, dispensable=dispensable)

    def last(self, dispensable: int) -> tuple[Column[ComparedPoint], ...]:
        """Return what each table ends with: samples, the share of clean ones, and the marks of the best points."""
        marks: Column[ComparedPoint] = Column(head="best", cell=marker(self.comparison), left=True)
        has_shares = any(point.share_clean is not None for point in self.comparison.scored)
        return self("samples", dispensable), self("share_clean", dispensable, shown=has_shares), marks


def points_table(
    comparison: Comparison,
    columns: Sequence[Column[ComparedPoint]],
    note: str,
    sections: Mapping[str, Sequence[ComparedPoint]] | None = None,
) -> Table:
    """Return the table of points, a section for each group unless others are given."""
    mark = marker(comparison)
    of_groups = {group_title(group): comparison.members(group) for group in comparison.groups}
    return table(
        title="Measured and predicted",
        columns=columns,
        sections=of_groups if sections is None else sections,
        strong=lambda point: bool(mark(point)),
        note=note,
    )
