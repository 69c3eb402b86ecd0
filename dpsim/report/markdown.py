"""A comparison as Markdown: the answer, the figures by link, the tables, how it was measured."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from dpsim.report.comparison import Comparison
from dpsim.report.facts import RULES, Facts
from dpsim.report.tables import Table, tables
from dpsim.report.warning import warnings
from dpsim.report.words import answers


def markdown(comparison: Comparison, figures: Sequence[tuple[str, str]], facts: Facts, environment: Facts) -> str:
    """The page's text; ``figures`` are (file name, caption)."""
    lines = [f"# {comparison.name}", "", comparison.question, ""]
    lines += [f"- {sentence}" for sentence in answers(comparison)]
    for name, caption in figures:
        lines += ["", f"![{_cell(caption)}]({name})", "", f"*{_cell(caption)}*"]
    for table in tables(comparison):
        lines += ["", f"## {table.title}", *_table(table)]
    found = warnings(comparison)
    lines += ["", "## Warnings", ""]
    lines += [f"- {_cell(w.text)}. To do: {_cell(w.remedy)}." for w in found] or ["None."]
    lines += ["", "## How it was measured", "", *(f"- {rule}" for rule in RULES)]
    for group in (facts, environment):
        lines += ["", "| | |", "|---|---|", *(f"| {_cell(name)} | {_cell(value)} |" for name, value in group)]
    return "\n".join(lines) + "\n"


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ").replace("*", "\\*").replace("<", "&lt;")


def _row(cells: Iterable[str]) -> str:
    return "| " + " | ".join(_cell(cell) for cell in cells) + " |"


def _table(table: Table) -> list[str]:
    lines: list[str] = []
    for section in table.sections:
        lines += ["", f"**{_cell(section.title)}**", "", _row(column.head for column in table.columns)]
        lines.append("|" + "|".join(":---" if column.left else "---:" for column in table.columns) + "|")
        lines += [_row(row) for row in section.rows]
    return [*lines, "", _cell(table.note)]
