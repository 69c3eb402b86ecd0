"""A check of reproducibility as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpsim.codec import to_builtins
from dpsim.errors import ConfigError
from dpsim.records.reproduce import ReproduceRecord
from dpsim.report.reproduce.result import points_json
from dpsim.report.saved.result import SavedResult
from dpsim.report.words import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SavedReproduction(SavedResult):
    """The trainings of one model in many configurations; a point is one of them."""

    kind: ClassVar[str] = "reproduce"
    record: ReproduceRecord

    @property
    def title(self) -> str:
        """What was trained, in how many configurations, and when."""
        of, runs = self.record.reproduction, counted(len(self.record.runs), "run")
        results = counted(len(self.record.trajectories), "different result")
        measured = f"measured from {self.record.measured_from}"
        return f"reproducibility of {of.model} on {of.dataset}: {runs}, {results}, {measured}"

    def points(self) -> list[dict[str, Any]]:
        """Return the points as ``--json`` prints them."""
        return points_json(self.record)

    def samples(self) -> pd.DataFrame:
        """Return a row for each step of each run: its configuration and its loss. Runs are not timed."""
        from dpsim.report.frames import repeated

        losses = [self.record.trajectories[run.trajectory].losses for run in self.record.runs]
        values = {
            "step": [step for each in losses for step in range(1, len(each) + 1)],
            "loss": np.array([loss for each in losses for loss in each], np.float64),
        }
        rows = [to_builtins(run.configuration) for run in self.record.runs]
        return repeated(rows, [len(each) for each in losses], values, self.columns("samples"))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the drift from one device against the number of devices. Raises ``ConfigError`` where there is none."""
        from dpsim.report.figures import drift
        from dpsim.report.figures.style import on_axes

        shown = drift.panels_of(self.record)
        if not shown:
            raise ConfigError(
                "no drift was measured: every configuration is promised to have the bits of one device",
                allowed="a figure of a record with configurations that drift",
                remedy="look at .frame(), whose column identical says which have the same bits",
            )
        return on_axes(ax, lambda axis: drift.panel(axis, shown[0]))
