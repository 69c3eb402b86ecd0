"""Rows and tables of a benchmark's output: their numbers, rows that are damaged, and rows that jump."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from dpsim.collective import FLAT, CollectiveKind, Layout
from dpsim.imports.lines import Source, shown

MOST_BYTES = 2**60
WIRE_DTYPES = {"float": "float32", "half": "float16", "bfloat16": "bfloat16"}
"""The types of nccl-tests that can be imported, and what gradients travel as in a table of each."""
_WHOLE = re.compile(r"0|[1-9][0-9]{0,17}")
_HUNDREDTHS = re.compile(r"(?:0|[1-9][0-9]{0,14})\.[0-9]{2}")
_ROUNDED = re.compile(r"(0|[1-9][0-9]{0,14})(?:\.([0-9]{1,9}))?(?:e([+-]?[0-9]{1,2}))?")
_NUMBER = re.compile(r"[0-9]+(\.[0-9]+)?")
_NARROW = 10  # digits of a size that the benchmarks' columns have room for
_GAP = re.compile(r"\s+")
_JUMP, _ABOVE = 2.0, 1.3  # of a row that jumps: against the line between its neighbours, and against each of them
_DAMAGED = "the line may be cut off or damaged: copy the file again"
_LOG = re.compile(r"\[.*\]|.*\[[0-9]+\] NCCL [A-Z]+ |NCCL version ")


class Rounded(NamedTuple):
    """A number as it was printed, and half a unit of its last digit."""

    value: float
    half_unit: float


class Point(NamedTuple):
    """One row of a table: where it stands (``line 12``), its size, its time in microseconds, the type of its items."""

    where: str
    size_bytes: int
    time_us: float
    type: str = "float"


@dataclass(frozen=True, kw_only=True)
class Table:
    """One collective against its size, as a file says it.

    ``devices`` is ``None`` and ``layout`` empty where the file does not say them; a layout of one node is ``1x8``.
    ``where`` the table begins in the file, ``measured`` which of the benchmark's figures its times are.
    ``sizes_bytes`` are those of float32 gradients, also where they travel as a ``wire_dtype`` of 16 bits. ``jumps``
    are sentences on rows that are likely wrong, by their size; ``notes`` are others on what was read.
    """

    where: str
    devices: int | None
    layout: Layout = FLAT
    sizes_bytes: tuple[int, ...]
    time_s: tuple[float, ...]
    measured: str
    wire_dtype: str
    jumps: Mapping[int, str]
    kind: CollectiveKind = "allreduce"
    notes: tuple[str, ...] = ()


class Contents(NamedTuple):
    """The contents of a file: the benchmark's name and version lines, the hardware it names, its tables."""

    benchmark: str
    hardware: str
    tables: tuple[Table, ...]


