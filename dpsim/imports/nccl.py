"""What nccl-tests (and rccl-tests) print of allreduces, all-gathers and reduce-scatters: the rows are the log.

A row is known by its shape, and says twice what it measured: out of place and in place, each with time, algbw and
busbw. Heads, titles and rank lines may be missing; where they stand they have to agree with the rows.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from dpsim.collective import FLAT
from dpsim.imports.lines import Source, shown
from dpsim.imports.nccl_rows import (
    BUFFERS,
    NAME_IT,
    NAMES,
    PROGRAMS,
    WRONG_SUMS,
    Program,
    Row,
    counted,
    layout,
    program_of,
    ranks_of,
)
from dpsim.imports.nccl_text import (
    ALONE,
    FIGURES,
    PROGRAM,
    VERDICT,
    Fields,
    Ranks,
    Run,
    check_heads,
    ranks_above,
    runs_of,
)
from dpsim.imports.tables import Contents, Point, Table, check_ends, rounded, table, whole_number

_MENTION = re.compile(
    r"(?<![a-z_])((?:all_reduce|all_gather|reduce_scatter|broadcast|reduce|alltoall|sendrecv|gather|scatter|hypercube)"
    r"_perf)(?![a-z])"
)
_VERSION = re.compile(r"#?\s*(nccl-tests version .*|(?:rccl-tests: Version|(?:NCCL|RCCL) version) .*)")
_MOST_ERROR = 1e-3  # of the column "error", older than #wrong: the largest relative error that sums of floats have


def read(source: Source, devices: int | None, out_of_place: bool) -> Contents:
    """Return the tables of an output; ``devices`` is how many ran, where a text does not say. Raises
    ``FileFormatError``.

    The times are nccl-tests' own: the mean over iterations, then (unless ``-a`` says otherwise) over ranks.
    """
    for line, match in source.matches(VERDICT).items():
        if match.groups() != ("0", "OK"):
            problem = f"out of bounds values: {match[1]} {match[2]}"
            raise source.refuse(line, problem, allowed="0 OK", remedy=WRONG_SUMS)
    tables, hardware, versions, programs = [], [], [], []
    runs = runs_of(source)
    for run in runs:
        first = next(iter(run.rows))
        check_heads(source, run, first)
        ranks = ranks_above(source, run.start, first)
        program, of_run = _table(source, run, ranks, devices, out_of_place=out_of_place, alone=len(runs) == 1)
        hardware.append(counted(ranks.names) if ranks.complete else ", ".join(dict.fromkeys(filter(None, ranks.names))))
        versions += [" ".join(match[1].split()) for match in source.matches(_VERSION, run.start, first).values()]
        programs.append(program.name)
        tables.append(of_run)
    benchmark = ", ".join([f"nccl-tests {' and '.join(dict.fromkeys(programs))}", *dict.fromkeys(versions)])
    return Contents(benchmark, "; ".join(dict.fromkeys(filter(None, hardware))), tuple(tables))


def _table(
    source: Source, run: Run, ranks: Ranks, devices: int | None, *, out_of_place: bool, alone: bool
) -> tuple[Program, Table]:
    """Return the program of a run and its table, whose rows agree with all that the file says.

    ``devices`` is how many ran, where the file does not say it; it chooses a run where a file has several.
    """
    first = next(iter(run.rows))
    zero = [line for line, fields in run.rows.items() if not fields.keys[0].strip("0")]
    both = [_rows(source, line, fields) for line, fields in run.rows.items() if line not in zero]
    every = [row for rows in both for row in rows]
    named = _named_program(source, run.start, first, every)
    program = named or _program_by_rows(source, run, every)
    count = _count(every, program, ranks, devices, named=named is not None, alone=alone)
    if count == 1 and len({rows[0].size_bytes for rows in both}) < len(both):
        raise source.refuse(first, "two runs on one device each: busbw is 0, and sizes stand twice", **ALONE)
    points = [[row.point(source, count, program) for row in rows][0 if out_of_place else 1] for rows in both]
    check_ends(source, [line for line in run.rows if line not in zero])
    points = [*(Point(f"line {line}", 0, 0.0) for line in zero), *points]
    notes = []
    if named is None and program is not PROGRAMS[0]:
        notes.append(f"no line names the program: counts and bandwidths are those of {program.name}")
    all_ranks_named = count is not None and len(ranks.host) == count
    if ranks.most and not all_ranks_named:
        notes.append(f"rank lines of {len(ranks.host)} of {count} ranks")
    if shared := [rank for rank, device in ranks.device.items() if list(ranks.device.values()).count(device) > 1]:
        notes.append(f"ranks {', '.join(map(str, shared[:8]))} shared a device")
    where, of_buffers = f"line {first}", BUFFERS[not out_of_place]
    of_nodes = layout(list(ranks.host.values())) if all_ranks_named else FLAT
    return program, table(source, where, of_buffers, points, count, of_nodes, program.kind, run.elided, notes)


def _named_program(source: Source, start: int, first: int, rows: Sequence[Row]) -> Program | None:
    """Return the program that the lines above a table name, as versions since 2.17 do; ``None`` where none is named.

    In older outputs it is the last program of nccl-tests that stands there, in a command line say. Raises
    ``FileFormatError`` for another collective, unless it is only mentioned and the bandwidths are an allreduce's.
    """
    named = None
    for line in range(start, first):
        text = source.text(line)
        starting = PROGRAM.fullmatch(text)
        mentioned = {starting[1]} if starting else set(_MENTION.findall(text))
        if len(mentioned) != 1 or "concluded" in text:
            continue
        (name,) = mentioned
        named = program_of(name)
        if named is None and (starting or (ranks_of(rows, 2) or 0) <= 2):
            raise source.refuse(line, f"a table of {shown(name)}", allowed=NAMES, remedy="remove the other collectives")
    return named


def _program_by_rows(source: Source, run: Run, rows: Sequence[Row]) -> Program:
    """Return the program whose counts and redop the rows have.

    Raises ``FileFormatError`` where no row was checked in place, but out of place: so do sendrecv_perf and
    alltoall_perf, whose rows are those of an allreduce on 2 devices and of an all-gather.
    """
    checks = {tuple(side[3] == "N/A" for side in fields.sides) for fields in run.rows.values()}
    first = next(iter(run.rows))
    if checks == {(False, True)}:
        problem = "N/A in place alone, which sendrecv_perf and alltoall_perf print"
        raise source.refuse(first, problem, allowed=NAMES, remedy=NAME_IT)
    if 2 * sum(row.parts == 1 for row in rows) >= len(rows):
        return PROGRAMS[0]
    if rows[0].redop != "sum" and checks == {(True, True)}:
        problem = "unchecked rows that are those of all_gather_perf or alltoall_perf"
        raise source.refuse(first, problem, allowed=NAMES, remedy=NAME_IT)
    return PROGRAMS[2] if rows[0].redop == "sum" else PROGRAMS[1]


def _count(
    rows: Sequence[Row], program: Program, ranks: Ranks, devices: int | None, *, named: bool, alone: bool
) -> int | None:
    """Return on how many devices a run was: what rank lines, bandwidths and ``devices`` say.

    Rank lines may be left out; bandwidths that are not of the ranks that all have a line are found by ``Row.point``.
    """
    of_lines, most = len(ranks.host), ranks.most
    if ranks.complete and all(row.has_busbw_of(of_lines, program.sends) for row in rows):
        return of_lines
    of_rows = ranks_of(rows, program.sends)
    if of_rows is not None and of_rows > most > 0:
        return of_rows
    if ranks.complete:
        return of_lines
    if devices is not None and devices >= most and (alone or of_rows is None):
        return devices
    alike = of_rows == 2 and program.sends == 2 and not named  # busbw = algbw: also of a sendrecv on any number
    return None if alike or (of_rows or 0) < most else of_rows


def _rows(source: Source, line: int, fields: Fields) -> tuple[Row, ...]:
    """Return the rows out of place and in place."""
    size, count = (
        whole_number(source, line, name, text) for name, text in zip(("size", "count"), fields.keys, strict=False)
    )
    rows = []
    for *figures, wrong in fields.sides:
        errors = rounded(source, line, "#wrong", "0" if wrong == "N/A" else wrong).value
        time, algbw, busbw = (rounded(source, line, name, text) for name, text in zip(FIGURES, figures, strict=True))
        wrong_sums = 0.0 if errors <= _MOST_ERROR else errors
        rows.append(Row(line, size, count, *fields.keys[2:], time, algbw, busbw, wrong_sums))
    return tuple(rows)
