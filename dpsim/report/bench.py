"""The report of an allreduce benchmark: answers, tables, warnings, facts and figure, and its points for programs."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from dpsim.codec import to_builtins
from dpsim.network import NODE
from dpsim.records.bench import OWN, BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench_tables import SIMULATOR, bound_table, line_table, points_table, sizes_table
from dpsim.report.charts import Chart, Lines, Look, Series
from dpsim.report.content import Content, Facts, ReportFigure, ReportWarning, environment_facts
from dpsim.report.saved import Samples
from dpsim.report.table import Table
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
_HOSTS = (
    *_CPU[:2],
    "Each system has hosts of its own, namespaces of this machine's kernel, which shapes their links. All ranks begin "
    "a call at the same moment of a common clock, and a time is that of the slowest rank. Before each call every rank "
    "rewrites its whole buffer; this is not timed.",
    "The bound is 2 (n - 1) / n of the bytes at the rate of the slowest link.",
    _NOISE,
)
_RULES = {"cpu": _CPU, "cuda": _CUDA}
"""How a benchmark measures on each backend."""


def content(result: BenchResult) -> Content:
    """Return what the report of a benchmark says."""
    bench = result.record.bench
    where = SIMULATOR if result.simulated else bench.backend
    if bench.network != NODE:
        where = f"{bench.network} (emulated)"
    name = f"allreduce of {bench.dtype} on {devices_name(bench.devices)}, {where}"
    return Content(
        name=name,
        heading=name,
        cards=(),
        rules=_RULES[bench.backend] if bench.network == NODE else _HOSTS,
        answers=tuple(answers(result)),
        warnings=tuple(warnings(result)),
        question="How close does each allreduce come to what memory allows, and how does dpsim compare with other "
        "libraries?",
        tables=(sizes_table(result), _bounds(result), points_table(result)),
        facts=_facts(result),
        environment=environment_facts(result.record.environment),
    )


def _bounds(result: BenchResult) -> Table:
    return bound_table(result) if result.record.bench.network == NODE else line_table(result)


def systems(record: BenchRecord) -> Facts:
    """Return each system with its library and how its processes ran."""
    return tuple(
        (system.name, "; ".join(part for part in (system.library, system.how) if part)) for system in record.systems
    )


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
    on_node = result.record.bench.network == NODE
    yield TerminalReport(
        tables=(points_table(result), sizes_table(result)) if on_node else (_bounds(result),),
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
