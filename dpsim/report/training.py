"""The result of a training as data: one point, and a sample for each step."""

from __future__ import annotations

from typing import Any

import numpy as np

from dpsim.records.train import TrainRecord
from dpsim.report.charts import Lines, Series
from dpsim.report.saved import Samples
from dpsim.report.words import counted


def title(record: TrainRecord) -> str:
    """Return what was trained, and how well."""
    of = record.training
    loss = "" if record.test_loss is None else f", test loss {record.test_loss:.4g}"
    return (
        f"training of {of['model']} on {of['dataset']}, {counted(record.devices, 'device')}, "
        f"{counted(record.steps, 'step')}: test accuracy {record.test_accuracy:.2%}{loss}"
    )


def points(record: TrainRecord) -> list[dict[str, Any]]:
    """Return the point: the training and its result, under the names of ``--json``."""
    return [record.point]


def samples(record: TrainRecord) -> Samples:
    """Return each step with its loss. The file keeps the median step alone, not each step's time."""
    losses = np.array(record.losses, np.float64)
    return points(record), [len(losses)], {"step": np.arange(1, len(losses) + 1), "loss": losses}


def panel(record: TrainRecord) -> Lines:
    """Return the figure of the training loss against the step."""
    of = record.training
    return Lines(
        title=f"{of['model']} on {of['dataset']}, {counted(record.devices, 'device')}",
        subtitle=f"mean training loss of a step, global batch {of['global_batch']}",
        x_label="step",
        series=[Series(name="", x=range(1, len(record.losses) + 1), y=record.losses, look=0)],
    )
