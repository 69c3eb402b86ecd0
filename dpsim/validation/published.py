"""Published measurements: a TOML file that says where the numbers come from, and a CSV file of its name with the rows.

A row's outcome may be sealed: the set then holds its salted SHA-256, and the salt is published with it later.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dpsim import codec
from dpsim.codec import Noun
from dpsim.collective import check_layout
from dpsim.columns import Unit
from dpsim.errors import ConfigError, FileFormatError

SCHEMA = "dpsim.published/1"
OUTCOMES_SCHEMA = "dpsim.outcomes/1"
FOLDER = Path(__file__).parent
"""The folder of the sets, cases and workloads that come with dpsim."""
_SEALED = re.compile(r"sha256:([0-9a-f]{64})")
_LEAST_SALT = 32
_SET = "published set"
_COUNTS = ("devices", "size_bytes", "local_batch")
"""Columns that no row may leave empty: whole numbers of 1 or more."""


class PublishedColumn(Noun, frozen=True):
    """What a column of the CSV file holds: its unit (``dpsim.columns.UNITS``) and a sentence."""

    unit: Unit
    text: str


class Provenance(Noun, frozen=True):
    """What a set is, where its numbers come from, and under which licence they stand.

    ``columns`` are those of the CSV file in their order; ``outcome`` names the measured one: seconds, or samples a
    second. ``fastest_link_bytes_per_s`` is what the fastest link of a device can send by its data sheet (0: not known).
    """

    name: str
    title: str
    source: str
    citation: str
    licence: str
    licence_text: str
    columns: dict[str, PublishedColumn]
    outcome: str
    fastest_link_bytes_per_s: float = 0.0
    notes: tuple[str, ...] = ()
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True)
class PublishedRow:
    """A row of a set: its line in the CSV file, its values, and its outcome, or the seal of an outcome to come."""

    line: int
    values: Mapping[str, Any]
    outcome: float | None
    seal: str = ""


@dataclass(frozen=True, kw_only=True)
class PublishedSet:
    """The rows of a set and where they come from."""

    provenance: Provenance
    rows: tuple[PublishedRow, ...]
    path: Path

    @property
    def name(self) -> str:
        return self.provenance.name


class Outcomes(Noun, frozen=True):
    """Outcomes of sealed rows, made public: the text of each by the line of its row, and the salt of their seals."""

    dataset: str
    salt: str
    outcomes: dict[str, str]
    schema: str = OUTCOMES_SCHEMA

    def __post_init__(self) -> None:
        _check_salt(self.salt)


def _check_salt(salt: str) -> None:
    if len(salt) < _LEAST_SALT:
        raise ConfigError(
            f"a salt of {len(salt)} characters",
            allowed=f"{_LEAST_SALT} or more",
            remedy="make one: openssl rand -hex 32",
        )


def seal(salt: str, dataset: str, line: int, outcome: str) -> str:
    """Return what stands in place of an outcome until it is published.

    It is the SHA-256 of ``salt|dataset|line|outcome`` in UTF-8, after ``sha256:``; ``outcome`` is the text of the cell.
    Times have few digits, so only a salt that nobody can guess hides them. Raises ``ConfigError``.
    """
    _check_salt(salt)
    return "sha256:" + hashlib.sha256(f"{salt}|{dataset}|{line}|{outcome}".encode()).hexdigest()


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

    Raises ``FileFormatError`` with the line for columns in another order, for a number that is none, for an outcome
    that is not above 0, and for devices, a layout, a size or a local batch that cannot be.
    """
    provenance = codec.read(path, Provenance, _SET, SCHEMA)
    if provenance.name != path.stem:
        raise FileFormatError(f"{path}: the name is {provenance.name!r}", allowed=f"{path.stem!r}, that of the file")
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
    sealed = _SEALED.fullmatch(texts[provenance.outcome])
    outcome = None if sealed else _outcome(where, provenance, texts[provenance.outcome])
    values: dict[str, Any] = {
        name: texts[name] if column.unit in ("name", "text") else _value(where, name, texts[name], column)
        for name, column in provenance.columns.items()
        if name != provenance.outcome and texts[name]
    }
    for name in _COUNTS:
        if name in texts and not (isinstance(values.get(name), int) and values[name] >= 1):
            raise FileFormatError(f"{where}: {name} is {texts[name]!r}", allowed="a whole number of 1 or more")
    if "layout" in values and "devices" in values:
        try:
            check_layout(str(values["layout"]), values["devices"])
        except ConfigError as error:
            raise FileFormatError(f"{where}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error
    return PublishedRow(line=line, values=values, outcome=outcome, seal=sealed[0] if sealed else "")


def _value(where: str, name: str, text: str, column: PublishedColumn) -> float:
    """Return the number of a cell: a count has to be a whole one, and bytes are where they can."""
    value = _number(where, name, text)
    whole = value.is_integer()
    if column.unit == "count" and not whole:
        raise FileFormatError(f"{where}: {name} is {text}", allowed="a whole number")
    return int(value) if whole and column.unit in ("count", "bytes") else value


def _outcome(where: str, provenance: Provenance, text: str) -> float:
    value = _number(where, provenance.outcome, text)
    if not (math.isfinite(value) and value > 0):
        raise FileFormatError(f"{where}: {provenance.outcome} is {value}", allowed="a finite number above 0")
    return value


def _number(where: str, name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError as error:
        raise FileFormatError(f"{where}: {name} is {text!r}", allowed="a number") from error
    if math.isnan(value):
        raise FileFormatError(f"{where}: {name} is {text!r}", allowed="a number")
    return value


def opened(sets: Mapping[str, PublishedSet], path: Path) -> dict[str, PublishedSet]:
    """Return the sets with the outcomes that a file makes public, each of which has to fit its seal.

    Raises ``FileFormatError`` for a set that does not exist, a row that is not sealed, and an outcome of another seal.
    """
    public = codec.read(path, Outcomes, "outcomes", OUTCOMES_SCHEMA)
    if public.dataset not in sets:
        raise FileFormatError(f"{path} has outcomes of {public.dataset!r}", allowed=", ".join(sets))
    published = sets[public.dataset]
    by_line = {str(row.line): row for row in published.rows if row.seal}
    for line, text in public.outcomes.items():
        where = f"{path}: the outcome of line {line}"
        if line not in by_line:
            raise FileFormatError(f"{where} was not sealed", allowed=", ".join(by_line) or "no line of this set")
        if seal(public.salt, published.name, int(line), text) != by_line[line].seal:
            raise FileFormatError(
                f"{where} is {text!r}, which has another seal than the set",
                allowed="the sealed text and salt, unchanged",
                remedy="ask who sealed it: the outcome or its salt was changed",
            )
    numbers = {line: _outcome(str(path), published.provenance, text) for line, text in public.outcomes.items()}
    rows = tuple(replace(row, outcome=numbers.get(str(row.line), row.outcome)) for row in published.rows)
    return {**sets, published.name: replace(published, rows=rows)}
