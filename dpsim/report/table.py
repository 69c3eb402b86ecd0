"""Tables of a report as text cells, laid out once for the terminal, Markdown and HTML."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

Row = TypeVar("Row")


@dataclass(frozen=True, kw_only=True)
class Column(Generic[Row]):
    """A column of a table: its head, and the function that returns the cell of a row.

    Numbers are aligned right, texts with ``left`` to the left. In a narrow terminal the columns with the highest
    ``dispensable`` are left out first, those with 0 never. With ``shown`` false the column is left out everywhere.
    """

    head: str
    cell: Callable[[Row], str]
    left: bool = False
    dispensable: int = 0
    shown: bool = True


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
