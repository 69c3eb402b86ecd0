"""``Column``: what one column of a table of results holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from dpsim.errors import ConfigError

ColumnDtype = Literal["int64", "Int64", "float64", "boolean", "category", "string"]
Unit = Literal["s", "bytes", "bytes/s", "1/s", "ratio", "count", "yes or no", "name", "text"]
UNITS: dict[Unit, str] = {
    "s": "seconds",
    "bytes": "bytes, not bits",
    "bytes/s": "bytes per second",
    "1/s": "how many in a second",
    "ratio": "a number without a unit, such as 0.05 for 5 %",
    "count": "how many there are, or a number that counts from 0 or 1, as the text says",
    "yes or no": "true or false",
    "name": "a word from a small set",
    "text": "any text",
}
"""The units, and what each means."""
_SUFFIXES: tuple[tuple[str, Unit], ...] = (
    ("_bytes_per_s", "bytes/s"),
    ("_per_s", "1/s"),
    ("_bytes", "bytes"),
    ("_s", "s"),
)
_ANY = ".*"


@dataclass(frozen=True)
class Column:
    """A column: its ``name``, pandas data type, unit, and what it means in a sentence.

    ``Int64`` are whole numbers of which some may be missing. A name that ends in ``.*`` stands for a column of each
    name that the points have there, in alphabetical order. A name that states a unit (``_s``) must have that unit.
    """

    name: str
    dtype: ColumnDtype
    unit: Unit
    text: str

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ConfigError(f"column {self.name} in {self.unit!r}", allowed=", ".join(UNITS))
        stated = next((unit for suffix, unit in _SUFFIXES if self.name.removesuffix(_ANY).endswith(suffix)), self.unit)
        if stated != self.unit:
            raise ConfigError(f"column {self.name} in {self.unit}", allowed=f"{stated}, as its name says")

    @property
    def prefix(self) -> str:
        """What the names of the columns begin with that this one stands for; empty for a column of one name."""
        return self.name.removesuffix("*") if self.name.endswith(_ANY) else ""
