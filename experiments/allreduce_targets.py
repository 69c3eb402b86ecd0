"""``python -m dpsim.experiments.allreduce_targets FOLDER`` holds a benchmark's record against the project's targets.

In place, default algorithm, two ranks: the fraction of the bound, and how many times as long the best mode of the best
MPI library and of gloo takes. On more ranks than cores: never slower than mpich.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from dpsim.experiments import command
from dpsim.harness.bench.result import result
from dpsim.records import bench
from dpsim.records.bench_result import BenchResult, BenchSize, Ratio
from dpsim.units import format_size

KIB, MIB = 2**10, 2**20
MPI_TARGETS = (
    (4, KIB, 1.0),
    (64 * KIB, MIB, 1.5),
    (4 * MIB, 4 * MIB, 1.15),
    (16 * MIB, 16 * MIB, 1.4),
    (64 * MIB, 64 * MIB, 2.5),
)
"""(sizes from, to, at least) of the best MPI's time over the default algorithm's."""
LARGE_BYTES, OF_BOUND, OVER_GLOO, CROWDED_DEVICES = 64 * MIB, 0.85, 8.0, 4


class Target(NamedTuple):
    """What should be at least ``least`` at a size, and what was measured: None for nothing."""

    what: str
    size_bytes: int
    least: float
    measured: float | None
    peer: str = ""

    @property
    def met(self) -> bool:
        return self.measured is not None and self.measured >= self.least


def targets(benchmark: BenchResult) -> Iterator[Target]:
    """Yield every target at every size that was measured."""
    devices = benchmark.points[0].devices if benchmark.points else 0
    for size in benchmark.sizes:
        peers = {ratio.peer: ratio for ratio in reversed(size.peers)}
        if devices >= CROWDED_DEVICES:
            yield _over("mpich", size, peers.get("mpich"), 1.0)
            continue
        for low, high, least in MPI_TARGETS:
            if low <= size.size_bytes <= high:
                yield _over("the best MPI", size, size.best_mpi, least)
        if size.size_bytes == LARGE_BYTES:
            yield _over("gloo", size, peers.get("gloo"), OVER_GLOO)
            yield Target("of the bound", size.size_bytes, OF_BOUND, size.default_fraction)


def _over(peer: str, size: BenchSize, ratio: Ratio | None, least: float) -> Target:
    """Return the target of a peer's time over the default algorithm's."""
    if ratio is None:
        return Target(f"over {peer}", size.size_bytes, least, None)
    shown = f" ({ratio.system}, {ratio.low:.2f} to {ratio.high:.2f})"
    return Target(f"over {peer}", size.size_bytes, least, ratio.ratio, shown)


def main() -> int:
    """Print each target; 1 where one is missed or was not measured, 2 for a record that cannot be read."""
    options = command.parser("allreduce_targets", __doc__)
    options.add_argument("folder", type=Path, help="what dpsim bench allreduce --output wrote")
    folder: Path = options.parse_args().folder

    def run() -> int:
        reached = list(targets(result(bench.read(folder / bench.RECORD))))
        for target in reached:
            state = "not measured" if target.measured is None else f"{target.measured:.2f}"
            verdict = "met   " if target.met else "MISSED"
            least = f"at least {target.least:g}"
            print(f"{verdict} {format_size(target.size_bytes):>8} {target.what:<18} {state}, {least}{target.peer}")
        return 0 if all(target.met for target in reached) else 1

    return command.ended("allreduce_targets", run)


if __name__ == "__main__":
    raise SystemExit(main())
