"""``python -m dpsim.experiments.results_page`` writes tables of ``docs``: of results, grid, glossary and allreduce.

The descriptions of columns come from ``dpsim.records.columns``, impossible combinations from ``dpsim.constraints``,
fields from their declarations, terms from ``dpsim.report.glossary``, versions of the allreduce from their registry, the
example and what was measured of the allreduce from the committed reports.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Sequence
from pathlib import Path

from dpsim.cli import app, flags
from dpsim.columns import UNITS, AnyColumn
from dpsim.constraints import ALL_CONSTRAINTS
from dpsim.experiments.command import ROOT, rewrite, with_parts
from dpsim.harness.bench.result import result
from dpsim.harness.load import load
from dpsim.kernels.allreduce.registry import versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.records import bench
from dpsim.records.columns import FRAMES
from dpsim.report.glossary import terms
from dpsim.report.words import percent
from dpsim.units import format_size

PAGE = ROOT / "docs" / "results.md"
BEGIN = "<!-- {part}: made by python -m dpsim.experiments.results_page -->\n"
EXAMPLE = "reports/example"
ALLREDUCE = ROOT / "reports" / "allreduce" / bench.RECORD
LADDER_RANKS = (2, 4, 8)
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
DTYPES = {unit: AnyColumn(unit).dtype for unit in UNITS}


def example() -> str:
    """Return the first rows of a sweep's table, as Python prints them."""
    frame = load(ROOT / EXAMPLE).frame()
    columns = [f'    "{name}",\n' for name in SHOWN]
    call = f'>>> dpsim.load("{EXAMPLE}").frame()[[\n{"".join(columns)}]].head({ROWS})\n'
    return f"```text\n{call}{frame[[*SHOWN]].head(ROWS).to_string()}\n```\n"


def units() -> str:
    """Say what each unit means, and its data type."""
    return "".join(f"- {unit} ({DTYPES[unit]}): {meaning}\n" for unit, meaning in UNITS.items())


def columns() -> str:
    """Return every column of every kind of result, once: a table names those that another one above it explains."""
    sections = []
    explained: set[tuple[str, ...]] = set()
    for kind, tables in FRAMES.items():
        title, command = KINDS[kind]
        sections.append(f"## {title}\n\nWritten by {command}.\n")
        for name, of_table in tables.items():
            call, rows = TABLES[name]
            above = [f"`{column.name}`" for column in of_table if _meaning(column) in explained]
            new = [column for column in of_table if _meaning(column) not in explained]
            explained |= {_meaning(column) for column in new}
            named = f" Explained above: {', '.join(above)}." if above else ""
            sections.append(f"### {title}: {name}\n\n{call}: {rows}.{named}\n\n{table(new)}")
    return "\n".join(sections)


def _meaning(column: AnyColumn) -> tuple[str, ...]:
    return column.name, column.dtype, column.unit, column.text


def table(of_table: Sequence[AnyColumn]) -> str:
    """Return the rows of columns, below their heads."""
    rows = ["| column | unit | meaning |\n|---|---|---|\n"]
    for column in of_table:
        dtype = "" if column.dtype == DTYPES[column.unit] else f" ({column.dtype})"
        rows.append(f"| `{column.name}` | {column.unit}{dtype} | {column.text.replace('|', chr(92) + '|')} |\n")
    return "".join(rows)


def impossible() -> str:
    """Every impossible combination, and what is allowed instead."""
    rows = ["| impossible | allowed |\n|---|---|\n"]
    for row in ALL_CONSTRAINTS:
        if isinstance(row.allowed, str):
            given, allowed = (re.sub(r"\{(\w+)(!r)?\}", r"`\1`", text) for text in (row.given, row.allowed))
            rows.append(f"| {given} | {allowed} |\n")
    fields = (row.fields.split()[1] for row in ALL_CONSTRAINTS if not isinstance(row.allowed, str))
    rows.append(f"| a {', '.join(fields)} that PyTorch's `runtime` does not have | what the error lists |\n")
    return "".join(rows)


def fields() -> str:
    """Every field that some command takes by ``--set`` alone, and its meaning."""
    application, known = app.build(), flags.known_fields()
    commands = [application[command].default_command for command in application if not command.startswith("-")]
    names = sorted({name for command in commands for name in flags.by_set(command)})
    return "".join(["| field | meaning |\n|---|---|\n", *(f"| `{name}` | {known[name].text} |\n" for name in names)])


def glossary() -> str:
    """Every term with an anchor, the other words for it, its sentence and its formula."""
    lines = []
    for term in terms():
        anchor = re.sub(r"[^a-z0-9]+", "-", term.name.lower()).strip("-")
        also = f" ({', '.join(term.also)})" if term.also else ""
        formula = f" `{term.formula}`" if term.formula else ""
        lines.append(f'- <a id="{anchor}"></a>**{term.name}**{also}: {term.text}{formula}\n')
    return "".join(lines)


def ladder(record: Path = ALLREDUCE) -> str:
    """Return every version of the allreduce, with its fraction of the bound at the largest size of a benchmark."""
    benchmark = bench.read(record)
    size_bytes, backend = benchmark.bench.sizes()[-1], benchmark.bench.backend
    points = [p for p in result(benchmark).points if p.size_bytes == size_bytes and p.system == bench.OWN]
    fractions: dict[tuple[str, str], float | None]
    fractions = {(backend, p.algorithm): p.fraction_of_bound for p in points if p.in_place and not p.cached}
    bound = f"of the bound, {format_size(size_bytes)}, n = {benchmark.bench.devices}"
    rows = [f"| version | on | what it does | bytes moved, n = 2, 4, 8 | waits | fuses | {bound} |", "|---" * 7 + "|"]
    for version in versions():
        parts = [slots(range(n + 1)) for n in LADDER_RANKS]
        most = "" if version.most_bytes is None else f", up to {format_size(version.most_bytes)}"
        fraction = fractions.get((version.backend, version.name))
        moved = ", ".join(f"{version.bytes_moved(part, 1):g} S" for part in parts)
        waits = ", ".join(str(version.synchronisations(part)) for part in parts)
        cells = [f"`{version.name}`", version.backend, version.summary + most, moved, waits]
        cells += [", ".join(version.variants) or "-", "-" if fraction is None else percent(fraction)]
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


PAGES: dict[Path, dict[str, Callable[[], str]]] = {
    PAGE: {"example": example, "units": units, "columns": columns},
    ROOT / "docs" / "grid.md": {"fields": fields, "impossible": impossible},
    ROOT / "docs" / "glossary.md": {"terms": glossary},
    ROOT / "docs" / "allreduce.md": {"ladder": ladder},
}


def page(path: Path, text: str) -> str:
    """Return the text of a page with its generated parts made anew."""
    return with_parts(text, {BEGIN.format(part=name): make for name, make in PAGES[path].items()})


if __name__ == "__main__":
    for path in PAGES:
        rewrite(path, functools.partial(page, path))
