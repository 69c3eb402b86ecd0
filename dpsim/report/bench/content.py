"""The report of an allreduce benchmark: answers, tables and facts."""

from __future__ import annotations

from dpsim.records.bench import BETWEEN, OWN, BenchRecord
from dpsim.records.bench_result import BenchPoint, BenchResult, BenchSize
from dpsim.report.bench.rules import RULES, SIMULATOR
from dpsim.report.content import Content
from dpsim.report.sweep.facts import Facts, environment_facts
from dpsim.report.sweep.tables import Column, Section, Table
from dpsim.report.sweep.warnings import ReportWarning
from dpsim.report.words import devices_name, percent
from dpsim.units import format_size

NOISY = 0.1
_BETWEEN_NOTE = " dpsim is here within one GPU; dpsim-gpus and nccl go between GPUs: compare these two with each other."
_SECTIONS = ((False, "buffers rewritten before each call"), (True, "cached: one unmodified buffer, call after call"))


def content(record: BenchRecord, result: BenchResult) -> Content:
    """What the report of a benchmark says."""
    bench = record.bench
    name = f"allreduce of {bench.dtype} on {devices_name(bench.devices)}, {where(record, result)}"
    return Content(
        name=name,
        heading=name,
        cards=(),
        rules=RULES[bench.backend],
        answers=tuple(answers(result)),
        warnings=warnings(result),
        question="How near does each allreduce come to what memory allows, and to the other libraries?",
        tables=(sizes_table(result), bound_table(result), points_table(result)),
        facts=_facts(record, result),
        environment=environment_facts(record.environment),
    )


def where(record: BenchRecord, result: BenchResult) -> str:
    """The backend, or what stood in for it."""
    return SIMULATOR if result.simulated else record.bench.backend


def titled(title: str, result: BenchResult) -> str:
    """A title that says where times mean nothing."""
    return f"{title} ({SIMULATOR}: times mean nothing)" if result.simulated else title


def answers(result: BenchResult) -> list[str]:
    """The largest size against the bound, and the range of the ratio to the best MPI library."""
    if result.simulated:
        return []
    told = []
    last = result.sizes[-1]
    if last.default_fraction is not None:
        told.append(
            f"At {format_size(last.size_bytes)} {last.default} reaches {percent(last.default_fraction)} of the bound."
        )
    beside = [(one, one.best_mpi) for one in result.sizes if one.best_mpi is not None]
    if beside:
        low, high = min(beside, key=lambda pair: pair[1].ratio), max(beside, key=lambda pair: pair[1].ratio)
        told.append(
            f"The best MPI allreduce takes {low[1].ratio:.2f} times as long as the default algorithm at "
            f"{format_size(low[0].size_bytes)} ({low[1].system}) and {high[1].ratio:.2f} times at "
            f"{format_size(high[0].size_bytes)} ({high[1].system})."
        )
    return told


def warnings(result: BenchResult) -> tuple[ReportWarning, ...]:
    """Times that mean nothing, wrong sums, and sizes at which the default algorithm differs from itself."""
    found = []
    if result.simulated:
        found.append(
            ReportWarning(
                kind="simulated",
                text=f"this ran in {SIMULATOR}: it checks sums, and the times mean nothing",
                remedy="run it on a machine with a GPU, without NUMBA_ENABLE_CUDASIM",
            )
        )
    wrong = [p for p in result.points if p.wrong]
    if wrong:
        which = ", ".join(dict.fromkeys(f"{p.system} {p.algorithm}" for p in wrong))
        found.append(
            ReportWarning(
                kind="wrong",
                text=f"{result.wrong} elements were not the sum ({which})",
                remedy="nothing is timed there; this is a defect of that system, please report it",
            )
        )
    noisy = [size for size in result.sizes if (size.noise or 0) > NOISY and not result.simulated]
    if noisy:
        where = ", ".join(f"{format_size(size.size_bytes)}: {percent(size.noise or 0)}" for size in noisy)
        found.append(
            ReportWarning(
                kind="noise",
                text=f"the default algorithm's two runs differ by more than {NOISY:.0%} ({where})",
                remedy="stop other processes, or raise --budget",
            )
        )
    return tuple(found)


def sizes_table(result: BenchResult) -> Table:
    """Per size dpsim's default and the peers: how many times as long each takes."""
    peers = list(dict.fromkeys(ratio.peer for size in result.sizes for ratio in size.peers))
    columns = (
        Column(head="size"),
        Column(head="default", left=True),
        Column(head="us"),
        Column(head="of bound"),
        Column(head="fastest here", left=True),
        Column(head="A/A noise"),
        Column(head="best MPI (95%)", left=True),
        *(Column(head=peer) for peer in peers),
    )
    rows = tuple(_size_row(size, peers) for size in result.sizes)
    return Table(
        title=titled("Beside the peers", result),
        columns=columns,
        sections=(Section(title="in place", rows=rows),),
        note="Times of the peers, each at its fastest mode, over that of dpsim's default algorithm in the same rounds: "
        "above 1 dpsim is faster." + _BETWEEN_NOTE * (BETWEEN in peers),
    )


