"""``python -m dpsim.experiments.results_page`` writes tables of ``docs``: ``results.md``, ``grid.md``, ``glossary.md``.

The descriptions of columns come from ``dpsim.records.columns``, impossible combinations from ``dpsim.constraints``,
terms from ``dpsim.report.glossary``, and the example from the committed report, ``reports/example``.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dpsim.columns import UNITS, AnyColumn
from dpsim.constraints import ALL_CONSTRAINTS
from dpsim.experiments.command import ROOT, rewrite, with_parts
from dpsim.harness.load import load
from dpsim.records.columns import FRAMES
from dpsim.report.glossary import terms

PAGE = ROOT / "docs" / "results.md"
BEGIN = "<!-- {part}: made by python -m dpsim.experiments.results_page -->\n"
EXAMPLE = "reports/example"
SHOWN = ("network", "devices", "fusion_threshold_bytes", "measured_step_s", "predicted_step_s", "error")
ROWS = 4
KINDS = {
    "sweep": ("A sweep", "`dpsim sweep fusion-threshold` and `dpsim sweep devices`"),
    "bench": ("A benchmark of the allreduce", "`dpsim bench allreduce`"),
    "reproduce": ("A check of reproducibility", "`dpsim reproduce`"),
    "quality": (
        "A study of training quality",
        "`python -m dpsim.experiments.quality` and sweeps with `--seeds` or `--target-loss`",
    ),
    "train": ("A training", "`dpsim train --output FILE`"),
}
TABLES = {
    "points": ("`.frame()`, `points.csv`", "a row for each point of `--json`"),
    "samples": ("`.samples()`, `samples.csv`", "a row for each raw sample"),
    "timeline": ("`.timeline()`, `timeline.csv`", "a row for each event of a timeline"),
}


def example() -> str:
    """Return the first rows of a sweep's table, as Python prints them."""
    frame = load(ROOT / EXAMPLE).frame()
    columns = [f'    "{name}",\n' for name in SHOWN]
    call = f'>>> dpsim.load("{EXAMPLE}").frame()[[\n{"".join(columns)}]].head({ROWS})\n'
    return f"```text\n{call}{frame[[*SHOWN]].head(ROWS).to_string()}\n```\n"


def units() -> str:
    """Say what each unit means."""
    return "".join(f"- {unit}: {meaning}\n" for unit, meaning in UNITS.items())


def columns() -> str:
    """Return every column of every table of every kind of result."""
    sections = []
    for kind, tables in FRAMES.items():
        title, command = KINDS[kind]
        sections.append(f"## {title}\n\nWritten by {command}.\n")
        for name, of_table in tables.items():
            call, rows = TABLES[name]
            sections.append(f"### {title}: {name}\n\n{call}: {rows}.\n\n{_table(of_table)}")
    return "\n".join(sections)


def _table(of_table: Sequence[AnyColumn]) -> str:
    rows = [f"| `{c.name}` | {c.dtype} | {c.unit} | {c.text.replace('|', chr(92) + '|')} |\n" for c in of_table]
    return "".join(["| column | type | unit | meaning |\n|---|---|---|---|\n", *rows])


def impossible() -> str:
    """Every impossible combination, with what is allowed and what to do."""
    rows = ["| impossible | allowed | to do |\n|---|---|---|\n"]
    for row in ALL_CONSTRAINTS:
        allowed = row.allowed if isinstance(row.allowed, str) else "what the error lists"
        cells = (re.sub(r"\{(\w+)(!r)?\}", r"`\1`", text) for text in (row.given, allowed, row.remedy))
        rows.append(f"| {' | '.join(cells)} |\n")
    return "".join(rows)


def glossary() -> str:
    """Every term with an anchor, the other words for it, its sentence and its formula."""
    lines = []
    for term in terms():
        anchor = re.sub(r"[^a-z0-9]+", "-", term.name.lower()).strip("-")
        also = f" ({', '.join(term.also)})" if term.also else ""
        formula = f" `{term.formula}`" if term.formula else ""
        lines.append(f'- <a id="{anchor}"></a>**{term.name}**{also}: {term.text}{formula}\n')
    return "".join(lines)


PARTS: dict[str, Callable[[], str]] = {
    "example": example,
    "units": units,
    "columns": columns,
    "impossible": impossible,
    "terms": glossary,
}


PAGES = {
    PAGE: ("example", "units", "columns"),
    ROOT / "docs" / "grid.md": ("impossible",),
    ROOT / "docs" / "glossary.md": ("terms",),
}


def page(path: Path, text: str) -> str:
    """Return the text of a page with its generated parts made anew."""
    return with_parts(text, {BEGIN.format(part=name): PARTS[name] for name in PAGES[path]})


if __name__ == "__main__":
    for path in PAGES:
        rewrite(path, functools.partial(page, path))
