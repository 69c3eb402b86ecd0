"""Tables of a report as text cells, laid out once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from dpsim.columns import Column as Column

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Section:
    """Rows of cells under a title; ``strong`` are the indices of the rows to stress."""

    title: str
    rows: tuple[tuple[str, ...], ...]
    strong: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Table:
    """A title, a note, and sections of rows under one set of columns."""

    title: str
    columns: tuple[Column[Any], ...]
    sections: tuple[Section, ...]
    note: str = ""


def table(
    *,
    columns: Sequence[Column[Row]],
    sections: Mapping[str, Sequence[Row]],
    title: str = "",
    note: str = "",
    strong: Callable[[Row], bool] = lambda row: False,
) -> Table:
    """Return the table of ``sections`` (title -> rows); rows for which ``strong`` is true are stressed."""
    shown = tuple(column for column in columns if column.shown)
    return Table(
        title=title,
        columns=shown,
        sections=tuple(
            Section(
                title=name,
                rows=tuple(tuple(column.cell(row) for column in shown) for row in rows),
                strong=tuple(index for index, row in enumerate(rows) if strong(row)),
            )
            for name, rows in sections.items()
        ),
        note=note,
    )


def column_widths(table: Table) -> list[int]:
    """Return the width of each column in characters; its head may wrap between words."""
    rows = [row for section in table.sections for row in section.rows]
    return [
        max(map(len, (*column.head.split(" "), *(row[i] for row in rows)))) for i, column in enumerate(table.columns)
    ]


def fitting(columns: Sequence[Column[Any]], widths: Sequence[int], width: int, gap: int = 2) -> list[int]:
    """Return the indices of the columns that fit into ``width`` characters, with ``gap`` between them."""
    indices = list(range(len(columns)))
    for i in sorted(indices, key=lambda i: -columns[i].dispensable):
        if columns[i].dispensable and sum(widths[k] + gap for k in indices) > width:
            indices.remove(i)
    return indices


def narrowed(table: Table, width: int) -> Table:
    """Return the table with the columns that fit into ``width`` characters."""
    indices = fitting(table.columns, column_widths(table), width)
    return replace(
        table,
        columns=tuple(table.columns[i] for i in indices),
        sections=tuple(
            replace(section, rows=tuple(tuple(row[i] for i in indices) for row in section.rows))
            for section in table.sections
        ),
    )