def _size_row(size: BenchSize, peers: list[str]) -> tuple[str, ...]:
    ratios = {ratio.peer: ratio for ratio in size.peers}
    best = size.best_mpi
    return (
        format_size(size.size_bytes),
        size.default,
        microseconds(size.default_s),
        _share(size.default_fraction),
        f"{size.best} {microseconds(size.best_s)}",
        _share(size.noise),
        "" if best is None else f"{best.ratio:.2f} ({best.low:.2f} to {best.high:.2f})",
        *(f"{ratios[peer].ratio:.2f}" if peer in ratios else "" for peer in peers),
    )


def bound_table(result: BenchResult) -> Table:
    """Fraction of the bound of every algorithm and peer, in place, with rewritten buffers."""
    shown = [p for p in result.points if p.in_place and not p.cached]
    ways = list(dict.fromkeys(way(p) for p in shown))
    found = {(p.size_bytes, way(p)): p for p in shown}
    sizes = [size for size in result.sizes if size.default_fraction is not None] or list(result.sizes)
    columns = (Column(head="size"), Column(head="W GB/s"), *(Column(head=name) for name in ways))
    rows = []
    for size in sizes:
        points = [found.get((size.size_bytes, name)) for name in ways]
        cells = [_share(point.fraction_of_bound) if point else "" for point in points]
        rows.append((format_size(size.size_bytes), gigabytes(size.bound_bytes_per_s), *cells))
    return Table(
        title=titled("Fraction of the bound", result),
        columns=tuple(columns),
        sections=(Section(title="in place, buffers rewritten before each call", rows=tuple(rows)),),
        note="Time of in-place scaling over the time of the allreduce. Below 64 KiB call overhead dominates, so no "
        "fraction is given. The bound is a reference measured in the same run, not a limit: noise and caches can take "
        "a share above 100%.",
    )


def points_table(result: BenchResult) -> Table:
    """nccl-tests' columns for everything that was timed."""
    columns = (
        Column(head="size"),
        Column(head="count"),
        Column(head="type", left=True),
        Column(head="redop", left=True),
        Column(head="system", left=True),
        Column(head="algorithm", left=True),
        *(Column(head=f"{where} {name}") for where in ("out", "in") for name in ("us", "algbw", "busbw", "#wrong")),
        Column(head="p50 us"),
        Column(head="p99 us"),
        Column(head="of bound"),
    )
    sections = tuple(
        Section(title=title, rows=tuple(_point_row(*pair) for pair in placements(result, cached=cached)))
        for cached, title in _SECTIONS
    )
    return Table(
        title=titled("Everything", result),
        columns=columns,
        sections=sections,
        note="Out of place and in place; algbw and busbw = algbw 2 (n - 1) / n in GB/s (decimal). p50, p99 and the "
        "fraction of the bound are of the calls in place. "
        "* the default algorithm at this size.",
    )


Placements = tuple[BenchPoint | None, BenchPoint | None]


def placements(result: BenchResult, *, cached: bool) -> list[Placements]:
    """(out of place, in place) of every way at every size; one may be missing."""
    found: dict[tuple[int, str], list[BenchPoint | None]] = {}
    for point in result.points:
        if point.cached == cached:
            found.setdefault((point.size_bytes, way(point)), [None, None])[point.in_place] = point
    return [(pair[0], pair[1]) for pair in found.values()]


def _point_row(out: BenchPoint | None, inside: BenchPoint | None) -> tuple[str, ...]:
    one = inside or out
    if one is None:
        return ()
    cells = [
        format_size(one.size_bytes),
        str(one.count),
        one.dtype,
        one.redop,
        one.system,
        one.algorithm + " *" * one.default,
    ]
    for point in (out, inside):
        if point is None:
            cells += [""] * 4
        else:
            bandwidths = gigabytes(point.algbw_bytes_per_s), gigabytes(point.busbw_bytes_per_s)
            cells += [microseconds(point.time_s), *bandwidths, str(point.wrong)]
    if inside is None:
        return (*cells, "", "", "")
    return (*cells, microseconds(inside.p50_s), microseconds(inside.p99_s), _share(inside.fraction_of_bound))


def way(point: BenchPoint) -> str:
    """``two-shot`` of dpsim, ``mpich-single`` or ``mpich-single persistent`` of a peer."""
    if point.system == OWN:
        return point.algorithm
    if point.system == BETWEEN:
        return f"{point.system} {point.algorithm}"
    return point.system + (" persistent" if point.algorithm.endswith("persistent") else "")


def microseconds(seconds: float | None) -> str:
    """Three significant digits; nothing where nothing was timed."""
    if seconds is None:
        return ""
    value = seconds * 1e6
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 100 else f"{value:.0f}"


def gigabytes(bytes_per_s: float | None) -> str:
    """GB/s, decimal."""
    return "" if bytes_per_s is None else f"{bytes_per_s / 1e9:.2f}"


def _share(part: float | None) -> str:
    return "" if part is None else percent(part)


def _facts(record: BenchRecord, result: BenchResult) -> Facts:
    bench = record.bench
    noise = max((size.noise or 0.0 for size in result.sizes), default=0.0)
    calls = sum(point.samples for point in result.points)
    return (
        ("sizes", f"{format_size(bench.sizes()[0])} to {format_size(bench.sizes()[-1])} by {bench.factor}"),
        ("measured", f"{record.measured_from} to {record.measured_until}"),
        ("samples", f"{calls} calls in {result.rounds} rounds"),
        ("A/A noise", f"at most {percent(noise)}"),
        *((system.name, "; ".join(part for part in (system.library, system.how) if part)) for system in record.systems),
    )
