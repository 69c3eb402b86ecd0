"""What ``osu_allreduce`` of the OSU micro-benchmarks prints: 2 columns, or more with ``-f``, ``-c`` and ``-z``."""

from __future__ import annotations

import re

from dpsim.harness.imports.column_tables import ColumnTable, TableFormat, has_title, read_tables
from dpsim.harness.imports.source import Contents, Source, Table

_HEADER = re.compile(r"#\s*Size\s+(\S.*?)\s*")
_DATATYPE = re.compile(r"#\s*Datatype:\s*(\S+?)\.?\s*")
_MEANS = ("Avg Latency(us)", "Latency (us)", "Latency(us)")
_OTHERS = (
    "Min Latency(us)",
    "Max Latency(us)",
    "P50 Tail Lat(us)",
    "P90 Tail Lat(us)",
    "P99 Tail Lat(us)",
    "Iterations",
    "Validation",
)
_COLUMN = re.compile("|".join(re.escape(name).replace(r"\ ", r"\s+") for name in (*_MEANS, *_OTHERS)) + r"|\S+")


def _columns(header: str) -> list[str] | None:
    """The names of the columns, ``Size`` first: one mean, and any of the others at most once."""
    match = _HEADER.fullmatch(header)
    names = [" ".join(name.split()) for name in _COLUMN.findall(match[1] if match else "")]
    means = [name for name in names if name in _MEANS]
    valid = set(names) <= {*_MEANS, *_OTHERS} and len(set(names)) == len(names) and len(means) == 1
    return ["Size", *names] if valid else None


_OSU = TableFormat(
    suite="OSU",
    command="osu_allreduce",
    title=re.compile(r"#\s*OSU\s+(?P<name>\S.*?)\s+Test\b.*?\s*"),
    title_example="# OSU MPI Allreduce Latency Test v7.5",
    allreduce=re.compile(r"\S+ Allreduce Latency"),
    header=_HEADER,
    columns=_columns,
    columns_allowed=f"# Size, {_MEANS[0]}, and any of {', '.join(_OTHERS)}",
    columns_remedy="give the output as osu_allreduce prints it, in microseconds",
    size="Size",
    counts=("Iterations",),
    mean=_MEANS,
    least="Min Latency(us)",
    most="Max Latency(us)",
    passed={"Validation": "Pass"},
    footer="# Datatype:",
)


def is_osu(source: Source) -> bool:
    """Whether the file looks like an OSU benchmark's output."""
    return has_title(source, _OSU) or any(_HEADER.fullmatch(text.strip()) for text in source.lines)


def read_osu(source: Source) -> Contents:
    """The allreduce tables of a file: one below a title, or one for each datatype. Raises ``FileFormatError``.

    The times are the means over ranks of each rank's mean. The file does not say the number of ranks.
    """
    tables = read_tables(source, _OSU)
    benchmark = ", ".join(dict.fromkeys(table.name for table in tables))
    return Contents(benchmark=benchmark, hardware="", tables=tuple(_table(source, table) for table in tables))


def _table(source: Source, table: ColumnTable) -> Table:
    above = source.lines[table.title : table.header - 1]
    datatypes = [match[1] for text in above if (match := _DATATYPE.fullmatch(text.strip()))]
    measured = ", ".join(["out of place, mean over ranks", *datatypes[-1:]])
    return Table(table.place, None, "", table.sizes_bytes, table.time_s, measured, doubts=table.doubts)
