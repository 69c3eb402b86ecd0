"""Writes the tables of a result as CSV and Parquet."""

from __future__ import annotations

import io
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from dpsim.codec import write_output
from dpsim.errors import ConfigError
from dpsim.report.saved.result import SavedResult
from dpsim.report.words import spreadsheet_text


def check_tables(formats: Sequence[str]) -> None:
    """Check that tables can be written in these formats. Raises ``ConfigError``."""
    if "parquet" in formats and find_spec("pyarrow") is None:
        raise ConfigError(
            "Parquet files need pyarrow, which is not installed",
            allowed="the formats html, md and csv without it",
            remedy="pip install 'dpsim[parquet]'",
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
