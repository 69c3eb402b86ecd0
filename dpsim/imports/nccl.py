"""What nccl-tests (and rccl-tests) print of allreduces, all-gathers and reduce-scatters, and what ``-J FILE`` writes.

Both have the time, algbw and busbw of each size out of place and in place, which must agree before they are believed.
A size is that of the whole array, also of an all-gather and a reduce-scatter, whose count is that of one device
(NVIDIA/nccl-tests, doc/PERFORMANCE.md and src/common.cu, ``TimeTest``).
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any, NamedTuple

import msgspec

from dpsim.collective import CollectiveKind
from dpsim.errors import FileFormatError
from dpsim.imports.source import (
    MOST_BYTES,
    WIRE_DTYPES,
    Contents,
    Point,
    Rounded,
    Source,
    Table,
    rounded,
    rows,
    shown,
    table,
    whole,
)
from dpsim.units import ITEM_BYTES

HEADER = re.compile(r"#\s*size\s+count\s+type\s+(?:redop|time)\s.*")
_BEGIN = re.compile(r"#\s*nThreads?\b.*")
_RANK = re.compile(
    r"#\s+Rank\s+([0-9]{1,9})\s+(?:Group\s+([0-9]{1,9})\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+"
    r"\s+\[[^\]]*\]\s*(.*)"
)
_PROGRAM = re.compile(r"#\s*Collective test starting: (\S+)")
_MENTION = re.compile(r"(?!#\s*Collective test concluded).*\b((?:all_gather|reduce_scatter)_perf)\b.*")
_VERDICT = re.compile(r"#\s*Out of bounds values\s*:\s*(\S+)\s+(\S+)")
_VERSION = re.compile(r"#?\s*(nccl-tests version .*|(?:rccl-tests: Version|(?:NCCL|RCCL) version) .*)")
_FOOTER = "# Out of bounds values"
_KEYS = (["size", "count", "type", "redop", "root"], ["size", "count", "type", "redop"], ["size", "count", "type"])
_FIGURES = (
    ["time", "algbw", "busbw", "#wrong"],
    ["time", "algbw", "busbw", "error"],
    ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"],
)
_UNITS = ["(us)", "(GB/s)", "(GB/s)"]
_MOST_ERROR = 1e-3  # of the column "error", older than #wrong: the largest relative error that sums of floats have
_HALF_UNIT = 0.5e-6  # numbers of the JSON report are written with six digits behind the point
_REPORT_VERSIONS = (1, 2)
_MOST_DEVICES = 1_000_000
_BUFFERS = ("out of place", "in place")
_REMEDY = "the line may be damaged: copy the file again, or measure again with nccl-tests"
_WRONG_SUMS = "some sums were wrong: mend the cause (nccl-tests' README) and measure again"


class Program(NamedTuple):
    """A program of nccl-tests: what it measures, the redop of its rows, and how often each byte is sent.

    busbw is algbw x ``sends`` (n-1) / n.
    """

    name: str
    kind: CollectiveKind
    redops: tuple[str, ...]
    sends: int


PROGRAMS = (
    Program("all_reduce_perf", "allreduce", ("sum",), 2),
    Program("all_gather_perf", "all-gather", ("none", ""), 1),
    Program("reduce_scatter_perf", "reduce-scatter", ("sum",), 1),
)
_NAMES = ", ".join(program.name for program in PROGRAMS)
_NAME_IT = (
    "if another program printed the table, name it in a line above, such as # Collective test starting: all_gather_perf"
)


def _program(name: str) -> Program | None:
    """Return the program of a name such as ``all_gather_perf`` or ``./all_gather_perf_mpi``; ``None``: another one."""
    base = PurePath(name).name
    return next((program for program in PROGRAMS if base.startswith(program.name)), None)


def recognises(source: Source) -> bool:
    """Return whether the file looks like the text output of nccl-tests, or is JSON, which it alone writes."""
    return _is_json(source) or bool(source.matches(HEADER) or source.matches(_BEGIN))


def read(source: Source, devices: int | None, out_of_place: bool) -> Contents:
    """Return the tables of an output; ``devices`` is how many ran, where a text does not say. Raises
    ``FileFormatError``.

    The times are nccl-tests' own: the mean over iterations, then (unless ``-a`` says otherwise) over ranks.
    """
    return _read_json(source, out_of_place) if _is_json(source) else _read_text(source, devices, out_of_place)


def _is_json(source: Source) -> bool:
    return next((text.strip() for text in source.lines if text.strip()), "").startswith("{")


@dataclass(frozen=True)
class Row:
    """One measurement: of one size, in place or out of place. Bandwidths are in GB/s (10^9 bytes a second)."""

    where: int | str
    size_bytes: int
    count: int
    type: str
    redop: str
    root: str
    time_us: Rounded
    algbw: Rounded
    busbw: Rounded
    wrong: float

    def point(self, source: Source, devices: int | None, program: Program) -> Point:
        """Return the row as a point of a table, once it is known to be of its program and to add up.

        Its size is that of as many float32 gradients, which 16 bits carry in half the bytes. The count of an allreduce
        is that of the whole array, the count of an all-gather or a reduce-scatter that of one device.

        algbw is size / time, and busbw is 2 (n-1) / n of that for an allreduce, (n-1) / n for the other two
        (nccl-tests, doc/PERFORMANCE.md), within what was rounded. Until June 2020 the algbw of the other two was their
        busbw (nccl-tests, issue 45). Raises ``FileFormatError``.
        """
        if self.type not in WIRE_DTYPES or self.redop not in program.redops or self.root != "-1":
            raise source.refuse(
                self.where,
                f"type {self.type}, redop {self.redop or 'none'}, root {self.root} in a table of {program.name}",
                allowed=f"type {', '.join(WIRE_DTYPES)}, redop {program.redops[0]}, root -1",
                remedy=f"run {program.name} -d float{' -o sum' * ('sum' in program.redops)}; {_NAME_IT}",
            )
        item_bytes = ITEM_BYTES[WIRE_DTYPES[self.type]]
        parts = 1 if program.kind == "allreduce" else devices or 1
        whole_bytes = self.count * item_bytes * parts
        if whole_bytes != self.size_bytes or not 0 < self.size_bytes <= MOST_BYTES // 2:
            given = f"{self.count} elements of {self.type} in {self.size_bytes} bytes, in a table of {program.name}"
            allowed = f"{item_bytes} bytes per element{f' of each of {parts} devices' * (parts > 1)}, up to 2^59 bytes"
            raise source.refuse(
                self.where,
                given,
                allowed=allowed,
                remedy=f"{_REMEDY}; {_NAME_IT}; give --devices N if the file does not say how many ran",
            )
        if self.wrong:
            raise source.refuse(
                self.where,
                f"#wrong is {self.wrong:g}",
                allowed="0, or N/A where nothing was checked",
                remedy="these sums were wrong: mend the cause (nccl-tests' README) and measure again",
            )
        self._check_bandwidths(source, devices, program)
        where = f"line {self.where}" if isinstance(self.where, int) else self.where
        sent_bytes = self.size_bytes // item_bytes * ITEM_BYTES["float32"]
        return Point(where, sent_bytes, self.time_us.value, self.type)

    def _check_bandwidths(self, source: Source, devices: int | None, program: Program) -> None:
        time, half = self.time_us
        if not 0 < time < math.inf:
            raise source.refuse(self.where, f"a time of {time} us", allowed="more than 0 us", remedy=_REMEDY)
        low, high = self.size_bytes / (time + half) / 1e3, self.size_bytes / max(time - half, 1e-12) / 1e3
        before_2020 = program.sends == 1 and self.algbw == self.busbw
        if not _between(low, self.algbw, high) and not before_2020:
            given = f"{self.size_bytes} bytes in {time} us with an algbw of {self.algbw.value} GB/s"
            raise source.refuse(self.where, given, allowed="algbw = size / time", remedy=_REMEDY)
        if devices is not None and devices > 1:
            share = program.sends * (devices - 1) / devices
            if not _between(low * share, self.busbw, high * share):
                raise source.refuse(
                    self.where,
                    f"a busbw of {self.busbw.value} GB/s of {self.size_bytes} bytes in {time} us on {devices} devices",
                    allowed=f"busbw = size / time x {'2 ' * (program.sends == 2)}(n-1) / n = size / time x {share:.4g}"
                    f" for {program.name}",
                    remedy=f"give the output of {_NAMES}, and --devices N if it does not say how many ran",
                )


def _between(low: float, number: Rounded, high: float) -> bool:
    slack = number.half_unit + 1e-9 * high
    return low - slack <= number.value <= high + slack


def _layout(hosts: Sequence[str]) -> str:
    """Return ``2x4`` of the hosts of ranks 0 to n-1, where every node has as many, one after the other."""
    nodes = list(dict.fromkeys(hosts))
    of_a_node = len(hosts) // max(len(nodes), 1)
    regular = [node for node in nodes for _ in range(of_a_node)] == list(hosts)
    return f"{len(nodes)}x{of_a_node}" if regular and hosts else ""


def _counted(names: Sequence[str]) -> str:
    """Return ``8 x NVIDIA H100``, of one name for each device."""
    return ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names) if name)


def _read_text(source: Source, devices: int | None, out_of_place: bool) -> Contents:
    headers = list(source.matches(HEADER))
    if not headers:
        raise source.refuse(
            1,
            "no table of nccl-tests",
            allowed="the lines # size count type redop root ... and the table below them",
            remedy=f"give the whole output of {_NAMES}",
        )
    tables, hardware, versions, programs = [], [], [], []
    for start, header, end in zip([0, *headers], headers, [*headers[1:], len(source.lines) + 1], strict=False):
        first = _preamble(source, start, header)
        program = _program_of(source, start, first, header)
        hosts, names = _devices(source, first, header)
        hardware.append(_counted(names))
        versions += [" ".join(match[1].split()) for match in source.matches(_VERSION, first, header).values()]
        programs.append(program.name)
        tables.append(_table(source, header, end, hosts, len(hosts) or devices, out_of_place, program))
    benchmark = ", ".join([f"nccl-tests {' and '.join(dict.fromkeys(programs))}", *dict.fromkeys(versions)])
    return Contents(benchmark, "; ".join(dict.fromkeys(filter(None, hardware))), tuple(tables))


def _preamble(source: Source, start: int, header: int) -> int:
    """Return the first line that describes the run of a table: a ``# nThread`` line, or what stands just before it."""
    first = next(reversed(source.matches(_BEGIN, start + 1, header)), start + 1)
    while first - 1 > start and source.text(first - 1).startswith("#"):
        first -= 1
    return first


