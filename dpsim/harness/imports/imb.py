"""What ``IMB-MPI1 Allreduce`` of the Intel MPI Benchmarks prints: a table for each number of processes."""

from __future__ import annotations

import re

from dpsim.harness.imports.column_tables import ColumnTable, TableFormat, has_title, read_tables
from dpsim.harness.imports.source import Contents, Source, Table, shown

_PROCESSES = re.compile(r"#\s*#processes = ([0-9]{1,9})\b.*")
_SETTINGS = re.compile(r"#\s*(MPI_Datatype for reductions|MPI_Op)\s*:\s*(\S*)")
_VERSION = re.compile(r"#\s*(Intel ?\(R\) MPI Benchmarks .*|MPI Version\s*:.*)")
_COLUMNS = ["#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]"]


def _columns(header: str) -> list[str] | None:
    names = header.split()
    return names if names in (_COLUMNS, [*_COLUMNS, "defects"]) else None


_IMB = TableFormat(
    suite="IMB",
    command="IMB-MPI1 Allreduce",
    title=re.compile(r"#\s*Benchmarking\s+(?P<name>\S+)"),
    title_example="# Benchmarking Allreduce",
    allreduce=re.compile("Allreduce"),
    header=re.compile(".*#bytes.*"),
    columns=_columns,
    columns_allowed=" ".join(_COLUMNS) + ", with or without defects",
    columns_remedy="run IMB-MPI1 Allreduce without -multi",
    size="#bytes",
    counts=("#repetitions",),
    mean=("t_avg[usec]",),
    least="t_min[usec]",
    most="t_max[usec]",
    passed={"defects": "0.00"},
    unmeasured=("out-of-mem.;", "int-overflow.;", "time-out.;"),
)


def is_imb(source: Source) -> bool:
    """Whether the file looks like the Intel MPI Benchmarks' output."""
    return has_title(source, _IMB) or any("Intel(R) MPI Benchmarks" in text for text in source.lines)


def read_imb(source: Source) -> Contents:
    """The ``Allreduce`` tables of a file. Raises ``FileFormatError``. The times are ``t_avg``, the means over ranks."""
    tables = read_tables(source, _IMB)
    _check_settings(source)
    versions = [" ".join(match[1].split()) for text in source.lines if (match := _VERSION.fullmatch(text.strip()))]
    benchmark = ", ".join(["IMB Allreduce", *dict.fromkeys(versions)])
    return Contents(benchmark=benchmark, hardware="", tables=tuple(_table(source, table) for table in tables))


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


def _table(source: Source, table: ColumnTable) -> Table:
    above = source.lines[table.title : table.header - 1]
    counts = [int(match[1]) for text in above if (match := _PROCESSES.fullmatch(text.strip()))]
    if len(counts) != 1 or counts[0] < 1:
        raise source.refuse(
            table.title,
            "a table that does not say its number of processes",
            allowed="one line # #processes = N, N >= 1",
        )
    measured = "out of place, mean over ranks, MPI_FLOAT"
    return Table(table.place, counts[0], "", table.sizes_bytes, table.time_s, measured, doubts=table.doubts)
