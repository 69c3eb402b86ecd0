"""Published measurements: a TOML file says where the numbers come from, a CSV file of its name has the rows."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.collective import checked_layout
from dpsim.columns import Unit
from dpsim.errors import ConfigError, FileFormatError

SCHEMA = "dpsim.published/1"
FOLDER = Path(__file__).parent
"""The folder of the sets, cases and workloads that come with dpsim."""
_SET = "published set"
_COUNTS = ("devices", "size_bytes", "local_batch")
"""Columns that no row may leave empty: whole numbers of 1 or more."""


class PublishedColumn(Noun, frozen=True):
    """What a column of the CSV file holds: its unit (``dpsim.columns.UNITS``) and a sentence."""

    unit: Unit
    text: str


class Doubt(Noun, frozen=True):
    """What is doubtful in a published table: ``lines`` of the CSV file, what kind of doubt, and the doubt in words."""

    kind: str
    lines: str
    text: str


class Provenance(Noun, frozen=True):
    """What a set is, where its numbers come from, and under which licence they stand.

    ``cluster`` names the machines that it was measured on, or whoever measured several: sets with the same name say
    nothing new of the world beside each other, and are left out together. ``columns`` are those of the CSV file in
    their order; ``outcome`` names the measured one: seconds, or samples a second.
    """

    name: str
    title: str
    source: str
    citation: str
    licence: str
    licence_text: str
    columns: dict[str, PublishedColumn]
    outcome: str
    cluster: str = ""
    doubts: tuple[Doubt, ...] = ()
    notes: tuple[str, ...] = ()
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A row of a set: its line in the CSV file, its values, and its outcome."""

    line: int
    values: Mapping[str, Any]
    outcome: float


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """The rows of a set and where they come from."""

    provenance: Provenance
    rows: tuple[PublishedRow, ...]
    path: Path

    @property
    def name(self) -> str:
        return self.provenance.name


def read_sets(folder: Path = FOLDER) -> dict[str, PublishedSet]:
    """Read the sets of ``folder/sets`` by their names. Raises ``FileFormatError``."""
    paths = sorted((folder / "sets").glob("*.toml"))
    if not paths:
        raise FileFormatError(
            f"{folder} has no published sets", allowed="a folder with sets/NAME.toml, sets/NAME.csv and cases/NAME.toml"
        )
    return {path.stem: read_set(path) for path in paths}


def read_set(path: Path) -> PublishedSet:
    """Read a set: the provenance in ``path`` and the rows of the CSV file beside it.

    Raises ``FileFormatError`` for no cluster, and with the line for columns in another order, for a number that is
    none, for an outcome that is not above 0, and for devices, a layout, a size or a local batch that cannot be.
    """
    provenance = codec.read(path, Provenance, _SET, SCHEMA)
    if provenance.name != path.stem:
        raise FileFormatError(f"{path}: the name is {provenance.name!r}", allowed=f"{path.stem!r}, that of the file")
    if not provenance.cluster:
        raise FileFormatError(
            f"{path} names no cluster",
            allowed='cluster = "NAME": the machines that were measured, or whoever measured several',
            remedy="give sets of the same machines the same name, and others one of their own",
        )
    table = path.with_suffix(".csv")
    try:
        text = table.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise FileFormatError(f"cannot read the rows of {path}: {error}", allowed=f"a CSV file {table}") from error
    lines = list(csv.reader(text.splitlines()))
    columns = provenance.columns
    if provenance.outcome not in columns or columns[provenance.outcome].unit not in ("s", "1/s"):
        raise FileFormatError(
            f"{path}: the outcome is {provenance.outcome!r}", allowed="a column in s, or samples a second in 1/s"
        )
    if not lines or lines[0] != list(columns):
        raise FileFormatError(
            f"{table}, line 1: columns {', '.join(lines[0] if lines else [])}",
            allowed=", ".join(columns),
            remedy=f"list the columns of the file in {path.name}, in their order",
        )
    rows = tuple(_row(table, number, cells, provenance) for number, cells in enumerate(lines[1:], 2))
    if not rows:
        raise FileFormatError(f"{table} has no rows", allowed="one or more")
    return PublishedSet(provenance=provenance, rows=rows, path=path)


def _row(table: Path, line: int, cells: list[str], provenance: Provenance) -> PublishedRow:
    where = f"{table}, line {line}"
    if len(cells) != len(provenance.columns):
        raise FileFormatError(f"{where}: {len(cells)} cells", allowed=f"{len(provenance.columns)}, one a column")
    texts = dict(zip(provenance.columns, cells, strict=True))
    values = {
        name: _value(where, name, texts[name], column) for name, column in provenance.columns.items() if texts[name]
    }
    outcome = values.pop(provenance.outcome, math.nan)
    if not 0 < outcome < math.inf:
        raise FileFormatError(
            f"{where}: {provenance.outcome} is {texts[provenance.outcome] or 'empty'}",
            allowed="a finite number above 0",
        )
    for name in _COUNTS:
        if name in texts and not (isinstance(values.get(name), int) and values[name] >= 1):
            raise FileFormatError(f"{where}: {name} is {texts[name]!r}", allowed="a whole number of 1 or more")
    if "layout" in values and "devices" in values:
        try:
            checked_layout(str(values["layout"]), values["devices"])
        except ConfigError as error:
            raise FileFormatError(f"{where}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error
    return PublishedRow(line=line, values=values, outcome=outcome)


def _value(where: str, name: str, text: str, column: PublishedColumn) -> Any:
    """Return what a cell holds: a text, or a number. A count has to be a whole one, and bytes are where they can."""
    if column.unit in ("name", "text"):
        return text
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise FileFormatError(f"{where}: {name} is {text!r}", allowed="a number")
    if column.unit == "count" and not value.is_integer():
        raise FileFormatError(f"{where}: {name} is {text}", allowed="a whole number")
    return int(value) if column.unit in ("count", "bytes") and value.is_integer() else value