def _program_of(source: Source, start: int, first: int, header: int) -> Program:
    """Return the program that printed a table: the one it names, as versions since 2.17 do.

    In older outputs it is the last all_gather_perf or reduce_scatter_perf that stands above the table (a command line,
    say), else all_reduce_perf; counts and bandwidths of the rows have to agree with that.
    """
    program = PROGRAMS[0]
    for match in source.matches(_MENTION, start + 1, header).values():
        program = _program(match[1]) or program
    for line, match in source.matches(_PROGRAM, first, header).items():
        named = _program(match[1])
        if named is None:
            raise source.refuse(
                line, f"a table of {shown(match[1])}", allowed=_NAMES, remedy="remove the other collectives"
            )
        program = named
    return program


def _devices(source: Source, first: int, header: int) -> tuple[list[str], list[str]]:
    """Return (host of each rank, name of its device), as the rank lines say; nothing where there are none."""
    hosts: list[str] = []
    names: list[str] = []
    for line in source.matches(re.compile(r"#\s+Rank\b.*"), first, header):
        match = _RANK.fullmatch(source.text(line))
        if match is None:
            given = f"a rank line {shown(source.text(line))}"
            raise source.refuse(line, given, allowed="# Rank N Group 0 Pid N on HOST device N [ID] NAME")
        if int(match[1]) != len(hosts) or int(match[2] or 0) != 0:
            raise source.refuse(
                line,
                f"rank {match[1]} of group {match[2] or 0} where rank {len(hosts)} of group 0 comes next",
                allowed="ranks 0, 1, 2 ... of one group",
                remedy="build nccl-tests with MPI=1 and run it without NCCL_TESTS_SPLIT; or, where lines are missing,"
                " remove the others and give --devices N",
            )
        hosts.append(match[3])
        names.append(match[4])
    return hosts, names


