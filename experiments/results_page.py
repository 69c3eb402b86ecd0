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


def fields() -> str:
    """Every field that a command takes by ``--set`` alone, its meaning, and these commands."""
    application, known = app.build(), flags.known_fields()
    commands: dict[str, list[str]] = {}
    for command in application:
        for name in flags.by_set(application[command].default_command) if not command.startswith("-") else ():
            commands.setdefault(name, []).append(command)
    rows = [f"| `{name}` | {known[name].text} | {', '.join(commands[name])} |\n" for name in sorted(commands)]
    return "".join(["| field | meaning | by `--set` alone in |\n|---|---|---|\n", *rows])


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
