"""A report for the terminal: its tables, its warnings and its answers, printed by rich."""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, RenderableType
from rich.text import Text

from dpsim.errors import printable
from dpsim.report.content import ReportWarning
from dpsim.report.table import Column, Table, column_widths, fitting

_INDENT, _GAP = 2, 2


@dataclass(frozen=True, kw_only=True)
class TerminalReport:
    """Tables, warnings and answers, as ``rich.print`` shows them.

    In a narrow terminal a table leaves out its most dispensable columns. Lines of a table are never wrapped.
    """

    tables: Sequence[Table]
    warnings: Sequence[ReportWarning] = ()
    answers: Sequence[str] = ()

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> Iterator[RenderableType]:
        for table in self.tables:
            yield from table_lines(table, options.max_width)
        for warning in self.warnings:
            yield from paragraph(f"warning: {warning.text}", options.max_width, style="yellow")
            yield from paragraph(f"to do: {warning.remedy}", options.max_width, indent=_INDENT)
        if self.warnings:
            yield Text("")
        for sentence in self.answers:
            yield from paragraph(sentence, options.max_width, style="bold")


def table_lines(table: Table, width: int) -> Iterator[Text]:
    """Yield a table's title, sections and note. Without a title there is no indentation."""
    indent = _INDENT if table.title else 0
    widths = column_widths(table)
    shown = fitting(table.columns, widths, width - indent, _GAP)

    def line(row: Sequence[str], style: str) -> Text:
        parts = (row[i].ljust(widths[i]) if table.columns[i].left else row[i].rjust(widths[i]) for i in shown)
        text = printable(" " * indent + (" " * _GAP).join(parts)).rstrip()
        return Text(text, style=style, no_wrap=True, overflow="ignore")

    if table.title:
        yield Text(printable(table.title), style="bold")
    for section in table.sections:
        if section.title:
            yield Text(" " * indent + printable(section.title), style="italic")
        for heads in _head_lines(table.columns, widths):
            yield line(heads, "dim")
        for number, row in enumerate(section.rows):
            yield line(row, "bold" if number in section.strong else "")
    if table.note:
        yield from paragraph(table.note, width, indent=indent, style="dim")
    if table.title or table.note:
        yield Text("")


def paragraph(text: str, width: int, *, indent: int = 0, hanging: int = 0, style: str = "") -> Iterator[Text]:
    """Yield a text wrapped between words; a word that is longer than the width, such as a path, is kept whole.

    Lines after the first are indented by ``hanging`` more.
    """
    margin = " " * indent
    for line in textwrap.wrap(
        printable(text),
        width,
        initial_indent=margin,
        subsequent_indent=margin + " " * hanging,
        break_long_words=False,
        break_on_hyphens=False,
    ):
        yield Text(line, style=style, no_wrap=True, overflow="ignore")


def _head_lines(columns: Sequence[Column[object]], widths: Sequence[int]) -> Iterator[tuple[str, ...]]:
    """Yield the heads as lines, each head wrapped to its column's width and standing at the bottom."""
    wrapped = [textwrap.wrap(column.head, width or 1) for column, width in zip(columns, widths, strict=True)]
    upwards = itertools.zip_longest(*(reversed(lines) for lines in wrapped), fillvalue="")
    yield from reversed(list(upwards))
