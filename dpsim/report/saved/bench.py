"""A benchmark of the allreduce as data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec
import numpy as np

from dpsim.codec import to_builtins
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench import points_json
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

        bench, peers = self.record.bench, {system.name: system.peer for system in self.record.systems}
        timed = [series for series in self.record.series if series.rounds_ns]
        rows = [
            to_builtins(msgspec.structs.replace(series, rounds_ns=()))
            | {"devices": bench.devices, "dtype": bench.dtype, "peer": peers[series.system]}
            for series in timed
        ]
        calls = [
            (number, step, call_ns)
            for series in timed
            for number, calls in enumerate(series.rounds_ns)
            for step, call_ns in enumerate(calls)
        ]
        rounds, steps, calls_ns = np.array(calls, np.int64).reshape(-1, 3).T
        values = {"round": rounds, "step": steps, "time_s": calls_ns * 1e-9}
        lengths = [sum(map(len, series.rounds_ns)) for series in timed]
        return repeated(rows, lengths, values, self.columns("samples"))

    def plot(self, ax: Axes | None = None, *, peers: bool = False) -> Axes:
        """Draw bus bandwidth against the size, of dpsim's algorithms or of its default and its ``peers``."""
        from dpsim.report.figures import bandwidth
        from dpsim.report.figures.style import on_axes

        return on_axes(ax, lambda axis: bandwidth.panel(axis, self.result, own=not peers))
