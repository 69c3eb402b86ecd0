"""``python -m dpsim.experiments.results_page`` writes tables of ``docs``: of results, grid, glossary and allreduce.

The descriptions of columns come from ``dpsim.records.columns``, fields from their declarations, terms from
``dpsim.report.glossary``, versions of the allreduce from their registry, the example and what was measured of the
allreduce from the committed reports.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path

from dpsim.cli import app, flags
from dpsim.columns import UNITS, AnyColumn
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
            above = [f"`{column.name}`" for column in of_table if _meaning(column) in explained]
            new = [column for column in of_table if _meaning(column) not in explained]
            explained |= {_meaning(column) for column in new}
            named = f"Explained above: {', '.join(above)}.\n\n" if above else ""
            sections.append(f"### {title}: {name}\n\n{named}{listed(new)}")
    return "\n".join(sections)


def _meaning(column: AnyColumn) -> tuple[str, ...]:
    return column.name, column.dtype, column.unit, column.text


def listed(columns: Sequence[AnyColumn]) -> str:
    """Return a line for each column: its name, its unit, its data type where that is not the unit's, its meaning."""
    lines = []
    for column in columns:
        dtype = "" if column.dtype == DTYPES[column.unit] else f", {column.dtype}"
        lines.append(f"- `{column.name}` ({column.unit}{dtype}): {column.text}\n")
    return "".join(lines)


def fields() -> str:
    """Every field that some command takes by ``--set`` alone, and its meaning."""
    application, known = app.build(), flags.known_fields()
    commands = [application[command].default_command for command in application if not command.startswith("-")]
    names = sorted({name for command in commands for name in flags.by_set(command)})
    return "".join(f"- `{name}`: {known[name].text}\n" for name in names)


def glossary() -> str:
    """Every term, the other words for it, its sentence and its formula."""
    lines = []
    for term in terms():
        others = [name for name in term.also if name.lower() not in (f"{term.name}s".lower(), f"{term.name}es".lower())]
        also = f" ({', '.join(others)})" if others else ""
        formula = f" `{term.formula}`" if term.formula else ""
        lines.append(f"- **{term.name}**{also}: {term.text}{formula}\n")
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
    ROOT / "docs" / "grid.md": {"fields": fields},
    ROOT / "docs" / "glossary.md": {"terms": glossary},
    ROOT / "docs" / "allreduce.md": {"ladder": ladder},
}


def page(path: Path, text: str) -> str:
    """Return the text of a page with its generated parts made anew."""
    return with_parts(text, {BEGIN.format(part=name): make for name, make in PAGES[path].items()})


if __name__ == "__main__":
    for path in PAGES:
        rewrite(path, functools.partial(page, path))