def _table(
    source: Source,
    header: int,
    end: int,
    hosts: list[str],
    devices: int | None,
    out_of_place: bool,
    program: Program,
) -> Table:
    names = _columns(source, header)
    figures = names.index("time")
    width = (len(names) - figures - 2 * ("timestamp" in names)) // 2
    chosen = 0 if out_of_place else 1
    points: list[Point] = []
    for line, fields in rows(source, header + 2, end, names, footer=_FOOTER):
        keys = dict(zip(names[:figures], fields, strict=False))
        both = [_row(source, line, keys, fields[at : at + 4], names[figures + 3]) for at in (figures, figures + width)]
        if int(keys["size"]):
            points.append([row.point(source, devices, program) for row in both][chosen])
    for line, verdict in source.matches(_VERDICT, header, end).items():
        if verdict.groups() != ("0", "OK"):
            given = f"out of bounds values: {verdict[1]} {verdict[2]}"
            raise source.refuse(line, given, allowed="0 OK", remedy=_WRONG_SUMS)
    return table(source, f"line {header}", _BUFFERS[chosen], points, len(hosts) or None, _layout(hosts), program.kind)


def _columns(source: Source, header: int) -> list[str]:
    """Return the names of the columns; a timestamp counts as its two words. Raises ``FileFormatError``."""
    above, names, units = (
        source.text(line).lstrip("#").split() if line <= len(source.lines) else []
        for line in (header - 1, header, header + 1)
    )
    stamp = ["timestamp"] if names[-1:] == ["timestamp"] else []
    figures = next((f for f in _FIGURES for keys in _KEYS if names == [*keys, *f, *f, *stamp]), None)
    if figures is None:
        raise source.refuse(
            header,
            f"columns {shown(' '.join(names))}",
            allowed=" ".join([*_KEYS[0], *_FIGURES[0]]) + " and the last four once more (times, not cputime)",
            remedy="run nccl-tests without -C",
        )
    of_one = [*_UNITS, "(us)", "(us)", "(us)", "(%)"] if "i_min" in figures else _UNITS
    expected = ["(B)", "(elements)", *of_one, *of_one]
    sides = [word for word in above if word in ("out-of-place", "in-place")]
    if sides != ["out-of-place", "in-place"] or units[: len(expected)] != expected:
        raise source.refuse(
            header,
            f"a table between {shown(' '.join(above))} and {shown(' '.join(units))}",
            allowed=f"out-of-place in-place above, and {' '.join(expected)} below",
            remedy="give the whole output of nccl-tests",
        )
    return names + stamp


