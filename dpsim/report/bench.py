"""The report of an allreduce benchmark: answers, tables, warnings, facts and figure, and its points for programs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpsim.codec import to_builtins
from dpsim.records.bench import BETWEEN, OWN, BenchRecord
from dpsim.records.bench_result import BenchPoint, BenchResult, BenchSize
from dpsim.report.charts import Chart, Lines, Look, Series
from dpsim.report.content import Content, Facts, ReportFigure, ReportWarning, environment_facts
from dpsim.report.saved import Samples
from dpsim.report.table import Column, Table, table
from dpsim.report.terminal import TerminalReport
from dpsim.report.words import counted, devices_name, percent
from dpsim.report.write import PAGES, write_content
from dpsim.units import format_size
from dpsim.user_code import is_function

NOISY = 0.1
_CAPTION = (
    "Bus bandwidth against the size, buffers rewritten before each call, medians of the slowest rank: dpsim in place, "
    "each peer in its fastest mode. Both axes are logarithmic."
)
_BOUND, _BOUND_CAPTION = "the bound", " Dashed: the bound, 2 n S bytes at the bandwidth of in-place scaling."
_BETWEEN_NOTE = (
    " In this table dpsim runs within one GPU, while dpsim-gpus and nccl run between GPUs: compare those two with each "
    "other."
)
_FRESH = "buffers rewritten before each call"
_CACHED = "cached: one unmodified buffer, call after call"
Placements = dict[bool, BenchPoint]
"""One algorithm at one size, in place and out of place; one of the two may be missing."""
SIMULATOR = "numba's CUDA simulator"
_NOISE = "The default algorithm runs twice (A/A): the difference is the noise."
_CPU = (
    "Every algorithm was checked at every size before it was timed, with whole numbers in random places against the "
    "exact sum, and again after each burst of calls. An algorithm with any wrong element has no times.",
    "Every system runs in processes of its own, and the same code times all of them. They take turns in random order, "
    "size by size, in rounds; waiting processes sleep.",
    "All ranks begin a call at the same moment of a common clock, and a time is that of the slowest rank. Before each "
    "call every rank rewrites its whole buffer, as backward does; this is not timed. Rows marked cached reuse an "
    "unmodified buffer.",
    "The bound of every allreduce is 2 n S bytes over W, and W is the bandwidth of x = x * s in place (one read, one "
    "write) in the same memory by the same processes, timed in turns with the allreduces in random order, call by "
    "call. Calls of up to 64 KiB come in bursts of 16 after two that do not count.",
    "Out of place costs dpsim a copy into the memory that ranks share. Peers are compared with the faster of the two "
    "placements.",
    _NOISE,
)
_CUDA = (
    "Every algorithm was checked at every size before it was timed, and again after each burst of calls: all elements "
    "of all devices, on random numbers, against the sum in the fixed order, to the bit. An algorithm with any wrong "
    "element has no times.",
    "dpsim's devices are logical devices of one GPU: arrays in its memory, added in one cooperative launch. A time is "
    "between two events of the GPU. The host enqueues what is timed while a long copy runs, so that launching is not "
    "included.",
    "Algorithms take turns in random order, size by size, in rounds. Before each call all buffers are rewritten, as "
    "backward does; this is not timed. Rows marked cached reuse an unmodified buffer.",
    "The bound of every allreduce in one memory is 2 n S bytes over W, and W is the bandwidth of x = x * s in place "
    "(one read, one write) in the same memory, timed in turns with the allreduces. Beside it stands the bandwidth of "
    "the GPU's own copy (memcpy) of as many bytes: where that is much higher, W is no bound.",
    "Out of place costs dpsim a copy within the GPU, since its kernels add in place.",
    "Between GPUs (dpsim-gpus, nccl) each GPU has one process. All begin a call together, and a time is that of the "
    "slowest process by the host's clock, until its stream has ended. No bound of one memory applies: compare these "
    "two with each other.",
    _NOISE,
)
_RULES = {"cpu": _CPU, "cuda": _CUDA}
"""How a benchmark measures on each backend."""


def content(result: BenchResult) -> Content:
    """Return what the report of a benchmark says."""
    bench = result.record.bench
    where = SIMULATOR if result.simulated else bench.backend
    name = f"allreduce of {bench.dtype} on {devices_name(bench.devices)}, {where}"
    return Content(
        name=name,
        heading=name,
        cards=(),
        rules=_RULES[bench.backend],
        answers=tuple(answers(result)),
        warnings=tuple(warnings(result)),
        question="How close does each allreduce come to what memory allows, and how does dpsim compare with other "
        "libraries?",
        tables=(sizes_table(result), bound_table(result), points_table(result)),
        facts=_facts(result),
        environment=environment_facts(result.record.environment),
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


def _facts(result: BenchResult) -> Facts:
    record, sizes = result.record, result.record.bench.sizes()
    noise = max((size.noise or 0.0 for size in result.sizes), default=0.0)
    calls = sum(point.samples for point in result.points)
    return (
        ("sizes", f"{format_size(sizes[0])} to {format_size(sizes[-1])} by {record.bench.factor}"),
        ("measured", f"{record.measured_from} to {record.measured_until}"),
        ("samples", f"{calls} calls in {result.rounds} rounds"),
        ("A/A noise", f"at most {percent(noise)}"),
        *systems(record),
    )


def title(result: BenchResult) -> str:
    """Return what was timed, where and when."""
    bench, peers = result.record.bench, dict.fromkeys(system.peer for system in result.record.systems)
    return (
        f"benchmark of the allreduce on {bench.devices} devices, {bench.dtype}, backend {bench.backend}: "
        f"{counted(len(result.points), 'point')} of {', '.join(peers)}, measured from {result.record.measured_from}"
    )


def points(result: BenchResult) -> list[dict[str, Any]]:
    """Return the points of ``--json``."""
    return [to_builtins(point.values()) for point in result.points]


def summary(result: BenchResult) -> dict[str, Any]:
    """Return the summary of ``--json``."""
    return {name: to_builtins(getattr(result, name)) for name in ("sizes", "rounds", "wrong", "simulated")}


def samples(result: BenchResult) -> Samples:
    """Return each call that was timed: what was called, its round, and its time in seconds."""
    bench, peers = result.record.bench, {system.name: system.peer for system in result.record.systems}
    timed = [series for series in result.record.series if series.rounds_ns]
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
    return rows, [sum(map(len, series.rounds_ns)) for series in timed], values


def panel(result: BenchResult, *, peers: bool = False) -> Lines:
    """Return the figure of bus bandwidths: of dpsim's algorithms, or of its default and its ``peers``."""
    return bandwidth_panel(result, own=not peers)


