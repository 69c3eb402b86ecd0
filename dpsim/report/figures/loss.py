"""The training loss against the step."""

from __future__ import annotations

from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from dpsim.records.train import TrainRecord
from dpsim.report.figures.style import MEASURED, grid, heading
from dpsim.report.words import counted


def panel(axis: Axes, record: TrainRecord) -> None:
    """Draw the mean training loss of every step."""
    grid(axis)
    axis.plot(range(1, len(record.losses) + 1), record.losses, color=MEASURED, linewidth=1.4)
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.tick_params(labelsize=8.5)
    axis.set_xlabel("step", fontsize=8.5)
    of = record.training
    where = f"{of['model']} on {of['dataset']}, {counted(record.devices, 'device')}"
    heading(axis, where, f"mean training loss of a step, global batch {of['global_batch']}")
