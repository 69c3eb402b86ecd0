"""The text of nccl-tests as runs: rows known by their shape, and the heads and rank lines above them."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import NamedTuple

from dpsim.imports.lines import Source, shown
from dpsim.imports.nccl_rows import NAMES
from dpsim.imports.others import MSCCLPP

PROGRAM = re.compile(r"#?\s*Collective test starting: (\S+)")
VERDICT = re.compile(r"#?\s*Out of bounds values\s*:\s*(\S+)\s+(\S+)")
HEADER = re.compile(r"#?\s*size\s+count\s+type\s+(?:redop|time)\s.*")
BEGIN = re.compile(r"#?\s*nThreads?\s+[0-9]+\s+nGpus\b.*")
_RANK = re.compile(r"#?\s*Rank\s+([0-9]{1,9})\s+(?:Group\s+([0-9]{1,9})\s+)?Pid\b(.*)")
_DEVICE = re.compile(r"\s+[0-9]+\s+on\s+(\S+)\s+device\s+([0-9]+)\s+(?:\[([^\]]*)\])?\s*(.*)")
_UNITS = re.compile(r"#?\s*\(B\)\s+\(elements\)\s.*")
_SIDES = re.compile(r"#?\s*(?:out-of-place|in-place)(?:\s+(?:out-of-place|in-place))?")
_HEADS = (HEADER, BEGIN, _RANK, PROGRAM, VERDICT, _SIDES)
_START = re.compile(
    r"(?<!\S)[0-9]+\s+[0-9]+\s+(?:u?int(?:8|32|64)?|char|half|float|double|bfloat16|fp8\w*|f8\w*)(?!\S)"
)
_NUMBER = re.compile(r"[-+]?[0-9.]+(?:e[-+]?[0-9]+)?")
_STAMP = re.compile(r"[0-9-]{10} [0-9:]{8}")
_KEYS = (["size", "count", "type", "redop", "root"], ["size", "count", "type", "redop"], ["size", "count", "type"])
FIGURES = ["time", "algbw", "busbw"]
_SPREAD = ["i_min", "i_max", "i_p99", "i_cv%"]
_HEADS_ALLOWED = "size count type redop root, then time algbw busbw #wrong twice (times, not cputime)"

ALONE = {
    "allowed": "one run whose ranks are 0, 1, 2 ...",
    "remedy": "build nccl-tests with MPI=1: without it every process that mpirun starts measures alone",
}


def recognises(source: Source) -> bool:
    """Return whether the file looks like the text output of nccl-tests: its heads, or rows of their shape."""
    return any(HEADER.fullmatch(text) or BEGIN.fullmatch(text) or row_fields(text) for text in source.texts())


class Fields(NamedTuple):
    """A row that is whole: size, count, type, redop and root, and the figures out of place and in place."""

    keys: tuple[str, str, str, str, str]
    sides: tuple[list[str], list[str]]
    names: int


@dataclass
class Run:
    """One run of a program: the lines above its rows, from ``start`` on, and its rows."""

    start: int
    rows: dict[int, Fields] = field(default_factory=dict)
    elided: list[int] = field(default_factory=list)


@dataclass(frozen=True)
class Ranks:
    """What the rank lines say: the highest rank + 1, and host, device and name of each rank that has a whole line."""

    most: int
    host: dict[int, str]
    device: dict[int, tuple[str, ...]]
    names: list[str]
    complete: bool


def runs_of(source: Source) -> list[Run]:
    """Return the runs of a file. A head, a rank line or a verdict below rows begins the next one.

    Raises ``FileFormatError`` for a line that holds a part of a row, and where there is no row.
    """
    runs = [Run(1)]
    for line, text in enumerate(source.texts(), 1):
        run = runs[-1]
        if run.rows and any(pattern.fullmatch(text) for pattern in _HEADS):
            runs.append(Run(max(run.rows) + 1))
        elif fields := row_fields(text):
            run.rows[line] = fields
        elif _holds_row(text):
            raise source.refuse(
                line,
                f"a broken row: {shown(text)}",
                allowed="whole rows: size count type redop root, then time algbw busbw #wrong twice",
                remedy="it may be cut off, wrapped, or have another program's line in it: complete it or remove it",
            )
        elif source.is_elided(line):
            run.elided.append(line)
    if not runs[0].rows:
        raise source.refuse(
            1,
            "a table without a row of nccl-tests" if source.matches(HEADER) else "no table of nccl-tests",
            allowed="rows such as 1048576 262144 float sum -1, then time algbw busbw #wrong twice",
            remedy=f"give the whole output of {NAMES}",
        )
    return [run for run in runs if run.rows]


def row_fields(text: str) -> Fields | None:
    """Return the parts of a row: 13 columns, of old versions 11 or 12, with spreads more. ``None``: no row."""
    fields = text.split()
    if len(fields) < 11 or text.startswith("#") or "NCCL" in text or not fields[0].isdigit():
        return None
    if _STAMP.fullmatch(" ".join(fields[-2:])):
        fields = fields[:-2]
    redop = fields[3] if fields[3].isalpha() else ""
    at = 4 if redop else 3
    root = (len(fields) - at) % 2
    width, rest = divmod(len(fields) - at - root, 2)
    figures = fields[at + root :]
    if width not in (4, 8) or rest or not all(_NUMBER.fullmatch(text) or text == "N/A" for text in figures):
        return None
    keys = (*fields[:3], redop, fields[at] if root else "-1")
    return Fields(
        (keys[0], keys[1], keys[2], keys[3], keys[4]), (figures[:4], figures[width : width + 4]), at + root + 2 * width
    )


def _holds_row(text: str) -> bool:
    """Return whether a line that is no row holds a part of one."""
    if text.startswith("#"):
        return False
    fields = text.split()
    numbers = sum(bool(_NUMBER.fullmatch(part) or part == "N/A") for part in fields)
    mostly = numbers >= 4 and 2 * numbers > len(fields) and "NCCL" not in text
    first = len(fields) > 1 and fields[0].isdigit() and (fields[1].isdigit() or "NCCL" in text)
    return mostly or first or bool(_START.search(text))


def check_heads(source: Source, run: Run, first: int) -> None:
    """Raise ``FileFormatError`` for heads above the rows that name other columns, another order or other units."""
    names_of_row = run.rows[first].names
    each = _SPREAD if names_of_row >= 19 else []
    for line, _ in source.matches(HEADER, run.start, first).items():
        names = source.text(line).lstrip("#").split()
        names = names[: -1 if names[-1] == "timestamp" else None]
        sides = [[*FIGURES, checked, *each] * 2 for checked in ("#wrong", "error")]
        if not any(names == keys + figures for keys in _KEYS for figures in sides) or len(names) != names_of_row:
            raise source.refuse(
                line,
                f"columns {shown(' '.join(names))} above a row of {names_of_row}",
                allowed=_HEADS_ALLOWED,
                remedy="run nccl-tests without -C; rows and their head have as many columns",
            )
    for line, _ in source.matches(_SIDES, run.start, first).items():
        sides_named = source.text(line).lstrip("#").split()
        if sides_named == ["in-place", "out-of-place"]:
            raise MSCCLPP.error(source, line)
    of_one = ["(us)", "(GB/s)", "(GB/s)", *(["(us)", "(us)", "(us)", "(%)"] if each else [])]
    for line, _ in source.matches(_UNITS, run.start, first).items():
        units = [word for word in source.text(line).lstrip("#").split() if word.startswith("(")]
        if units != ["(B)", "(elements)", *of_one, *of_one]:
            raise source.refuse(
                line,
                f"units {shown(' '.join(units))}",
                allowed=" ".join(["(B)", "(elements)", *of_one, *of_one]),
                remedy="give the output as nccl-tests prints it",
            )


def ranks_above(source: Source, start: int, first: int) -> Ranks:
    """Return what the rank lines of the last start before line ``first`` say; a line may be cut off behind its rank.

    Raises ``FileFormatError`` for ranks of several groups, and for a rank that has two lines.
    """
    begin = next(reversed(source.matches(BEGIN, start, first)), start)
    lines: dict[int, re.Match[str] | None] = {}
    elided = False
    for line in range(begin, first):
        match = _RANK.fullmatch(source.text(line))
        if match is None:
            elided = elided or (bool(lines) and source.is_elided(line))
            continue
        rank = int(match[1])
        if rank in lines:
            raise source.refuse(
                line, f"rank {rank} twice: two runs{' on one device each' * (set(lines) == {0})}", **ALONE
            )
        if int(match[2] or 0) != 0:
            raise source.refuse(
                line,
                f"rank {rank} of group {match[2]}",
                allowed="ranks of one group 0",
                remedy="run nccl-tests without NCCL_TESTS_SPLIT",
            )
        lines[rank] = _DEVICE.fullmatch(match[3])
    devices = {rank: match for rank, match in sorted(lines.items()) if match}
    return Ranks(
        most=max(lines, default=-1) + 1,
        host={rank: match[1] for rank, match in devices.items()},
        device={rank: match.group(1, 2, 3) for rank, match in devices.items()},
        names=[match[4] for match in devices.values()],
        complete=bool(lines) and not elided and len(devices) == max(lines) + 1,
    )
