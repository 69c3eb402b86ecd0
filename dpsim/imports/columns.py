"""Tables of columns as OSU and IMB print them: a title that names the benchmark, a header, a row for each size.

``FORMATS`` describes them: a format is a pattern of each such line, and what its columns mean.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from dpsim.imports.lines import Source, shown
from dpsim.imports.tables import Contents, Point, Table, hundredths, rows, table, whole_number


def _osu_columns(header: str) -> list[str] | None:
    """Return the names of the columns, ``Size`` first: one mean, and any of the others at most once."""
    match = _OSU_HEADER.fullmatch(header)
    names = [" ".join(name.split()) for name in _OSU_COLUMN.findall(match[1] if match else "")]
    valid = set(names) <= {*_OSU_MEANS, *_OSU_OTHERS} and len(set(names)) == len(names)
    return ["Size", *names] if valid and len(set(names) & set(_OSU_MEANS)) == 1 else None


def _imb_columns(header: str) -> list[str] | None:
    names = ["#" + name if name in ("bytes", "repetitions") else name for name in header.split()]
    return names if names in (_IMB_COLUMNS, [*_IMB_COLUMNS, "defects"]) else None


_OSU_MEANS = ("Avg Latency(us)", "Latency (us)", "Latency(us)")
_OSU_OTHERS = (
    "Min Latency(us)",
    "Max Latency(us)",
    *(f"P{percent} Tail Lat(us)" for percent in (50, 90, 99)),
    "Iterations",
    "Validation",
)
_OSU_HEADER = re.compile(r"#?\s*Size\s+(\S.*?)\s*")
_OSU_COLUMN = re.compile(
    "|".join(re.escape(name).replace(r"\ ", r"\s+") for name in (*_OSU_MEANS, *_OSU_OTHERS)) + r"|\S+"
)
_IMB_COLUMNS = ["#bytes", "#repetitions", "t_min[usec]", "t_max[usec]", "t_avg[usec]"]
_NEVER = re.compile(r"(?!)")


@dataclass(frozen=True, kw_only=True)
class TableFormat:
    """The format of the tables that a suite of benchmarks prints.

    ``title`` matches a benchmark's title, with its name as the group ``name``; ``allreduce`` matches the allreduce's
    name. ``header`` matches the line of column names, which ``columns`` splits (``None``: not the columns of this
    suite). ``size`` and the columns of ``counts`` hold whole numbers, all others but those of ``passed`` times in
    microseconds, of which one of ``mean`` is imported, and lies between ``least`` and ``most`` where they are printed.
    ``passed`` says what a column of the check of the sums holds where they were right. A row whose second field is in
    ``unmeasured`` is left out; rows end at a line that begins with ``footer``. Above a table a line may name the
    number of ``processes`` and the ``datatype``. Anywhere in the file may stand ``version`` and ``settings``, which
    have to be those of ``allowed``. A file is of this format if it has a title, or a line that ``signs`` matches.
    The other fields are for messages.
    """

    suite: str
    command: str
    benchmark: str
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
    signs: re.Pattern[str]
    measured: str
    unmeasured: tuple[str, ...] = ()
    footer: str = ""
    processes: re.Pattern[str] | None = None
    datatype: re.Pattern[str] = _NEVER
    version: re.Pattern[str] = _NEVER
    settings: re.Pattern[str] = _NEVER
    allowed: Mapping[str, str] = field(default_factory=dict)

    def recognises(self, source: Source) -> bool:
        """Return whether the file looks like this suite's output."""
        return bool(source.matches(self.title) or source.matches(self.signs))

    def read(self, source: Source) -> Contents:
        """Return the allreduce tables of a file; other benchmarks in it are passed over. Raises ``FileFormatError``.

        The times are the means over ranks of each rank's mean.
        """
        titles = source.matches(self.title)
        ends = [*list(titles)[1:], len(source.lines) + 1]
        tables = [
            (title, header, of)
            for (title, match), end in zip(titles.items(), ends, strict=False)  # without a title there is one end
            if self.allreduce.fullmatch(match["name"])
            for header, of in self._tables(source, title, end)
        ]
        if not tables:
            names = ", ".join(dict.fromkeys(shown(match["name"]) for match in titles.values()))
            raise source.refuse(
                next(iter(titles), 1),
                f"no {self.suite} allreduce here, but {names or f'no title of an {self.suite} benchmark'}",
                allowed=f"a title like {self.title_example}, and the table below it",
                remedy=f"give the whole output of {self.command}",
            )
        for line, match in source.matches(self.settings).items():
            if match[2] != self.allowed[match[1]]:
                raise source.refuse(
                    line,
                    f"{match[1]} is {shown(match[2])}",
                    allowed=self.allowed[match[1]],
                    remedy=f"run {self.suite} without that option",
                )
        words = [self.benchmark] if self.benchmark else [source.text(title).lstrip("# ") for title, _, _ in tables]
        words += [match[1] for match in source.matches(self.version).values()]
        described = tuple(self._described(source, *each) for each in tables)
        return Contents(", ".join(dict.fromkeys(" ".join(text.split()) for text in words)), "", described)

    def _tables(self, source: Source, title: int, end: int) -> list[tuple[int, Table]]:
        """Return the tables between a title and the line ``end``, with the lines of their headers."""
        headers = list(source.matches(self.header, title + 1, end))
        if not headers:
            raise source.refuse(
                title,
                "a title without its table",
                allowed=self.columns_allowed,
                remedy=f"give the whole output of {self.command}",
            )
        tables = []
        for header, stop in zip(headers, [*headers[1:], end], strict=True):
            names = self.columns(source.text(header))
            if names is None:
                problem = f"columns {shown(source.text(header))}"
                raise source.refuse(header, problem, allowed=self.columns_allowed, remedy=self.columns_remedy)
            of_table = rows(source, header + 1, stop, names, footer=self.footer, unmeasured=self.unmeasured)
            points = [self._point(source, line, dict(zip(names, fields, strict=True))) for line, fields in of_table]
            elided = [line for line in range(header + 1, stop) if source.is_elided(line)]
            tables.append((header, table(source, f"line {header}", self.measured, points, elided=elided)))
        return tables

    def _point(self, source: Source, line: int, row: dict[str, str]) -> Point:
        for name, right in self.passed.items():
            if row.get(name, right) != right:
                raise source.refuse(
                    line,
                    f"{name} is {shown(row[name])}",
                    allowed=right,
                    remedy="the sums were wrong: mend the MPI library or its settings and measure again",
                )
        counts = {
            name: whole_number(source, line, name, row[name]) for name in (self.size, *self.counts) if name in row
        }
        texts = {name: text for name, text in row.items() if name not in counts and name not in self.passed}
        times = {name: hundredths(source, line, name, text) for name, text in texts.items()}
        mean = next(times[name] for name in self.mean if name in times)
        least, most = times.get(self.least, 0.0), times.get(self.most, float("inf"))
        if not least <= mean <= most:
            raise source.refuse(
                line,
                f"a mean of {mean} us, a least time of {least} us and a largest of {most} us",
                allowed="a mean between the two",
                remedy="the line may be damaged: copy the file again",
            )
        return Point(f"line {line}", counts[self.size], mean)

    def _described(self, source: Source, title: int, header: int, of: Table) -> Table:
        """Return a table with what the lines above it say: its data type, and on how many devices it was measured."""
        types = [match[1] for match in source.matches(self.datatype, title + 1, header).values()]
        devices = None
        if self.processes is not None:
            counts = [int(match[1]) for match in source.matches(self.processes, title + 1, header).values()]
            if len(counts) != 1 or counts[0] < 1:
                raise source.refuse(
                    title,
                    "a table that does not say its number of processes",
                    allowed="one line # #processes = N, N >= 1",
                )
            devices = counts[0]
        return replace(of, devices=devices, measured=", ".join([of.measured, *types[-1:]]))


