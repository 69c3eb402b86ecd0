"""What ``all_reduce_perf`` of nccl-tests (and rccl-tests) prints: a table of out-of-place and in-place times."""

from __future__ import annotations

import re

from dpsim.harness.imports.nccl_row import BUFFERS, Rounded, Row, counted, layout_of, one_wire_dtype
from dpsim.harness.imports.source import Contents, Point, Source, Table, columns_expected, points, rows, shown, whole

HEADER = re.compile(r"#\s*size\s+count\s+type\s+redop\s.*")
_BEGIN = re.compile(r"#\s*nThreads?\b.*")
_RANK = re.compile(
    r"#\s+Rank\s+([0-9]{1,9})\s+(?:Group\s+([0-9]{1,9})\s+)?Pid\s+[0-9]+\s+on\s+(\S+)\s+device\s+[0-9]+"
    r"\s+\[[^\]]*\]\s*(.*)"
)
_PROGRAM = re.compile(r"#\s*Collective test starting: (\S+)")
_VERDICT = re.compile(r"#\s*Out of bounds values\s*:\s*(\S+)\s+(\S+)")
_VERSION = re.compile(r"#?\s*(nccl-tests version .*|(?:rccl-tests: Version|(?:NCCL|RCCL) version) .*)")
_FOOTER = "# Out of bounds values"
_KEYS = (["size", "count", "type", "redop", "root"], ["size", "count", "type", "redop"])
_FIGURES = (
    ["time", "algbw", "busbw", "#wrong"],
    ["time", "algbw", "busbw", "error"],
    ["time", "algbw", "busbw", "#wrong", "i_min", "i_max", "i_p99", "i_cv%"],
)
_UNITS = ["(us)", "(GB/s)", "(GB/s)"]
_MOST_ERROR = 1e-3  # of the column "error", older than #wrong: the largest relative error that sums of floats have


def is_nccl(source: Source) -> bool:
    """Whether the file looks like the text output of nccl-tests."""
    return any(HEADER.fullmatch(text.strip()) or _BEGIN.fullmatch(text.strip()) for text in source.lines)


def read_nccl(source: Source, devices: int | None, out_of_place: bool) -> Contents:
    """The tables of a text output; ``devices`` is how many ran, where the file does not say.

    The times are nccl-tests' own: the mean over iterations, then (unless ``-a`` says otherwise) over ranks.
    Raises ``FileFormatError``.
    """
    headers = [line for line, text in enumerate(source.lines, 1) if HEADER.fullmatch(text.strip())]
    if not headers:
        raise source.refuse(
            1,
            "no table of nccl-tests",
            allowed="the lines # size count type redop root ... and the table below them",
            remedy="give the whole output of all_reduce_perf",
        )
    tables, hardware, versions = [], [], []
    for start, header, end in zip([0, *headers], headers, [*headers[1:], len(source.lines) + 1], strict=False):
        preamble = _preamble(source, start, header)
        hosts, names = _devices(source, preamble)
        hardware.append(counted(names))
        versions += [match[1] for line in preamble if (match := _VERSION.fullmatch(source.lines[line - 1].strip()))]
        tables.append(_table(source, header, end, hosts, len(hosts) or devices, out_of_place))
    benchmark = ", ".join(["nccl-tests all_reduce_perf", *dict.fromkeys(" ".join(text.split()) for text in versions)])
    return Contents(benchmark, "; ".join(dict.fromkeys(filter(None, hardware))), tuple(tables))


def _preamble(source: Source, start: int, header: int) -> range:
    """The lines that describe the run of one table: from its last ``# nThread`` line, or what stands just before it."""
    begun = [line for line in range(start + 1, header) if _BEGIN.fullmatch(source.lines[line - 1].strip())]
    first = begun[-1] if begun else start + 1
    while first - 1 > start and source.lines[first - 2].strip().startswith("#"):
        first -= 1
    for line in range(first, header):
        match = _PROGRAM.fullmatch(source.lines[line - 1].strip())
        if match and not match[1].startswith("all_reduce_perf"):
            raise source.refuse(
                line, f"a table of {shown(match[1])}", allowed="all_reduce_perf", remedy="remove the other collectives"
            )
    return range(first, header)


def _devices(source: Source, preamble: range) -> tuple[list[str], list[str]]:
    """(host of each rank, name of its device), as the rank lines say; nothing where there are none."""
    hosts: list[str] = []
    names: list[str] = []
    for line in preamble:
        text = source.lines[line - 1].strip()
        match = _RANK.fullmatch(text)
        if match is None and re.match(r"#\s+Rank\b", text):
            raise source.refuse(
                line, f"a rank line {shown(text)}", allowed="# Rank N Group 0 Pid N on HOST device N [ID] NAME"
            )
        if match and (int(match[1]) != len(hosts) or int(match[2] or 0) != 0):
            raise source.refuse(
                line,
                f"rank {match[1]} of group {match[2] or 0} where rank {len(hosts)} of group 0 comes next",
                allowed="ranks 0, 1, 2 ... of one group",
                remedy="build nccl-tests with MPI=1 and run it without NCCL_TESTS_SPLIT; or, where lines are missing,"
                " remove the others and give --devices N",
            )
        if match:
            hosts.append(match[3])
            names.append(match[4])
    return hosts, names


