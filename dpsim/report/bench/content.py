"""The report of an allreduce benchmark: answers, tables, warnings and facts."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from dpsim.records.bench import BETWEEN, OWN, BenchRecord
from dpsim.records.bench_result import BenchPoint, BenchResult, BenchSize
from dpsim.report.bench.rules import RULES, SIMULATOR
from dpsim.report.content import Content, Facts, ReportWarning, environment_facts
from dpsim.report.table import Column, Table, table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import devices_name, percent
from dpsim.units import format_size
from dpsim.user_code import is_function

NOISY = 0.1
_BETWEEN_NOTE = (
    " In this table dpsim runs within one GPU, while dpsim-gpus and nccl run between GPUs: compare those two with each "
    "other."
)
_FRESH = "buffers rewritten before each call"
_CACHED = "cached: one unmodified buffer, call after call"


def content(record: BenchRecord, result: BenchResult) -> Content:
    """Return what the report of a benchmark says."""
    bench = record.bench
    where = SIMULATOR if result.simulated else bench.backend
    name = f"allreduce of {bench.dtype} on {devices_name(bench.devices)}, {where}"
    return Content(
        name=name,
        heading=name,
        cards=(),
        rules=RULES[bench.backend],
        answers=tuple(answers(result)),
        warnings=tuple(warnings(result)),
        question="How close does each allreduce come to what memory allows, and how does dpsim compare with other "
        "libraries?",
        tables=(sizes_table(result), bound_table(result), points_table(result)),
        facts=_facts(record, result),
        environment=environment_facts(record.environment),
    )


def for_terminal(result: BenchResult) -> TerminalReport:
    """Return what ``rich.print`` shows of a benchmark: everything that was timed, and dpsim against its peers."""
    return TerminalReport(
        tables=(points_table(result), sizes_table(result)),
        warnings=tuple(warnings(result)),
        answers=tuple(answers(result)),
    )


def systems(record: BenchRecord) -> Facts:
    """Return each system with its library and how its processes ran."""
    return tuple(
        (system.name, "; ".join(part for part in (system.library, system.how) if part)) for system in record.systems
    )


def _title(title: str, result: BenchResult) -> str:
    """Return a title that says where times mean nothing."""
    return f"{title} ({SIMULATOR}: times mean nothing)" if result.simulated else title


def answers(result: BenchResult) -> Iterator[str]:
    """Yield the largest size against the bound, and the range of the ratio to the best MPI library."""
    if result.simulated:
        return
    last = result.sizes[-1]
    if last.default_fraction is not None:
        yield f"At {format_size(last.size_bytes)} {last.default} reaches {percent(last.default_fraction)} of the bound."
    ratios = [(size, size.best_mpi) for size in result.sizes if size.best_mpi is not None]
    if ratios:
        low, high = min(ratios, key=lambda pair: pair[1].ratio), max(ratios, key=lambda pair: pair[1].ratio)
        yield (
            f"The best MPI allreduce takes {low[1].ratio:.2f} times as long as the default algorithm at "
            f"{format_size(low[0].size_bytes)} ({low[1].system}) and {high[1].ratio:.2f} times at "
            f"{format_size(high[0].size_bytes)} ({high[1].system})."
        )


def warnings(result: BenchResult) -> Iterator[ReportWarning]:
    """Yield a warning for simulated times, for wrong sums, and for sizes with a noisy default algorithm."""
    if result.simulated:
        yield ReportWarning(
            kind="simulated",
            text=f"this ran in {SIMULATOR}, which checks sums; its times mean nothing",
            remedy="run it on a machine with a GPU, without NUMBA_ENABLE_CUDASIM",
        )
    wrong = [point for point in result.points if point.wrong]
    if wrong:
        names = ", ".join(dict.fromkeys(f"{point.system} {point.algorithm}" for point in wrong))
        yield ReportWarning(
            kind="wrong",
            text=f"{result.wrong} elements were not the sum ({names})",
            remedy="these have no times; "
            + (
                "correct the function: a right one stands in docs/extend.md"
                if all(is_function(point.algorithm) for point in wrong)
                else "this is a defect of that system, please report it"
            ),
        )
    noisy = [size for size in result.sizes if (size.noise or 0) > NOISY and not result.simulated]
    if noisy:
        sizes = ", ".join(f"{format_size(size.size_bytes)}: {percent(size.noise or 0)}" for size in noisy)
        yield ReportWarning(
            kind="noise",
            text=f"the default algorithm's two runs differ by more than {NOISY:.0%} ({sizes})",
            remedy="stop other processes, or raise --budget",
        )


def sizes_table(result: BenchResult) -> Table:
    """Return, for each size, dpsim's default algorithm and how many times as long each peer takes."""
    peers = list(dict.fromkeys(ratio.peer for size in result.sizes for ratio in size.peers))

    def ratio(peer: str) -> Column[BenchSize]:
        return Column(
            head=peer,
            cell=lambda size: next((f"{ratio.ratio:.2f}" for ratio in size.peers if ratio.peer == peer), ""),
        )

    return table(
        title=_title("Compared with the peers", result),
        columns=(
            Column(head="size", cell=lambda size: format_size(size.size_bytes)),
            Column(head="default", cell=lambda size: size.default, left=True),
            Column(head="us", cell=lambda size: microseconds(size.default_s)),
            Column(head="of bound", cell=lambda size: _share(size.default_fraction)),
            Column(head="fastest of dpsim", cell=lambda size: f"{size.best} {microseconds(size.best_s)}", left=True),
            Column(head="A/A noise", cell=lambda size: _share(size.noise)),
            Column(head="best MPI (95%)", cell=_best_mpi, left=True),
            *map(ratio, peers),
        ),
        sections={"in place": result.sizes},
        note="Time of each peer in its fastest mode / time of dpsim's default algorithm, in the same rounds: above 1 "
        "dpsim is faster." + _BETWEEN_NOTE * (BETWEEN in peers),
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


@dataclass(frozen=True, kw_only=True)
class Placements:
    """One algorithm at one size, out of place and in place; one of the two may be missing."""

    first: BenchPoint
    out_of_place: BenchPoint | None
    in_place: BenchPoint | None


def points_table(result: BenchResult) -> Table:
    """Return everything that was timed, in the columns of nccl-tests."""
    columns: tuple[Column[Placements], ...] = (
        Column(head="size", cell=lambda row: format_size(row.first.size_bytes)),
        Column(head="count", cell=lambda row: str(row.first.count)),
        Column(head="type", cell=lambda row: row.first.dtype, left=True),
        Column(head="redop", cell=lambda row: row.first.redop, left=True),
        Column(head="system", cell=lambda row: row.first.system, left=True),
        Column(head="algorithm", cell=lambda row: row.first.algorithm + " *" * row.first.default, left=True),
        *_placement_columns("out", lambda row: row.out_of_place),
        *_placement_columns("in", lambda row: row.in_place),
        Column(head="p50 us", cell=lambda row: microseconds(row.in_place.p50_s) if row.in_place else ""),
        Column(head="p99 us", cell=lambda row: microseconds(row.in_place.p99_s) if row.in_place else ""),
        Column(head="of bound", cell=lambda row: _share(row.in_place.fraction_of_bound) if row.in_place else ""),
    )
    return table(
        title=_title("All measurements", result),
        columns=columns,
        sections={_FRESH: placements(result, cached=False), _CACHED: placements(result, cached=True)},
        note="Out of place and in place; algbw and busbw = algbw 2 (n - 1) / n in GB/s (decimal). p50, p99 and the "
        "fraction of the bound are of the calls in place. "
        "* the default algorithm at this size.",
    )


def _placement_columns(head: str, point_of: Callable[[Placements], BenchPoint | None]) -> Iterator[Column[Placements]]:
    """Yield time, bandwidths and wrong elements of one placement."""
    cells: tuple[tuple[str, Callable[[BenchPoint], str]], ...] = (
        ("us", lambda point: microseconds(point.time_s)),
        ("algbw", lambda point: gigabytes(point.algbw_bytes_per_s)),
        ("busbw", lambda point: gigabytes(point.busbw_bytes_per_s)),
        ("#wrong", lambda point: str(point.wrong)),
    )
    for name, of_point in cells:

        def cell(row: Placements, of_point: Callable[[BenchPoint], str] = of_point) -> str:
            point = point_of(row)
            return "" if point is None else of_point(point)

        yield Column(head=f"{head} {name}", cell=cell)


def placements(result: BenchResult, *, cached: bool) -> list[Placements]:
    """Return every algorithm at every size, with its point out of place and its point in place."""
    pairs: dict[tuple[int, str], dict[bool, BenchPoint]] = {}
    for point in result.points:
        if point.cached == cached:
            pairs.setdefault((point.size_bytes, label(point)), {})[point.in_place] = point
    return [
        Placements(first=pair.get(True) or pair[False], out_of_place=pair.get(False), in_place=pair.get(True))
        for pair in pairs.values()
    ]


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


def _facts(record: BenchRecord, result: BenchResult) -> Facts:
    sizes = record.bench.sizes()
    noise = max((size.noise or 0.0 for size in result.sizes), default=0.0)
    calls = sum(point.samples for point in result.points)
    return (
        ("sizes", f"{format_size(sizes[0])} to {format_size(sizes[-1])} by {record.bench.factor}"),
        ("measured", f"{record.measured_from} to {record.measured_until}"),
        ("samples", f"{calls} calls in {result.rounds} rounds"),
        ("A/A noise", f"at most {percent(noise)}"),
        *systems(record),
    )
