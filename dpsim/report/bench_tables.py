"""The tables of a report of allreduces: sizes, bounds, every point."""

from __future__ import annotations

from collections.abc import Callable

from dpsim.records.bench import BETWEEN, OWN
from dpsim.records.bench_result import BenchPoint, BenchResult, BenchSize
from dpsim.report.table import Column, Table, table
from dpsim.report.words import percent
from dpsim.units import format_size

Placements = dict[bool, BenchPoint]
"""One algorithm at one size, in place and out of place; one of the two may be missing."""


def sizes_table(result: BenchResult) -> Table:
    """Return, for each size, dpsim's default algorithm and how many times as long each peer takes."""
    peers = list(dict.fromkeys(ratio.peer for size in result.sizes for ratio in size.peers))

    def ratio(peer: str) -> Column[BenchSize]:
        return Column(
            head=peer,
            cell=lambda size: next((f"{ratio.ratio:.2f}" for ratio in size.peers if ratio.peer == peer), ""),
        )

    return table(
        title=_title("Compared with the peers" if peers else "The default algorithm at each size", result),
        columns=(
            Column(head="size", cell=lambda size: format_size(size.size_bytes)),
            Column(head="default", cell=lambda size: size.default, left=True),
            Column(head="us", cell=lambda size: microseconds(size.default_s)),
            Column(head="of bound", cell=lambda size: _share(size.default_fraction)),
            Column(head="fastest of dpsim", cell=lambda size: f"{size.best} {microseconds(size.best_s)}", left=True),
            Column(head="A/A noise", cell=lambda size: _share(size.noise)),
            Column(head="best MPI (95%)", cell=_best_mpi, left=True, shown=any(size.best_mpi for size in result.sizes)),
            *map(ratio, peers),
        ),
        sections={"in place": result.sizes},
        note="Time of each peer in its fastest mode / time of dpsim's default algorithm, in the same rounds: above 1 "
        "dpsim is faster." * bool(peers) + _BETWEEN_NOTE * (BETWEEN in peers),
    )


def _best_mpi(size: BenchSize) -> str:
    best = size.best_mpi
    return "" if best is None else f"{best.ratio:.2f} ({best.low:.2f} to {best.high:.2f})"


def bound_table(result: BenchResult) -> Table:
    """Return the fraction of the bound that every algorithm and peer reaches in place, with rewritten buffers."""
    points = {(p.size_bytes, label(p)): p for p in result.points if p.in_place and not p.cached}

    def fraction(name: str) -> Column[BenchSize]:
        def cell(size: BenchSize) -> str:
            point = points.get((size.size_bytes, name))
            return "" if point is None else _share(point.fraction_of_bound)

        return Column(head=name, cell=cell)

    memcpy: Column[BenchSize] = Column(head="memcpy GB/s", cell=lambda size: gigabytes(size.memcpy_bytes_per_s))
    return table(
        title=_title("Fraction of the bound", result),
        columns=(
            Column(head="size", cell=lambda size: format_size(size.size_bytes)),
            Column(head="W GB/s", cell=lambda size: gigabytes(size.bound_bytes_per_s)),
            *[memcpy] * any(size.memcpy_bytes_per_s is not None for size in result.sizes),
            *map(fraction, dict.fromkeys(name for _, name in points)),
        ),
        sections={
            f"in place, {_FRESH}": [size for size in result.sizes if size.default_fraction is not None] or result.sizes
        },
        note="Time of in-place scaling / time of the allreduce. Below 64 KiB the overhead of a call dominates, so no "
        "fraction is given. The bound is a reference measured in the same run, not a limit: noise and caches can take "
        "a fraction above 100%.",
    )


