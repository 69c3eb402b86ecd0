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


@pytest.mark.parametrize("kind", FRAMES)
def test_the_page_explains_every_column_of_a_kind_of_result(kind: str) -> None:
    text, (title, _) = results_page.PAGE.read_text(encoding="utf-8"), results_page.KINDS[kind]
    for table, columns in FRAMES[kind].items():
        section = text.split(f"### {title}: {table}\n")[1].split("\n#")[0]
        rows = [line.split(" | ")[:3] for line in section.splitlines() if line.startswith("| `")]
        assert rows == [[f"| `{column.name}`", column.dtype, column.unit] for column in columns]
