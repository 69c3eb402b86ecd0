"""Reads tables of columns as OSU and IMB print them: a title that names the benchmark, a header, a row per size."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from dpsim.harness.imports.source import Point, Source, columns_expected, hundredths, points, rows, shown, whole


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """How a suite of benchmarks prints its tables.

    ``title`` matches a benchmark's title, with its name as the group ``name``; ``allreduce`` matches the allreduce's
    name. ``header`` matches the line of column names, which ``columns`` splits (``None``: not the columns of this
    suite). ``size`` and the columns of ``counts`` hold whole numbers, all others but those of ``passed`` times in
    microseconds, of which one of ``mean`` is imported, and lies between ``least`` and ``most`` where they are printed.
    ``passed`` says what a column of the check of the sums holds where they were right. A row whose second field is in
    ``unmeasured`` is left out; rows end at a line that begins with ``footer``. The other fields are for messages.
    """

    suite: str
    command: str
    title: re.Pattern[str]
    title_example: str
    allreduce: re.Pattern[str]
    header: re.Pattern[str]
    columns: Callable[[str], list[str] | None]
    columns_allowed: str
    columns_remedy: str
    size: str
    counts: tuple[str, ...]
    mean: tuple[str, ...]
    least: str
    most: str
    passed: Mapping[str, str]
    unmeasured: tuple[str, ...] = ()
    footer: str = ""


@dataclass(frozen=True, kw_only=True)
class ColumnTable:
    """One table of an allreduce: the lines of its title and its header, and its points."""

    title: int
    header: int
    name: str
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    doubts: tuple[str, ...]

    @property
    def place(self) -> str:
        """Where the table begins in its file."""
        return f"line {self.header}"


def has_title(source: Source, form: TableFormat) -> bool:
    """Whether a line of the file is a title of the suite's benchmarks."""
    return any(form.title.fullmatch(text.strip()) for text in source.lines)


def read_tables(source: Source, form: TableFormat) -> list[ColumnTable]:
    """The allreduce tables of a file; other benchmarks in it are passed over. Raises ``FileFormatError``."""
    titles = [
        (line, match) for line, text in enumerate(source.lines, 1) if (match := form.title.fullmatch(text.strip()))
    ]
    ends = [line for line, _ in titles[1:]] + [len(source.lines) + 1]
    tables = [
        table
        for (line, match), end in zip(titles, ends, strict=False)  # without a title there is one end
        if form.allreduce.fullmatch(match["name"])
        for table in _tables(source, form, line, end)
    ]
    if not tables:
        names = ", ".join(dict.fromkeys(shown(match["name"]) for _, match in titles))
        raise source.refuse(
            titles[0][0] if titles else 1,
            f"no {form.suite} allreduce here, but {names or f'no title of an {form.suite} benchmark'}",
            allowed=f"a title like {form.title_example}, and the table below it",
            remedy=f"give the whole output of {form.command}",
        )
    return tables


def _tables(source: Source, form: TableFormat, title: int, end: int) -> list[ColumnTable]:
    """The tables between a title and the line ``end``."""
    headers = [line for line in range(title + 1, end) if form.header.fullmatch(source.lines[line - 1].strip())]
    if not headers:
        raise source.refuse(
            title,
            "a title without its table",
            allowed=form.columns_allowed,
            remedy=f"give the whole output of {form.command}",
        )
    return [
        _table(source, form, title, header, stop) for header, stop in zip(headers, [*headers[1:], end], strict=True)
    ]


def _table(source: Source, form: TableFormat, title: int, header: int, end: int) -> ColumnTable:
    text = source.lines[header - 1].strip()
    names = form.columns(text)
    if names is None:
        raise source.refuse(header, f"columns {shown(text)}", allowed=form.columns_allowed, remedy=form.columns_remedy)
    measured = [
        _point(source, form, line, fields, names)
        for line, fields in rows(source, header + 1, end, form.footer)
        if len(fields) < 2 or fields[1] not in form.unmeasured
    ]
    sizes_bytes, time_s, doubts = points(source, f"line {header}", measured)
    name = " ".join(source.lines[title - 1].lstrip("# ").split())
    return ColumnTable(title=title, header=header, name=name, sizes_bytes=sizes_bytes, time_s=time_s, doubts=doubts)


def _point(source: Source, form: TableFormat, line: int, fields: list[str], names: list[str]) -> Point:
    columns_expected(source, line, fields, names)
    row = dict(zip(names, fields, strict=True))
    for name, right in form.passed.items():
        if row.get(name, right) != right:
            raise source.refuse(
                line,
                f"{name} is {shown(row[name])}",
                allowed=right,
                remedy="the sums were wrong: mend the MPI library or its settings and measure again",
            )
    counts = {name: whole(source, line, name, row[name]) for name in (form.size, *form.counts) if name in row}
    times = {
        name: hundredths(source, line, name, text)
        for name, text in row.items()
        if name not in counts and name not in form.passed
    }
    mean = next(times[name] for name in form.mean if name in times)
    least, most = times.get(form.least, 0.0), times.get(form.most, float("inf"))
    if not least <= mean <= most:
        raise source.refuse(
            line,
            f"a mean of {mean} us, a least time of {least} us and a largest of {most} us",
            allowed="a mean between the two",
            remedy="the line may be damaged: copy the file again",
        )
    return Point(f"line {line}", counts[form.size], mean)