FORMATS = {
    "osu": TableFormat(
        suite="OSU",
        command="osu_allreduce",
        benchmark="",
        title=re.compile(r"#?\s*OSU\s+(?P<name>\S.*?)\s+Test\b.*?\s*"),
        title_example="# OSU MPI Allreduce Latency Test v7.5",
        allreduce=re.compile(r"\S+ Allreduce Latency"),
        header=_OSU_HEADER,
        columns=_osu_columns,
        columns_allowed=f"# Size, {_OSU_MEANS[0]}, and any of {', '.join(_OSU_OTHERS)}",
        columns_remedy="give the output as osu_allreduce prints it, in microseconds",
        size="Size",
        counts=("Iterations",),
        mean=_OSU_MEANS,
        least="Min Latency(us)",
        most="Max Latency(us)",
        passed={"Validation": "Pass"},
        signs=re.compile(r"#\s*Size\s+\S.*|Size\s+(?:Avg )?Latency ?\(us\).*"),
        measured="out of place, mean over ranks",
        footer="# Datatype:",
        datatype=re.compile(r"#?\s*Datatype:\s*(\S+?)\.?\s*"),
    ),
    "imb": TableFormat(
        suite="IMB",
        command="IMB-MPI1 Allreduce",
        benchmark="IMB Allreduce",
        title=re.compile(r"#?\s*Benchmarking\s+(?P<name>\S+)"),
        title_example="# Benchmarking Allreduce",
        allreduce=re.compile("Allreduce"),
        header=re.compile(r".*(?:#bytes|bytes\s+#?repetitions).*"),
        columns=_imb_columns,
        columns_allowed=" ".join(_IMB_COLUMNS) + ", with or without defects",
        columns_remedy="run IMB-MPI1 Allreduce without -multi",
        size="#bytes",
        counts=("#repetitions",),
        mean=("t_avg[usec]",),
        least="t_min[usec]",
        most="t_max[usec]",
        passed={"defects": "0.00"},
        signs=re.compile(r".*Intel\(R\) MPI Benchmarks.*"),
        measured="out of place, mean over ranks, MPI_FLOAT",
        unmeasured=("out-of-mem.;", "int-overflow.;", "time-out.;"),
        processes=re.compile(r"#?\s*#?processes = ([0-9]{1,9})\b.*"),
        version=re.compile(r"#?\s*(Intel ?\(R\) MPI Benchmarks .*|MPI Version\s*:.*)"),
        settings=re.compile(r"#?\s*(MPI_Datatype for reductions|MPI_Op)\s*:\s*(\S*)"),
        allowed={"MPI_Datatype for reductions": "MPI_FLOAT", "MPI_Op": "MPI_SUM"},
    ),
}
