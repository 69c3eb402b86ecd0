"""A benchmark of the allreduce as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from dpsim.codec import to_builtins
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench.result import points_json
from dpsim.report.saved.result import SavedResult
from dpsim.report.words import counted

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


@dataclass(frozen=True, kw_only=True, repr=False, eq=False)
class SavedBench(SavedResult):
    """A benchmark; ``result`` is ``dpsim.harness.bench.result.result(record)``."""

    kind: ClassVar[str] = "bench"
    record: BenchRecord
    result: BenchResult

    @property
    def title(self) -> str:
        """What was timed, where and when."""
        bench, peers = self.record.bench, dict.fromkeys(system.peer for system in self.record.systems)
        return (
            f"benchmark of the allreduce on {bench.devices} devices, {bench.dtype}, backend {bench.backend}: "
            f"{counted(len(self.result.points), 'point')} of {', '.join(peers)}, measured from "
            f"{self.record.measured_from}"
        )

    def points(self) -> list[dict[str, Any]]:
        """Return the points as ``--json`` prints them."""
        return points_json(self.result)

    def samples(self) -> pd.DataFrame:
        """Return a row for each call that was timed: what was called, its round, and its time in seconds."""
        from dpsim.report.frames import repeated

        of_all = {"devices": self.record.bench.devices, "dtype": self.record.bench.dtype}
        peers = {system.name: system.peer for system in self.record.systems}
        timed = [series for series in self.record.series if series.rounds_ns]
        rows = [
            {name: value for name, value in to_builtins(series).items() if name != "rounds_ns"}
            | of_all
            | {"peer": peers[series.system]}
            for series in timed
        ]
        rounds = [(number, len(calls)) for series in timed for number, calls in enumerate(series.rounds_ns)]
        calls_ns = [call for series in timed for calls in series.rounds_ns for call in calls]
        values = {
            "round": [number for number, count in rounds for _ in range(count)],
            "step": [step for _, count in rounds for step in range(count)],
            "time_s": np.array(calls_ns, np.float64) * 1e-9,
        }
        lengths = [sum(map(len, series.rounds_ns)) for series in timed]
        return repeated(rows, lengths, values, self.columns("samples"))

    def plot(self, ax: Axes | None = None, *, peers: bool = False) -> Axes:
        """Draw bus bandwidth against the size, of dpsim's algorithms or of its default and its ``peers``."""
        from dpsim.report.figures import bandwidth
        from dpsim.report.figures.style import on_axes

        return on_axes(ax, lambda axis: bandwidth.panel(axis, self.result, own=not peers))
