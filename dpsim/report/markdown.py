"""A report as Markdown: the answer, the figures by link, the tables, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpsim.report.content import Content
from dpsim.report.sweep.tables import Table
from dpsim.report.words import printable


def markdown(content: Content, figures: Sequence[tuple[str, str]]) -> str:
    """The page's text; ``figures`` are (file name, caption)."""
    lines = [f"# {_cell(content.name)}", "", printable(content.question), ""]
    lines += [f"- {printable(sentence)}" for sentence in content.answers]
    for name, caption in figures:
        lines += ["", f"![{_cell(caption)}]({name})", "", f"*{_cell(caption)}*"]
    for table in content.tables:
        lines += ["", f"## {table.title}", *_table(table)]
    lines += ["", "## Warnings", ""]
    lines += [f"- {_cell(w.text)}. To do: {_cell(w.remedy)}." for w in content.warnings] or ["None."]
    lines += ["", "## How it was measured", "", *(f"- {rule}" for rule in content.rules)]
    for group in (content.facts, content.environment):
        lines += ["", "| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in group)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return printable(text).replace("|", "\\|").replace("\n", " ").replace("*", "\\*").replace("<", "&lt;")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _table(table: Table) -> list[str]:
    lines: list[str] = []
    for section in table.sections:
        lines += ["", f"**{_cell(section.title)}**", "", _row(column.head for column in table.columns)]
        lines.append("|" + "|".join(":---" if column.left else "---:" for column in table.columns) + "|")
        lines += [_row(row) for row in section.rows]
    return [*lines, "", _cell(table.note)]
