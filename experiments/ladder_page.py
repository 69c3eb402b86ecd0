"""``python -m dpsim.experiments.ladder_page`` writes the table of ``docs/allreduce.md`` from the registry.

What is measured in it comes from the committed report, ``reports/allreduce``.
"""

from __future__ import annotations

from dpsim.experiments.command import ROOT, rewrite, with_parts
from dpsim.harness.bench.result import result
from dpsim.kernels.allreduce.registry import Version, versions
from dpsim.kernels.allreduce.tree import slots
from dpsim.records import bench
from dpsim.report.words import percent
from dpsim.units import format_size

PAGE = ROOT / "docs" / "allreduce.md"
RECORD = ROOT / "reports" / "allreduce" / bench.RECORD
BEGIN = "<!-- made by python -m dpsim.experiments.ladder_page -->\n"
RANKS = (2, 4, 8)


def ladder(measured: dict[tuple[str, str], float], where: str) -> str:
    """Return the table; ``measured``: fraction of the bound by backend and version, taken at ``where``."""
    heads = ("version", "on", "what it does", "bytes moved, n = 2, 4, 8", "waits", "fuses", where or "measured")
    lines = [f"| {' | '.join(heads)} |", "|---|---|---|---|---|---|---|"]
    lines += [f"| {' | '.join(_row(version, measured))} |" for version in versions()]
    return "\n".join(lines) + "\n"


def _row(version: Version, measured: dict[tuple[str, str], float]) -> tuple[str, ...]:
    moved = ", ".join(f"{version.bytes_moved(slots(range(n + 1)), 1):g} S" for n in RANKS)
    waits = ", ".join(str(version.synchronisations(slots(range(n + 1)))) for n in RANKS)
    most = "" if version.most_bytes is None else f", up to {format_size(version.most_bytes)}"
    fraction = measured.get((version.backend, version.name))
    return (
        f"`{version.name}`",
        version.backend,
        version.summary + most,
        moved,
        waits,
        ", ".join(version.variants) or "-",
        "-" if fraction is None else percent(fraction),
    )


def measured() -> tuple[dict[tuple[str, str], float], str]:
    """Return fractions of the bound at the committed report's largest size, and where that was, if there is one."""
    if not RECORD.exists():
        return {}, ""
    record = bench.read(RECORD)
    size = record.bench.sizes()[-1]
    points = (p for p in result(record).points if p.size_bytes == size and p.system == bench.OWN)
    fractions: dict[tuple[str, str], float] = {
        (record.bench.backend, p.algorithm): p.fraction_of_bound
        for p in points
        if p.in_place and not p.cached and p.fraction_of_bound is not None
    }
    return fractions, f"of the bound, {format_size(size)}, n = {record.bench.devices}"


def page(text: str) -> str:
    """Return the page with its table made anew."""
    return with_parts(text, {BEGIN: lambda: ladder(*measured())})


if __name__ == "__main__":
    rewrite(PAGE, page)