def _table(source: Source, header: int, end: int, hosts: list[str], devices: int | None, out_of_place: bool) -> Table:
    names = _columns(source, header)
    figures = names.index("time")
    width = (len(names) - figures - 2 * ("timestamp" in names)) // 2
    chosen = 0 if out_of_place else 1
    measured: list[Point] = []
    types: list[tuple[str, str]] = []
    for line, fields in rows(source, header + 2, end, _FOOTER):
        columns_expected(source, line, fields, names)
        keys = dict(zip(names[:figures], fields, strict=False))
        both = [_row(source, line, keys, fields[at : at + 4], names[figures + 3]) for at in (figures, figures + width)]
        if int(keys["size"]):
            measured.append([row.point(source.path, devices) for row in both][chosen])
            types.append((f"line {line}", keys["type"]))
    for line in range(header, end):
        verdict = _VERDICT.fullmatch(source.lines[line - 1].strip())
        if verdict and verdict.groups() != ("0", "OK"):
            raise source.refuse(
                line,
                f"out of bounds values: {verdict[1]} {verdict[2]}",
                allowed="0 OK",
                remedy="some sums were wrong: mend the cause (nccl-tests' README) and measure again",
            )
    sizes_bytes, time_s, doubts = points(source, f"line {header}", measured)
    return Table(
        f"line {header}",
        len(hosts) or None,
        layout_of(hosts),
        sizes_bytes,
        time_s,
        BUFFERS[chosen],
        wire_dtype=one_wire_dtype(source.path, types),
        doubts=doubts,
    )


def _columns(source: Source, header: int) -> list[str]:
    """The names of the columns; a timestamp counts as its two words. Raises ``FileFormatError``."""
    above, names, units = (
        source.lines[line - 1].strip().lstrip("#").split() if line <= len(source.lines) else []
        for line in (header - 1, header, header + 1)
    )
    stamp = ["timestamp"] if names[-1:] == ["timestamp"] else []
    figures = next((f for f in _FIGURES for keys in _KEYS if names == [*keys, *f, *f, *stamp]), None)
    if figures is None:
        raise source.refuse(
            header,
            f"columns {shown(' '.join(names))}",
            allowed=" ".join([*_KEYS[0], *_FIGURES[0]]) + " and the last four once more (times, not cputime)",
            remedy="run all_reduce_perf without -C",
        )
    of_one = [*_UNITS, "(us)", "(us)", "(us)", "(%)"] if "i_min" in figures else _UNITS
    expected = ["(B)", "(elements)", *of_one, *of_one]
    sides = [word for word in above if word in ("out-of-place", "in-place")]
    if sides != ["out-of-place", "in-place"] or units[: len(expected)] != expected:
        raise source.refuse(
            header,
            f"a table between {shown(' '.join(above))} and {shown(' '.join(units))}",
            allowed=f"out-of-place in-place above, and {' '.join(expected)} below",
            remedy="give the whole output of all_reduce_perf",
        )
    return names + stamp


def _row(source: Source, line: int, keys: dict[str, str], figures: list[str], checked: str) -> Row:
    """The row of one side: its time, algbw, busbw and the column ``checked`` (#wrong, or error of old versions)."""
    wrong = _rounded(source, line, checked, "0" if figures[3] == "N/A" else figures[3]).value
    return Row(
        place=f"line {line}",
        size_bytes=whole(source, line, "size", keys["size"]),
        count=whole(source, line, "count", keys["count"]),
        type=keys["type"],
        redop=keys["redop"],
        root=keys.get("root", "-1"),
        time_us=_rounded(source, line, "time", figures[0]),
        algbw=_rounded(source, line, "algbw", figures[1]),
        busbw=_rounded(source, line, "busbw", figures[2]),
        wrong=0.0 if checked == "error" and wrong <= _MOST_ERROR else wrong,
    )


def _rounded(source: Source, line: int, name: str, text: str) -> Rounded:
    number = Rounded.parse(text)
    if number is None:
        raise source.refuse(
            line,
            f"{name} is {shown(text)}",
            allowed="a number like 12.34 or 1.2e+07" + (", or N/A" if name in ("#wrong", "error") else ""),
            remedy="the line may be cut off or damaged: copy the file again",
        )
    return number
