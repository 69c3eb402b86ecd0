"""An allreduce benchmark as lines of text, wide as nccl-tests' are."""

from __future__ import annotations

from collections.abc import Iterator

from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench.content import answers, points_table, sizes_table, warnings
from dpsim.report.sweep.tables import Table


def lines(record: BenchRecord, result: BenchResult) -> Iterator[str]:
    """Everything that was timed, then dpsim beside its peers, then what it comes to."""
    for system in record.systems:
        yield f"# {system.name}: {'; '.join(part for part in (system.library, system.how) if part)}"
    for table in (points_table(result), sizes_table(result)):
        yield from table_lines(table)
    for warning in warnings(result):
        yield f"warning: {warning.text}; to do: {warning.remedy}"
    yield from answers(result)


def table_lines(table: Table) -> Iterator[str]:
    """A table as lines, its columns aligned."""
    heads = tuple(column.head for column in table.columns)
    rows = [row for section in table.sections for row in section.rows]
    widths = [max(len(row[i]) for row in (heads, *rows)) for i in range(len(heads))]

    def line(cells: tuple[str, ...]) -> str:
        shown = (
            cell.ljust(width) if column.left else cell.rjust(width)
            for cell, width, column in zip(cells, widths, table.columns, strict=True)
        )
        return "  ".join(shown).rstrip()

    for section in table.sections:
        yield from ("", f"{table.title}: {section.title}", line(heads))
        yield from (line(row) for row in section.rows)
    yield table.note
