"""What ``IMB-MPI1 Allreduce`` of the Intel MPI Benchmarks prints: a table for each number of processes."""

from __future__ import annotations

import re

from dpsim.harness.imports.source import (
    Contents,
    Point,
    Source,
    Table,
    columns_expected,
    hundredths,
    points,
    rows,
    shown,
    whole,
)

TITLE = re.compile(r"#\s*Benchmarking\s+(\S+)")
_PROCESSES = re.compile(r"#\s*#processes = ([0-9]{1,9})\b.*")
_SETTINGS = re.compile(r"#\s*(MPI_Datatype for reductions|MPI_Op)\s*:\s*(\S*)")
_VERSION = re.compile(r"#\s*(Intel ?\(R\) MPI Benchmarks .*|MPI Version\s*:.*)")
_COLUMNS = ["#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]"]
_NOT_MEASURED = ("out-of-mem.;", "int-overflow.;", "time-out.;")


def is_imb(source: Source) -> bool:
    """Whether the file looks like the Intel MPI Benchmarks' output."""
    return any(TITLE.fullmatch(text.strip()) or "Intel(R) MPI Benchmarks" in text for text in source.lines)


def read_imb(source: Source) -> Contents:
    """The ``Allreduce`` tables of a file; other benchmarks in it are passed over. Raises ``FileFormatError``.

    The times are ``t_avg``, the means over ranks.
    """
    titles = [(line, match) for line, text in enumerate(source.lines, 1) if (match := TITLE.fullmatch(text.strip()))]
    found = [(number, line) for number, (line, match) in enumerate(titles) if match[1] == "Allreduce"]
    if not found:
        held = ", ".join(dict.fromkeys(shown(match[1]) for _, match in titles)) or "no line # Benchmarking NAME"
        raise source.refuse(
            titles[0][0] if titles else 1,
            f"no Allreduce of IMB here, but {held}",
            allowed="# Benchmarking Allreduce, and the table below it",
            remedy="give the whole output of IMB-MPI1 Allreduce",
        )
    _check_settings(source)
    ends = [line for line, _ in titles[1:]] + [len(source.lines) + 1]
    tables = tuple(_table(source, line, ends[number]) for number, line in found)
    named = [" ".join(match[1].split()) for text in source.lines if (match := _VERSION.fullmatch(text.strip()))]
    return Contents(benchmark=", ".join(["IMB Allreduce", *dict.fromkeys(named)]), hardware="", tables=tables)


def _check_settings(source: Source) -> None:
    allowed = {"MPI_Datatype for reductions": "MPI_FLOAT", "MPI_Op": "MPI_SUM"}
    for line, text in enumerate(source.lines, 1):
        match = _SETTINGS.fullmatch(text.strip())
        if match and match[2] != allowed[match[1]]:
            raise source.refuse(
                line,
                f"{match[1]} is {shown(match[2])}",
                allowed=allowed[match[1]],
                remedy="run IMB without that option",
            )


def _table(source: Source, title: int, end: int) -> Table:
    header = next((line for line in range(title + 1, end) if "#bytes" in source.lines[line - 1]), None)
    if header is None:
        raise source.refuse(
            title, "a title without its table", allowed=" ".join(_COLUMNS), remedy="give the whole output of IMB"
        )
    names = source.lines[header - 1].split()
    if names not in (_COLUMNS, [*_COLUMNS, "defects"]):
        raise source.refuse(
            header,
            f"columns {shown(' '.join(names))}",
            allowed=" ".join(_COLUMNS) + ", with or without defects",
            remedy="run IMB-MPI1 Allreduce without -multi",
        )
    counts = [match for text in source.lines[title : header - 1] if (match := _PROCESSES.fullmatch(text.strip()))]
    if len(counts) != 1 or int(counts[0][1]) < 1:
        raise source.refuse(
            title, "a table that does not say its number of processes", allowed="one line # #processes = N, N >= 1"
        )
    found = [
        _point(source, line, fields, names)
        for line, fields in rows(source, header + 1, end)
        if len(fields) < 2 or fields[1] not in _NOT_MEASURED
    ]
    sizes_bytes, time_s, doubts = points(source, f"line {title}", found)
    measured = "out of place, mean over ranks, MPI_FLOAT"
    return Table(f"line {title}", int(counts[0][1]), "", sizes_bytes, time_s, measured, doubts=doubts)


def _point(source: Source, line: int, fields: list[str], names: list[str]) -> Point:
    columns_expected(source, line, fields, names)
    size_bytes = whole(source, line, "#bytes", fields[0])
    whole(source, line, "#repetitions", fields[1])
    low, high, mean, *defects = (
        hundredths(source, line, name, text) for name, text in zip(names[2:], fields[2:], strict=True)
    )
    if not low <= mean <= high:
        raise source.refuse(
            line,
            f"t_min {low}, t_max {high} and t_avg {mean}",
            allowed="t_min <= t_avg <= t_max",
            remedy="the line may be damaged: copy the file again",
        )
    if any(defects):
        raise source.refuse(
            line,
            f"defects is {defects[0]}",
            allowed="0.00",
            remedy="the sums were wrong: mend the MPI library or its settings and measure again",
        )
    return Point(f"line {line}", size_bytes, mean)
