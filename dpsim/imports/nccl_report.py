"""The JSON report that nccl-tests writes with ``-J FILE``."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

import msgspec

from dpsim.errors import FileFormatError
from dpsim.imports.lines import Source, shown
from dpsim.imports.nccl_rows import BUFFERS, MOST_DEVICES, NAMES, WRONG_SUMS, Row, counted, layout, program_of
from dpsim.imports.tables import Contents, Rounded, table

_HALF_UNIT = 0.5e-6  # numbers of the report are written with six digits behind the point
_REPORT_VERSIONS = (1, 2)


def recognises(source: Source) -> bool:
    """Return whether the file is JSON, which of all benchmarks nccl-tests alone writes."""
    return next((text.strip() for text in source.lines if text.strip()), "").startswith("{")


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


def read(source: Source, out_of_place: bool) -> Contents:
    """Return the table of a JSON report. Raises ``FileFormatError``.

    ``config.devices`` has an entry a process, and every process drives nthreads x ngpus devices.
    """
    report = _report(source)
    name = PurePath(report.args[0]).name if report.args else ""
    program = program_of(name)
    if program is None or report.version not in _REPORT_VERSIONS:
        raise FileFormatError(
            f"{source.path}: version {report.version} of the report of {shown(name)}",
            allowed=f"version {' or '.join(map(str, _REPORT_VERSIONS))} of the report of {NAMES}",
        )
    processes, of_a_process = report.config.devices, report.config.nthreads * report.config.ngpus
    groups = sorted({process.group for process in processes})
    if groups != [0] or not 1 <= of_a_process * len(processes) <= MOST_DEVICES:
        raise source.refuse(
            "config",
            f"{len(processes)} processes of {of_a_process} devices each, groups {groups}",
            allowed=f"1 to {MOST_DEVICES} devices in one group 0",
            remedy="run nccl-tests without NCCL_TESTS_SPLIT",
        )
    if report.out_of_bounds.count:
        raise source.refuse("out_of_bounds", str(report.out_of_bounds.count), allowed="0", remedy=WRONG_SUMS)
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
    buffers = BUFFERS[not out_of_place]
    of_report = table(source, "results", buffers, points, len(hosts), layout(hosts), program.kind)
    names = [process.device_info for process in processes for _ in range(of_a_process)]
    return Contents(f"nccl-tests {name}, NCCL {_version(report.nccl_version)}", counted(names), (of_report,))


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