def rows(
    source: Source, first: int, end: int, names: Sequence[str], *, footer: str = "", unmeasured: Sequence[str] = ()
) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, fields) of the rows that stand from line ``first`` on and before line ``end``.

    They go on to the first blank line or one that begins with ``footer``. Comments, log lines such as
    ``[host:1] ...`` or ``... NCCL INFO ...``, and rows whose second field is in ``unmeasured`` are passed over.
    Raises ``FileFormatError`` for rows beyond the end, for one that has not a field for each of ``names``, and for one
    that does not end in the column in which all others do.
    """
    row_lines: list[int] = []
    ended = False
    for line in range(first, end):
        text = source.text(line)
        fields = text.split()
        if not text or (footer and text.startswith(footer)):
            ended = True
        elif text.startswith("#") or _LOG.match(text) or source.is_elided(line):
            continue
        elif not ended:
            row_lines.append(line)
            if len(fields) > 1 and fields[1] in unmeasured:
                continue
            if len(fields) != len(names):
                raise source.refuse(
                    line,
                    f"{len(fields)} columns: {shown(' '.join(fields))}",
                    allowed=f"{len(names)}: {', '.join(names)}",
                    remedy="the line may be cut off, or another program's output: complete it or remove it",
                )
            yield line, fields
        elif len(fields) > 1 and _WHOLE.fullmatch(fields[0]) and _NUMBER.fullmatch(fields[1]):
            raise source.refuse(
                line,
                f"a row outside its table: {shown(text)}",
                allowed="rows that follow one another up to a blank line",
                remedy="remove the empty line before it, or the row",
            )
    check_ends(source, row_lines)


def check_ends(source: Source, row_lines: list[int]) -> None:
    """Refuse the one row that ends where no other does, in a table that is printed in columns: characters are lost.

    Rows of sizes too wide for their column are left out.
    """
    text_of = {line: source.lines[line - 1].rstrip() for line in row_lines}
    end_of = {line: len(text) for line, text in text_of.items() if len(text.split()[0]) <= _NARROW}
    ends = list(end_of.values())
    odd = [line for line, end in end_of.items() if ends.count(end) == 1]
    in_columns = all(len(gap) > 1 for text in text_of.values() for gap in _GAP.findall(text.strip()))
    if len(ends) > 2 and len(odd) == 1 and len(set(ends)) == 2 and in_columns:
        raise source.refuse(
            odd[0],
            f"a row that ends elsewhere than all others: {shown(text_of[odd[0]].strip())}",
            allowed="rows that end in one column, as the benchmark prints them",
            remedy="compare it with the original; line it up with the others if it is right",
        )


def table(
    source: Source,
    where: str,
    measured: str,
    points: Sequence[Point],
    devices: int | None = None,
    layout: Layout = FLAT,
    kind: CollectiveKind = "allreduce",
    elided: Sequence[int] = (),
    notes: Sequence[str] = (),
) -> Table:
    """Return the table of some rows. Rows of 0 bytes are left out: such a call sends no message.

    ``elided`` lines stand for others that were left out of the log.
    Raises ``FileFormatError`` for sizes that do not ascend, for times of 0, for rows of different types, and for a
    table without rows.
    """
    nonempty = [point for point in points if point.size_bytes > 0]
    if not nonempty:
        raise source.refuse(
            where,
            "a table without a row of 1 byte or more",
            allowed="one row or more",
            remedy="it may be cut off: run the benchmark again",
        )
    _check_points(source, nonempty)
    return Table(
        where=where,
        devices=devices,
        layout=layout,
        sizes_bytes=tuple(point.size_bytes for point in nonempty),
        time_s=tuple(round(point.time_us / 1e6, 15) for point in nonempty),
        measured=measured,
        wire_dtype=WIRE_DTYPES[nonempty[0].type],
        jumps=_jumps(nonempty),
        kind=kind,
        notes=(*_left_out(points, elided), *notes),
    )


def _check_points(source: Source, points: Sequence[Point]) -> None:
    """Refuse sizes that do not ascend, times of 0, and rows of different types."""
    for last, point in zip([0, *(point.size_bytes for point in points)], points, strict=False):
        if not last < point.size_bytes <= MOST_BYTES:
            raise source.refuse(
                point.where,
                f"{point.size_bytes} bytes after {last}",
                allowed="sizes that ascend, up to 2^60 bytes",
                remedy="keep one sweep over the sizes, and give others in files of their own",
            )
        if not point.time_us > 0:
            raise source.refuse(
                point.where,
                f"{point.size_bytes} bytes in {point.time_us} us",
                allowed="more than 0 us",
                remedy="remove the row if the time was too short for the benchmark's clock",
            )
    for point in points:
        if point.type != points[0].type:
            raise source.refuse(
                point.where,
                f"type {point.type} in a table that begins with {points[0].type}",
                allowed="one type in a table",
                remedy="give each type a file of its own",
            )


def _left_out(points: Sequence[Point], elided: Sequence[int]) -> Iterator[str]:
    for point in points:
        if point.size_bytes == 0:
            yield f"a row of 0 bytes, left out ({point.where})"
    if elided:
        lines = ", ".join(map(str, elided[:5])) + ", ..." * (len(elided) > 5)
        yield f"{len(elided)} times lines are missing where the log says so (line {lines})"


def _jumps(points: Sequence[Point]) -> dict[int, str]:
    """Return a sentence for each row, by its size, that alone is out of line with both its neighbours.

    Its time is twice what lies between its neighbours' (or half of that) in logarithms, and beyond both by 30 %. A step
    to another protocol, from which on all rows are higher, is none. The farthest row goes first, and is then nobody's
    neighbour.
    """
    remaining = list(points)
    jumps: dict[int, str] = {}
    while True:
        far: list[tuple[float, Point, Point, Point]] = []
        for before, point, after in zip(remaining, remaining[1:], remaining[2:], strict=False):
            share = math.log(point.size_bytes / before.size_bytes) / math.log(after.size_bytes / before.size_bytes)
            between = before.time_us ** (1 - share) * after.time_us**share
            low, high = sorted((before.time_us, after.time_us))
            if point.time_us > _ABOVE * high or point.time_us * _ABOVE < low:
                far.append((max(point.time_us / between, between / point.time_us), before, point, after))
        distance, before, point, after = max(far, key=lambda each: each[0], default=(0.0, *3 * (points[0],)))
        if distance < _JUMP:
            return jumps
        jumps[point.size_bytes] = (
            f"{point.where}: {point.size_bytes} bytes in {point.time_us:g} us, between {before.time_us:g} and "
            f"{after.time_us:g} us for its neighbours"
        )
        remaining.remove(point)


def _matched(
    source: Source, line: int, what: str, text: str, pattern: re.Pattern[str], allowed: str, remedy: str = _DAMAGED
) -> re.Match[str]:
    match = pattern.fullmatch(text)
    if match is None:
        raise source.refuse(line, f"{what} is {shown(text)}", allowed=allowed, remedy=remedy)
    return match


def whole_number(source: Source, line: int, what: str, text: str) -> int:
    """Return a whole number of a row, written with digits alone. Raises ``FileFormatError``."""
    return int(_matched(source, line, what, text, _WHOLE, "a whole number up to 2^60, digits alone", remedy="")[0])


def hundredths(source: Source, line: int, what: str, text: str) -> float:
    """Return a time with two digits behind its point, as OSU and IMB print theirs. Raises ``FileFormatError``."""
    allowed = "a time with two digits behind the point, like 12.34"
    return float(_matched(source, line, what, text, _HUNDREDTHS, allowed)[0])


def rounded(source: Source, line: int, what: str, text: str) -> Rounded:
    """Return the number of ``12.34`` or ``1.2e+07``. Raises ``FileFormatError``."""
    allowed = "a number like 12.34 or 1.2e+07" + (", or N/A" if what in ("#wrong", "error") else "")
    match = _matched(source, line, what, text, _ROUNDED, allowed)
    return Rounded(float(text), 0.5 * 10.0 ** (int(match[3] or 0) - len(match[2] or "")))
