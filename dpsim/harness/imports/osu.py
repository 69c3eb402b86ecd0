"""What ``osu_allreduce`` of the OSU micro-benchmarks prints: 2 columns, or more with ``-f``, ``-c`` and ``-z``."""

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

TITLE = re.compile(r"#\s*(OSU\s+(\S.*?)\s+Test\b.*?)\s*")
_ALLREDUCE = re.compile(r"\S+ Allreduce Latency")
_HEADER = re.compile(r"#\s*Size\s+(\S.*?)\s*")
_DATATYPE = re.compile(r"#\s*Datatype:\s*(\S+?)\.?\s*")
_MEANS = ("Avg Latency(us)", "Latency (us)", "Latency(us)")
_TIMES = ("Min Latency(us)", "Max Latency(us)", "P50 Tail Lat(us)", "P90 Tail Lat(us)", "P99 Tail Lat(us)")
_COLUMNS = (*_MEANS, *_TIMES, "Iterations", "Validation")
_COLUMN = re.compile("|".join(re.escape(name).replace(r"\ ", r"\s+") for name in _COLUMNS) + r"|\S+")


def is_osu(source: Source) -> bool:
    """Whether the file looks like an OSU benchmark's output."""
    return any(TITLE.fullmatch(text.strip()) or _HEADER.fullmatch(text.strip()) for text in source.lines)


def read_osu(source: Source) -> Contents:
    """The allreduce tables of a file; other benchmarks in it are passed over. Raises ``FileFormatError``.

    The times are the means over ranks of each rank's mean. The file does not say the number of ranks.
    """
    titles = [(line, match) for line, text in enumerate(source.lines, 1) if (match := TITLE.fullmatch(text.strip()))]
    found = [(number, line) for number, (line, match) in enumerate(titles) if _ALLREDUCE.fullmatch(match[2])]
    if not found:
        held = ", ".join(dict.fromkeys(shown(match[2]) for _, match in titles)) or "no title of an OSU benchmark"
        raise source.refuse(
            titles[0][0] if titles else 1,
            f"no OSU allreduce here, but {held}",
            allowed="a title like # OSU MPI Allreduce Latency Test v7.5, and the table below it",
            remedy="give the whole output of osu_allreduce",
        )
    ends = [line for line, _ in titles[1:]] + [len(source.lines) + 1]
    tables = tuple(table for number, line in found for table in _tables(source, line, ends[number]))
    named = dict.fromkeys(titles[number][1][1] for number, _ in found)
    return Contents(benchmark=", ".join(named), hardware="", tables=tables)


def _tables(source: Source, title: int, end: int) -> list[Table]:
    """The tables between a title and ``end``: one, or one a datatype."""
    headers = [line for line in range(title + 1, end) if _HEADER.fullmatch(source.lines[line - 1].strip())]
    if not headers:
        raise source.refuse(
            title,
            "a title without its table",
            allowed="# Size  Avg Latency(us) and rows",
            remedy="give the whole output",
        )
    tables, datatype = [], ""
    for start, header, stop in zip([title, *headers], headers, [*headers[1:], end], strict=False):
        for text in source.lines[start : header - 1]:
            if match := _DATATYPE.fullmatch(text.strip()):
                datatype = match[1]
        names = _columns(source, header)
        found = [_point(source, line, fields, names) for line, fields in rows(source, header + 1, stop, "# Datatype:")]
        sizes_bytes, time_s, doubts = points(source, f"line {header}", found)
        measured = "out of place, mean over ranks" + (f", {datatype}" if datatype else "")
        tables.append(Table(f"line {header}", None, "", sizes_bytes, time_s, measured, doubts=doubts))
    return tables


def _columns(source: Source, header: int) -> list[str]:
    """The names of the columns, ``Size`` first. Raises ``FileFormatError`` for one that is not known."""
    match = _HEADER.fullmatch(source.lines[header - 1].strip())
    names = [" ".join(name.split()) for name in _COLUMN.findall(match[1] if match else "")]
    means = [name for name in names if name in _MEANS]
    if set(names) - set(_COLUMNS) or len(set(names)) != len(names) or len(means) != 1:
        raise source.refuse(
            header,
            f"columns {shown(', '.join(names))}",
            allowed=f"Size, {_MEANS[0]}, and any of {', '.join([*_TIMES, 'Iterations', 'Validation'])}",
            remedy="give the output as osu_allreduce prints it, in microseconds",
        )
    return ["Size", *names]


def _point(source: Source, line: int, fields: list[str], names: list[str]) -> Point:
    columns_expected(source, line, fields, names)
    of = dict(zip(names, fields, strict=True))
    if of.get("Validation", "Pass") != "Pass":
        raise source.refuse(
            line,
            f"Validation is {shown(of['Validation'])}",
            allowed="Pass",
            remedy="the sums were wrong: mend the MPI library or its settings and measure again",
        )
    if "Iterations" in of:
        whole(source, line, "Iterations", of["Iterations"])
    mean = next(name for name in names if name in _MEANS)
    times = {name: hundredths(source, line, name, of[name]) for name in names if name in (mean, *_TIMES)}
    low, high = times.get("Min Latency(us)", 0.0), times.get("Max Latency(us)", float("inf"))
    if not low <= times[mean] <= high:
        raise source.refuse(
            line,
            f"a mean of {times[mean]} us, a least of {low} and a most of {high}",
            allowed="a mean between the two",
            remedy="the line may be damaged: copy the file again",
        )
    return Point(f"line {line}", whole(source, line, "Size", of["Size"]), times[mean])
