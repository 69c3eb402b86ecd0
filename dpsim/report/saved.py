"""``SavedResult``: what dpsim wrote, as data: tables for pandas, files of them, and a figure.

``dpsim.load`` reads one from its files; ``dpsim.harness.load.KINDS`` declares every kind of result. pandas and
matplotlib are loaded when they are used.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from dpsim.codec import write_output
from dpsim.columns import AnyColumn
from dpsim.errors import ConfigError
from dpsim.installation import install
from dpsim.records.columns import FRAMES
from dpsim.report.words import spreadsheet_text

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Samples = tuple[Sequence[Mapping[str, Any]], Sequence[int], Mapping[str, Any]]
"""Rows, how many samples each of them has, and the values of all samples by column: see ``frames.repeated``."""
_CALLS = {"points": "frame()", "samples": "samples()", "timeline": "timeline()"}


@dataclass(frozen=True, kw_only=True)
class ResultKind:
    """A kind of result: how its record is recognised and read, and the module that tells what was ``read``.

    ``files`` are the names of which a folder has one, ``schemas`` the formats of the record. The module ``report`` has
    functions of the data: ``title``; ``points`` and ``summary`` of ``--json``; the tables of raw data, ``samples`` and
    of sweeps ``timeline``; ``panel``, which returns that of the main figure; ``write(folder, data, pages)``,
    which writes the report; and ``show(data, page, verbose)``, which yields what a terminal shows: lines of text, and
    renderables of rich.
    """

    name: str
    files: tuple[str, ...] = ()
    schemas: tuple[str, ...]
    read: Callable[[Path], Any]
    report: ModuleType


@dataclass(frozen=True, repr=False, eq=False)
class SavedResult:
    """A result as tables and a figure. ``docs/results.md`` explains every column."""

    declared: ResultKind
    data: Any

    @property
    def kind(self) -> str:
        """The kind of result, as in ``dpsim.records.columns.FRAMES``."""
        return self.declared.name

    @property
    def title(self) -> str:
        """What was run, in a line."""
        return str(self.declared.report.title(self.data))

    def points(self) -> list[dict[str, Any]]:
        """Return the points as ``--json`` prints them."""
        return list(self.declared.report.points(self.data))

    def plot(self, ax: Axes | None = None, **options: Any) -> Axes:
        """Draw the result's main figure on ``ax``, or on a new figure of pyplot, and return the axes.

        ``options`` are ``network`` and ``devices`` of a sweep, ``peers`` of a benchmark.
        Raises ``ConfigError`` for what the result does not have.
        """
        from dpsim.report.figures import on_axes

        return on_axes(ax, self.declared.report.panel(self.data, **options))

    def frame(self) -> pd.DataFrame:
        """Return a row for each point, with the columns of ``--json``."""
        from dpsim.report.frames import table

        return table(self.points(), self.columns("points"))

    def samples(self) -> pd.DataFrame:
        """Return a row for each raw sample."""
        return self._repeated("samples")

    def timeline(self) -> pd.DataFrame:
        """Return a row for each event, measured and predicted. Raises ``ConfigError`` where no timeline is kept."""
        if "timeline" not in self.tables:
            raise ConfigError(
                f"the result of {self.kind} has no timeline",
                allowed=f"its tables: {', '.join(self.tables)}",
                remedy="only a sweep keeps timelines: load the folder of a sweep",
            )
        return self._repeated("timeline")

    def _repeated(self, name: str) -> pd.DataFrame:
        from dpsim.report.frames import repeated

        rows, lengths, values = getattr(self.declared.report, name)(self.data)
        return repeated(rows, lengths, values, self.columns(name))

    @property
    def tables(self) -> tuple[str, ...]:
        """The names of the tables that this result has."""
        return tuple(FRAMES[self.kind])

    def columns(self, name: str) -> tuple[AnyColumn, ...]:
        """Return the columns of one of the tables."""
        return FRAMES[self.kind][name]

    def table(self, name: str) -> pd.DataFrame:
        """Return one of the tables by its name."""
        return {"points": self.frame, "samples": self.samples, "timeline": self.timeline}[name]()

    def __repr__(self) -> str:
        return f"{self.title}\n  {', '.join(f'.{_CALLS[name]}' for name in self.tables)}, .plot()"

    def _repr_html_(self) -> str:
        return f"<p>{escape(self.title)}</p>{self.frame().to_html(max_rows=60)}"


def check_tables(formats: Sequence[str]) -> None:
    """Check that tables can be written in these formats. Raises ``ConfigError``."""
    if "parquet" in formats and find_spec("pyarrow") is None:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed",
            allowed="the formats html, md and csv without it",
            remedy=install("parquet"),
        )


def write_tables(folder: Path, saved: SavedResult, formats: Sequence[str]) -> list[Path]:
    """Write every table of a result, such as ``points.csv``; returns the paths. Raises ``ConfigError``.

    In CSV infinity is ``inf``, and what is missing is empty. Parquet files keep the data types.
    """
    check_tables(formats)
    written = []
    for name in saved.tables if formats else ():
        frame = saved.table(name)
        for kind in formats:
            buffer = io.BytesIO()
            if kind == "csv":
                frame.map(spreadsheet_text).to_csv(buffer, index=False)
            else:
                frame.to_parquet(buffer, engine="pyarrow", index=False)
            written.append(folder / f"{name}.{kind}")
            write_output(written[-1], buffer.getvalue())
    return written
