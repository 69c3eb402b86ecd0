"""The result of a training as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpsim.records.train import TrainRecord
from dpsim.report.saved.result import SavedResult
from dpsim.report.words import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SavedTraining(SavedResult):
    """The result of a training, which is one point."""

    kind: ClassVar[str] = "train"
    record: TrainRecord

    @property
    def title(self) -> str:
        """What was trained, and how well."""
        record = self.record
        of = record.training
        loss = "" if record.test_loss is None else f", test loss {record.test_loss:.4g}"
        return (
            f"training of {of['model']} on {of['dataset']}, {counted(record.devices, 'device')}, "
            f"{counted(record.steps, 'step')}: test accuracy {record.test_accuracy:.2%}{loss}"
        )

    def points(self) -> list[dict[str, Any]]:
        """Return the point: the training and its result, under the names of ``--json``."""
        return [self.record.point]

    def samples(self) -> pd.DataFrame:
        """Return a row for each step, with its loss. The file keeps the median step alone, not each step's time."""
        from dpsim.report.frames import repeated

        losses = np.array(self.record.losses, np.float64)
        values = {"step": np.arange(1, len(losses) + 1), "loss": losses}
        return repeated(self.points(), [len(losses)], values, self.columns("samples"))

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the training loss against the step."""
        from dpsim.report.figures import loss
        from dpsim.report.figures.style import on_axes

        return on_axes(ax, lambda axis: loss.panel(axis, self.record))
