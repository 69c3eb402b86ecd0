"""A comparison for the terminal: the tables, the answer and the warnings, by rich."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderableType
from rich.padding import Padding
from rich.table import Table as RichTable
from rich.text import Text

from dpsim.records.comparison import Comparison
from dpsim.report.content import shown, told
from dpsim.report.sweep.tables import Column, Section, Table
from dpsim.report.sweep.warnings import warnings

INDENT, GAP = 2, 2


class _Fitting:
    """Tables that leave out their least important columns where the terminal is narrow."""

    def __init__(self, comparison: Comparison) -> None:
        self.comparison = comparison

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for table in shown(self.comparison):
            yield from _render(table, options.max_width)
        for warning in warnings(self.comparison):
            yield Text.assemble(("warning: ", "yellow"), warning.text, ("\n  to do: ", "dim"), warning.remedy)
        if warnings(self.comparison):
            yield Text("")
        for sentence in told(self.comparison):
            yield Text(sentence, style="bold")


def table(comparison: Comparison) -> RenderableType:
    """What ``rich.print`` shows of a comparison: main table, nulls, overlap, warnings and the answer."""
    return _Fitting(comparison)


def _render(source: Table, width: int) -> Iterator[RenderableType]:
    widths = {
        i: max(_width(section.rows, column, i) for section in source.sections)
        for i, column in enumerate(source.columns)
    }
    kept = _fitting(source.columns, widths, width)
    yield Text(source.title, style="bold")
    for section in source.sections:
        yield Text(f"  {section.title}", style="italic")
        yield Padding(_section(section, source.columns, kept, widths), (0, 0, 0, INDENT))
    yield Padding(Text(source.note, style="dim"), (0, 0, 1, INDENT))


def _fitting(columns: tuple[Column, ...], widths: dict[int, int], width: int) -> list[int]:
    kept = list(widths)
    for i in sorted(widths, key=lambda i: -columns[i].dispensable):
        if columns[i].dispensable and INDENT + sum(widths[k] + GAP for k in kept) > width:
            kept.remove(i)
    return kept


def _width(rows: tuple[tuple[str, ...], ...], column: Column, index: int) -> int:
    words = max(len(word) for word in column.head.split(" "))
    return max([words, *(len(row[index]) for row in rows)])


def _section(section: Section, columns: tuple[Column, ...], kept: list[int], widths: dict[int, int]) -> RichTable:
    shown = RichTable(box=None, padding=(0, GAP, 0, 0), header_style="dim", pad_edge=False)
    for i in kept:
        shown.add_column(columns[i].head, justify="left" if columns[i].left else "right", width=widths[i])
    for number, row in enumerate(section.rows):
        shown.add_row(*(row[i] for i in kept), style="bold" if number in section.strong else "")
    return shown
