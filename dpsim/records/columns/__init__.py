"""The columns of results as tables: name, data type, unit and meaning. ``docs/results.md`` is generated from them.

``FRAMES`` has the columns of every table of every kind of result. Names are those of the ``points`` of ``--json``. A
field of a nested object has a dot in its name, as in ``null_step_s.constant``.
"""

from __future__ import annotations

from collections.abc import Mapping

from dpsim.columns import AnyColumn
from dpsim.records.columns import bench, quality, reproduce, sweep, train

FRAMES: Mapping[str, Mapping[str, tuple[AnyColumn, ...]]] = {
    "sweep": {"points": sweep.POINTS, "samples": sweep.SAMPLES, "timeline": sweep.TIMELINE},
    "bench": {"points": bench.POINTS, "samples": bench.SAMPLES},
    "reproduce": {"points": reproduce.POINTS, "samples": reproduce.SAMPLES},
    "quality": {"points": quality.POINTS, "samples": quality.SAMPLES},
    "train": {"points": train.POINTS, "samples": train.SAMPLES},
}
"""Columns by kind of result and by table; a table that a kind lacks is not there."""