def line_table(result: BenchResult) -> Table:
    """Return the share of the line's bound that every algorithm and peer reaches between hosts."""
    shares: dict[str, dict[int, float]] = {}
    for point in result.points:
        of_name = shares.setdefault(point.algorithm if point.system == OWN else point.system, {})
        of_name[point.size_bytes] = max(of_name.get(point.size_bytes, 0.0), point.fraction_of_bound or 0.0)

    def share(name: str) -> Column[BenchSize]:
        return Column(head=name, cell=lambda size: _share(shares[name].get(size.size_bytes) or None))

    def over_best(size: BenchSize) -> str:
        best = size.best_mpi
        return "" if best is None else f"{1 / best.ratio:.2f} ({1 / best.high:.2f} to {1 / best.low:.2f})"

    return table(
        title=_title(f"Share of the line's bound on {result.record.bench.network} (emulated)", result),
        columns=(
            Column(head="size", cell=lambda size: format_size(size.size_bytes)),
            Column(head="bound us", cell=lambda size: microseconds(size.bound_s)),
            Column(head="auto us", cell=lambda size: microseconds(size.default_s)),
            Column(head="auto / best MPI (95%)", cell=over_best, left=True),
            Column(head="best MPI", cell=lambda size: size.best_mpi.system if size.best_mpi else "", left=True),
            *map(share, shares),
        ),
        sections={f"in place, {_FRESH}": result.sizes},
        note="The bound is 2 (n - 1) / n of the bytes at the rate of the slowest link, which passes on its first 16 kB "
        "at once: small arrays may exceed it. Of an MPI's calls and persistent requests the faster counts. The best "
        "MPI is the fastest of MPI's own: dpsim's mpi, and each thread level and algorithm of the library.",
    )


def points_table(result: BenchResult) -> Table:
    """Return everything that was timed, in the columns of nccl-tests."""
    timed: tuple[tuple[str, Callable[[BenchPoint], str]], ...] = (
        ("us", lambda point: microseconds(point.time_s)),
        ("algbw", lambda point: gigabytes(point.algbw_bytes_per_s)),
        ("busbw", lambda point: gigabytes(point.busbw_bytes_per_s)),
        ("#wrong", lambda point: str(point.wrong)),
    )
    columns = (
        _column("size", lambda point: format_size(point.size_bytes)),
        _column("count", lambda point: str(point.count)),
        _column("type", lambda point: point.dtype, left=True),
        _column("redop", lambda point: point.redop, left=True),
        _column("system", lambda point: point.system, left=True),
        _column("algorithm", lambda point: point.algorithm + " *" * point.default, left=True),
        *(_column(f"out {head}", text, (False,)) for head, text in timed),
        *(_column(f"in {head}", text, (True,)) for head, text in timed),
        _column("p50 us", lambda point: microseconds(point.p50_s), (True,)),
        _column("p99 us", lambda point: microseconds(point.p99_s), (True,)),
        _column("of bound", lambda point: _share(point.fraction_of_bound), (True,)),
    )
    return table(
        title=_title("All measurements", result),
        columns=columns,
        sections={_FRESH: placements(result, cached=False), _CACHED: placements(result, cached=True)},
        note="Out of place and in place; algbw and busbw = algbw 2 (n - 1) / n in GB/s (decimal). p50, p99 and the "
        "fraction of the bound are of the calls in place. "
        "* the default algorithm at this size.",
    )


def _column(
    head: str, text: Callable[[BenchPoint], str], in_place: tuple[bool, ...] = (True, False), *, left: bool = False
) -> Column[Placements]:
    """Return a column about the first of the points ``in_place`` or not that there is."""
    return Column(head=head, cell=lambda row: next((text(row[key]) for key in in_place if key in row), ""), left=left)


def placements(result: BenchResult, *, cached: bool) -> list[Placements]:
    """Return every algorithm at every size, with its points in place and out of place."""
    pairs: dict[tuple[int, str], Placements] = {}
    for point in result.points:
        if point.cached == cached:
            pairs.setdefault((point.size_bytes, label(point)), {})[point.in_place] = point
    return list(pairs.values())


def label(point: BenchPoint) -> str:
    """Return ``two-shot`` for dpsim, ``mpich-single`` or ``mpich-single persistent`` for a peer."""
    if point.system == OWN:
        return point.algorithm
    if point.system == BETWEEN:
        return f"{point.system} {point.algorithm}"
    return point.system + (" persistent" if point.algorithm.endswith("persistent") else "")


def microseconds(seconds: float | None) -> str:
    """Return three significant digits, or nothing where nothing was timed."""
    if seconds is None:
        return ""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def gigabytes(bytes_per_s: float | None) -> str:
    """Return GB/s, decimal."""
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"


def _share(part: float | None) -> str:
    return "" if part is None else percent(part)


_BETWEEN_NOTE = (
    " In this table dpsim runs within one GPU, while dpsim-gpus and nccl run between GPUs: compare those two with each "
    "other."
)


_FRESH = "buffers rewritten before each call"


_CACHED = "cached: one unmodified buffer, call after call"


def _title(title: str, result: BenchResult) -> str:
    """Return a title that says where times mean nothing."""
    return f"{title} ({SIMULATOR}: times mean nothing)" if result.simulated else title


SIMULATOR = "numba's CUDA simulator"