def _row(source: Source, line: int, keys: dict[str, str], figures: list[str], checked: str) -> Row:
    """Return the row of one side: its time, algbw, busbw and the column ``checked`` (#wrong, or error of old ones)."""
    wrong = rounded(source, line, checked, "0" if figures[3] == "N/A" else figures[3]).value
    time, algbw, busbw = (
        rounded(source, line, name, text) for name, text in zip(_FIGURES[0], figures[:3], strict=False)
    )
    return Row(
        line,
        whole(source, line, "size", keys["size"]),
        whole(source, line, "count", keys["count"]),
        keys["type"],
        keys.get("redop", ""),
        keys.get("root", "-1"),
        time,
        algbw,
        busbw,
        0.0 if checked == "error" and wrong <= _MOST_ERROR else wrong,
    )


class _Figures(msgspec.Struct):
    time: float
    alg_bw: float
    bus_bw: float
    nwrong: float | None


class _Result(msgspec.Struct):
    size: int
    count: int
    type: str
    redop: str
    root: str
    in_place: _Figures | None
    out_of_place: _Figures | None


class _Device(msgspec.Struct):
    group: int
    hostname: str
    device_info: str


class _Config(msgspec.Struct):
    nthreads: int
    ngpus: int
    devices: tuple[_Device, ...]