def write(folder: Path, result: BenchResult, pages: Collection[str] = tuple(PAGES)) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figure; returns the paths. Raises ``ConfigError``."""
    return write_content(folder, content(result), [bandwidth_figure(result)], pages)


def bandwidth_figure(result: BenchResult) -> ReportFigure:
    """Return the figure of the report; its caption speaks of the bound where that is a line."""
    chart = bandwidth_chart(result)
    lines = [line for panel in chart.panels if isinstance(panel, Lines) for line in panel.series]
    dashed = any(line.name == _BOUND and len(line.x) > 1 for line in lines)
    caption = _CAPTION + _BOUND_CAPTION * dashed
    return ReportFigure(name="bandwidth", title="Bus bandwidth", caption=caption, chart=chart)


def show(result: BenchResult, page: Path | None, _: bool) -> Iterator[Any]:
    """Yield the systems, everything that was timed, and dpsim against its peers."""
    for name, description in systems(result.record):
        yield f"# {name}: {description}"
    yield TerminalReport(
        tables=(points_table(result), sizes_table(result)),
        warnings=tuple(warnings(result)),
        answers=tuple(answers(result)),
    )
    if page is not None:
        yield f"report: {page}"


def bandwidth_chart(result: BenchResult) -> Chart:
    """Return two panels: dpsim's algorithms in place, and its default with the peers. Buffers are rewritten."""
    return Chart(panels=[bandwidth_panel(result, own=own) for own in (True, False)], height_in=4.2)


def bandwidth_panel(result: BenchResult, *, own: bool) -> Lines:
    """Return dpsim's ``own`` algorithms, or its default with each peer at its best, below the bound."""
    best: dict[str, dict[int, float]] = {}
    for point in result.points:
        of_panel = (own or point.default) and point.in_place if point.system == OWN else not own
        if of_panel and not point.cached and point.busbw_bytes_per_s is not None:
            line, size = best.setdefault(point.algorithm if own else point.peer, {}), point.size_bytes
            line[size] = max(line.get(size, 0.0), point.busbw_bytes_per_s / 1e9)
    n, sizes = result.points[0].devices, [size.size_bytes for size in result.sizes]
    bound = {s.size_bytes: (n - 1) / n * s.bound_bytes_per_s / n / 1e9 for s in result.sizes if s.bound_bytes_per_s}
    looks: dict[str, int | Look] = {name: number for number, name in enumerate(best)}
    lines = best | ({_BOUND: bound} if bound else {})
    return Lines(
        title=("dpsim's algorithms" if own else "compared with the peers") + " (simulator)" * result.simulated,
        subtitle="bus bandwidth, GB/s",
        x_label="size",
        series=[
            Series(name=name, x=list(line), y=list(line.values()), look=looks.get(name, "ideal"))
            for name, line in lines.items()
        ],
        x_ticks={float(s): format_size(s).replace(" ", "\n") for s in sizes[:: max(1, len(sizes) // 6)]},
        x_text=format_size,
        log_x=True,
        log_y=True,
    )
