"""Writes the report of an allreduce benchmark, or its figure alone."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from dpsim.errors import ConfigError
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench.content import content
from dpsim.report.write import PAGES, ReportFigure, write_content

KINDS = (".png", ".svg")
_CAPTION = (
    "Bus bandwidth against the size, buffers rewritten before each call, medians of the slowest rank: dpsim in place, "
    "each peer in its fastest mode. "
    "Dashed: the bound, 2 n S bytes at the bandwidth of in-place scaling. Both axes are logarithmic."
)


def write_bench_report(
    folder: Path, record: BenchRecord, result: BenchResult, pages: Collection[str] = tuple(PAGES)
) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figure; returns the paths. Raises ``ConfigError``."""
    from dpsim.report.figures import bandwidth

    figure = ReportFigure(
        name="bandwidth",
        title="Bus bandwidth",
        caption=_CAPTION,
        wide=bandwidth.draw(result),
        narrow=bandwidth.draw(result, narrow=True),
    )
    return write_content(folder, content(record, result), [figure], pages)


def check_plot(path: Path | None) -> None:
    """Raise ``ConfigError`` for a file that is neither PNG nor SVG."""
    if path is not None and path.suffix.lower() not in KINDS:
        raise ConfigError(
            f"cannot draw --plot {path}: its name ends in {path.suffix or 'no suffix'}",
            allowed=", ".join(KINDS),
            remedy=f"name it {path.with_suffix('.png')}",
        )


def write_plot(path: Path, result: BenchResult) -> None:
    """Draw the figure into a file, PNG or SVG by its name. Raises ``ConfigError``."""
    from dpsim.report.figures import bandwidth, save_as

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_as(bandwidth.draw(result), path)
    except OSError as error:
        raise ConfigError(
            f"cannot write --plot {path}: {error.strerror or error}", remedy="choose another file"
        ) from error
