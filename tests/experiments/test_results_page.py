"""The page of all columns of results is generated, and current."""

from __future__ import annotations

from pathlib import Path

import pytest

from dpsim.experiments import results_page
from dpsim.records.columns import FRAMES


@pytest.mark.parametrize("path", results_page.PAGES, ids=lambda path: path.name)
def test_a_page_with_generated_tables_is_current(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert text == results_page.page(path, text), "run: python -m dpsim.experiments.results_page"


def test_the_page_explains_every_column_of_every_table() -> None:
    """In the table's own section, or in one above it with the same unit, type and text; then the section names it."""
    page = results_page.PAGE.read_text(encoding="utf-8")
    above = ""
    for kind, tables in FRAMES.items():
        for table, columns in tables.items():
            before, heading, rest = page.partition(f"### {results_page.KINDS[kind][0]}: {table}\n")
            section = rest.split("\n#")[0]
            assert heading and len(before) >= len(above)
            for column in columns:
                line = results_page.listed([column])
                assert line in section or (line in before and f"`{column.name}`" in section.split("\n- ")[0])
            above = before
