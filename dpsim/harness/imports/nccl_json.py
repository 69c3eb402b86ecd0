"""What ``all_reduce_perf -J FILE`` of nccl-tests writes: one JSON object."""

from __future__ import annotations

import json
from pathlib import PurePath
from typing import Any

import msgspec

from dpsim.errors import FileFormatError
from dpsim.harness.imports.nccl_row import BUFFERS, Rounded, Row, counted, layout_of, one_wire_dtype
from dpsim.harness.imports.source import Contents, Source, Table, points, shown

_HALF_UNIT = 0.5e-6  # numbers are written with six digits behind the point
_VERSIONS = (1, 2)
_MOST_DEVICES = 1_000_000


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


def is_nccl_json(source: Source) -> bool:
    """Whether the file is JSON, which of these benchmarks nccl-tests alone writes."""
    return next((text.strip() for text in source.lines if text.strip()), "").startswith("{")


def read_nccl_json(source: Source, out_of_place: bool) -> Contents:
    """The table of a JSON report. Raises ``FileFormatError``.

    ``config.devices`` has an entry a process, and every process drives nthreads x ngpus devices.
    """
    report = _report(source)
    program = PurePath(report.args[0]).name if report.args else ""
    if not program.startswith("all_reduce_perf") or report.version not in _VERSIONS:
        raise FileFormatError(
            f"{source.path}: version {report.version} of the report of {shown(program)}",
            allowed=f"version {' or '.join(map(str, _VERSIONS))} of the report of all_reduce_perf",
        )
    config = report.config
    of_a_process = config.nthreads * config.ngpus
    groups = sorted({device.group for device in config.devices})
    if groups != [0] or not 1 <= of_a_process * len(config.devices) <= _MOST_DEVICES:
        raise FileFormatError(
            f"{source.path}, config: {len(config.devices)} processes of {of_a_process} devices each, groups {groups}",
            allowed=f"1 to {_MOST_DEVICES} devices in one group 0",
            remedy="run nccl-tests without NCCL_TESTS_SPLIT",
        )
    if report.out_of_bounds.count:
        raise FileFormatError(
            f"{source.path}, out_of_bounds: {report.out_of_bounds.count}",
            allowed="0",
            remedy="some sums were wrong: mend the cause (nccl-tests' README) and measure again",
        )
    hosts = [device.hostname for device in config.devices for _ in range(of_a_process)]
    chosen = "out_of_place" if out_of_place else "in_place"
    measured = []
    for number, result in enumerate(report.results):
        figures = {side: getattr(result, side) for side in ("out_of_place", "in_place")}
        row_of = {side: _row(f"results[{number}]", result, figure) for side, figure in figures.items() if figure}
        if chosen not in row_of:
            raise FileFormatError(
                f"{source.path}, results[{number}]: {chosen} is null",
                allowed="its time, alg_bw, bus_bw and nwrong",
                remedy="take the other one: give or leave out --out-of-place",
            )
        if result.size:
            measured.append({side: row.point(source.path, len(hosts)) for side, row in row_of.items()}[chosen])
    sizes_bytes, time_s, doubts = points(source, "results", measured)
    types = [(f"results[{i}]", result.type) for i, result in enumerate(report.results) if result.size]
    table = Table(
        "results",
        len(hosts),
        layout_of(hosts),
        sizes_bytes,
        time_s,
        BUFFERS[not out_of_place],
        wire_dtype=one_wire_dtype(source.path, types),
        doubts=doubts,
    )
    names = [device.device_info for device in config.devices for _ in range(of_a_process)]
    return Contents(f"nccl-tests {program}, NCCL {_nccl_version(report.nccl_version)}", counted(names), (table,))


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
            allowed="the file that all_reduce_perf -J wrote",
            remedy="it may be cut off or damaged: copy it again",
        ) from error
    except (ValueError, RecursionError, msgspec.ValidationError) as error:
        raise FileFormatError(
            f"{source.path}: {error}",
            allowed="the file that all_reduce_perf -J wrote (without -C, which puts cpu_time in place of time)",
            remedy="it may be damaged: copy it again",
        ) from error


def _row(place: str, result: _Result, figures: _Figures) -> Row:
    time_us, algbw, busbw = (Rounded(value, _HALF_UNIT) for value in (figures.time, figures.alg_bw, figures.bus_bw))
    return Row(
        place,
        result.size,
        result.count,
        result.type,
        result.redop,
        result.root.strip(),
        time_us,
        algbw,
        busbw,
        figures.nwrong or 0.0,
    )


def _nccl_version(code: int) -> str:
    """``2.28.7`` of 22807 (NCCL_VERSION_CODE since 2.9; before it 2804 was 2.8.4)."""
    major, minor = (code // 10_000, code // 100 % 100) if code >= 10_000 else (code // 1000, code // 100 % 10)
    return f"{major}.{minor}.{code % 100}"