class _OutOfBounds(msgspec.Struct):
    count: int


class _Report(msgspec.Struct):
    version: int
    args: tuple[str, ...]
    nccl_version: int
    config: _Config
    results: tuple[_Result, ...]
    out_of_bounds: _OutOfBounds


def _read_json(source: Source, out_of_place: bool) -> Contents:
    """Return the table of a JSON report.

    ``config.devices`` has an entry a process, and every process drives nthreads x ngpus devices.
    """
    report = _report(source)
    name = PurePath(report.args[0]).name if report.args else ""
    program = _program(name)
    if program is None or report.version not in _REPORT_VERSIONS:
        raise FileFormatError(
            f"{source.path}: version {report.version} of the report of {shown(name)}",
            allowed=f"version {' or '.join(map(str, _REPORT_VERSIONS))} of the report of {_NAMES}",
        )
    processes, of_a_process = report.config.devices, report.config.nthreads * report.config.ngpus
    groups = sorted({process.group for process in processes})
    if groups != [0] or not 1 <= of_a_process * len(processes) <= _MOST_DEVICES:
        raise source.refuse(
            "config",
            f"{len(processes)} processes of {of_a_process} devices each, groups {groups}",
            allowed=f"1 to {_MOST_DEVICES} devices in one group 0",
            remedy="run nccl-tests without NCCL_TESTS_SPLIT",
        )
    if report.out_of_bounds.count:
        raise source.refuse("out_of_bounds", str(report.out_of_bounds.count), allowed="0", remedy=_WRONG_SUMS)
    hosts = [process.hostname for process in processes for _ in range(of_a_process)]
    chosen = "out_of_place" if out_of_place else "in_place"
    points = []
    for number, result in enumerate(report.results):
        where = f"results[{number}]"
        keys = (result.size, result.count, result.type, result.redop, result.root.strip())
        rows = {}
        for side, of in (("out_of_place", result.out_of_place), ("in_place", result.in_place)):
            if of is not None:
                time, algbw, busbw = (Rounded(value, _HALF_UNIT) for value in (of.time, of.alg_bw, of.bus_bw))
                rows[side] = Row(where, *keys, time, algbw, busbw, of.nwrong or 0.0)
        if chosen not in rows:
            raise source.refuse(
                where,
                f"{chosen} is null",
                allowed="its time, alg_bw, bus_bw and nwrong",
                remedy="take the other one: give or leave out --out-of-place",
            )
        if result.size:
            points.append({side: row.point(source, len(hosts), program) for side, row in rows.items()}[chosen])
    buffers = _BUFFERS[not out_of_place]
    of_report = table(source, "results", buffers, points, len(hosts), _layout(hosts), program.kind)
    names = [process.device_info for process in processes for _ in range(of_a_process)]
    return Contents(f"nccl-tests {name}, NCCL {_version(report.nccl_version)}", _counted(names), (of_report,))


def _report(source: Source) -> _Report:
    def refuse_constant(name: str) -> Any:
        raise ValueError(f"{name} is not a JSON number")

    try:
        raw = json.loads("\n".join(source.lines), parse_constant=refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # half a character pair could not be written again
        return msgspec.convert(raw, _Report)
    except json.JSONDecodeError as error:
        raise source.refuse(
            error.lineno,
            f"no valid JSON at column {error.colno}: {error.msg}",
            allowed="the file that nccl-tests -J wrote",
            remedy="it may be cut off or damaged: copy it again",
        ) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise FileFormatError(
            f"{source.path}: {error}",
            allowed="the file that nccl-tests -J wrote (without -C, which puts cpu_time in place of time)",
            remedy="it may be damaged: copy it again",
        ) from error


def _version(code: int) -> str:
    """Return ``2.28.7`` of 22807 (NCCL_VERSION_CODE since 2.9; before it 2804 was 2.8.4)."""
    major, minor = (code // 10_000, code // 100 % 100) if code >= 10_000 else (code // 1000, code // 100 % 10)
    return f"{major}.{minor}.{code % 100}"
