"""Writes an allreduce benchmark's report, or its figure alone."""

from __future__ import annotations

from pathlib import Path

from dpsim.errors import ConfigError
from dpsim.records.bench import BenchRecord
from dpsim.records.bench_result import BenchResult
from dpsim.report.bench.content import content
from dpsim.report.write import write_content

KINDS = (".png", ".svg")
_CAPTION = (
    "Bus bandwidth against the size, buffers rewritten before each call, medians of the slowest rank: dpsim in place, "
    "each peer at its fastest mode. "
    "Dashed: the bound, 2 n S bytes at the bandwidth of in-place scaling. Both axes are logarithmic."
)


def write_bench_report(folder: Path, record: BenchRecord, result: BenchResult) -> list[Path]:
    """Write ``index.html``, ``report.md`` and the figure; returns the paths. Raises ``ConfigError``."""
    from dpsim.report.figures import bandwidth

    figure = ("bandwidth", "Bus bandwidth", _CAPTION, bandwidth.draw(result), bandwidth.draw(result, narrow=True))
    return write_content(folder, content(record, result), [figure])


def check_plot(path: Path | None) -> None:
    """Raises ``ConfigError`` for a figure of a kind that is not drawn."""
    if path is not None and path.suffix.lower() not in KINDS:
        raise ConfigError(
            f"cannot draw --plot {path}: its kind is {path.suffix or 'not told'}",
            allowed=", ".join(KINDS),
            remedy=f"name it {path.with_suffix('.png')}",
        )


def write_plot(path: Path, result: BenchResult) -> None:
    """Draw the figure into one file, PNG or SVG by its name. Raises ``ConfigError``."""
    from dpsim.report.figures import bandwidth, save_as

    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_as(bandwidth.draw(result), path)
    except OSError as error:
        raise ConfigError(f"cannot write --plot {path}: {error.strerror or error}", remedy="choose another") from error
