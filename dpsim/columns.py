"""``Column``: what a column of a table of results holds, and how it is computed. ``Row``: a row of such a table.

A column is declared once: in the class of its rows (``error = Column("ratio", "The error ...", lambda row: ...)``), on
the field of a struct (``devices: Annotated[int, Column("count", "...")]``), or by name in a list. JSON, CSV, Parquet,
the tables of reports and ``docs/results.md`` follow from it.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, Self, TypeVar, cast, get_args, get_type_hints, overload

import msgspec

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
Form = Literal[
    "",
    "ms",
    "percent",
    "signed percent",
    "times",
    "digits",
    "four digits",
    "duration",
    "size",
    "threshold",
    "memory",
    "short",
]
"""How tables of reports write a value (``dpsim.report.words.FORMS``); without a form it is written as it is."""
_DTYPES: dict[Unit, ColumnDtype] = {"count": "int64", "yes or no": "boolean", "name": "category", "text": "string"}
"""The pandas data types of units; other units are float64."""
_SUFFIXES: tuple[tuple[str, Unit], ...] = (
    ("_bytes_per_s", "bytes/s"),
    ("_per_s", "1/s"),
    ("_bytes", "bytes"),
    ("_s", "s"),
)
_ANY = ".*"
R = TypeVar("R")
if TYPE_CHECKING:
    import typing_extensions

    T = typing_extensions.TypeVar("T", default=Any)
else:
    T = TypeVar("T")


class Column(Generic[R, T]):
    """A column: its ``unit``, what it means in a sentence, and how its value follows from a row (``of``).

    A table of a report has it under ``head`` and shows the text ``cell`` of a row; the value is written as ``form``
    says. Numbers are aligned right, texts with ``left`` to the left. Where there is little room the columns with the
    highest ``dispensable`` are left out first, those with 0 never. With ``shown`` false it is left out everywhere.

    As an attribute of a ``Row`` it has the attribute's name, and its value is computed when it is first asked for.
    Without ``of`` the value is given. ``dtype`` is the pandas data type where it is not that of the unit; ``Int64`` are
    whole numbers of which some may be missing. The value may be a dictionary (``each``): the name then ends in ``.*``
    and stands for a column of each name that the rows have there, in alphabetical order. A name that states a unit
    (``_s``) must have that unit.
    """

    def __init__(
        self,
        unit: Unit = "text",
        text: str = "",
        of: Callable[[R], T] | None = None,
        *,
        dtype: ColumnDtype | None = None,
        each: bool = False,
        head: str = "",
        form: Form = "",
        cell: Callable[[R], str] = str,
        left: bool = False,
        dispensable: int = 0,
        shown: bool = True,
    ) -> None:
        self.name, self.unit, self.text, self.of, self._each = "", unit, text, of, each
        self.head, self.form, self.cell = head, form, cell
        self.left, self.dispensable, self.shown = left, dispensable, shown
        self.dtype = dtype or _DTYPES.get(unit, "float64")

    def __set_name__(self, owner: type[Any], name: str) -> None:
        if self.unit not in get_args(Unit):
            raise ConfigError(f"column {name} in {self.unit!r}", allowed=", ".join(UNITS))
        unit = next((unit for suffix, unit in _SUFFIXES if name.removesuffix(_ANY).endswith(suffix)), self.unit)
        if unit != self.unit:
            raise ConfigError(f"column {name} in {self.unit}", allowed=f"{unit}, as its name says")
        self.attribute, self.name = name, name + _ANY * self._each

    def named(self, name: str) -> Self:
        """Return the same column under another name."""
        named = copy.copy(self)
        named.__set_name__(type(None), name)
        return named

    def in_table(self, cell: Callable[[R], str], **shown: Any) -> Self:
        """Return the same column as a table has it: with a ``cell``, and other attributes that say how it is shown."""
        column = copy.copy(self)
        vars(column).update(shown, cell=cell)
        return column

    @property
    def prefix(self) -> str:
        """What the names of the columns begin with that this one stands for; empty for a column of one name."""
        return self.name.removesuffix("*") if self.name.endswith(_ANY) else ""

    @overload
    def __get__(self, row: None, owner: type[Any]) -> Self: ...
    @overload
    def __get__(self, row: R, owner: type[Any]) -> T: ...
    def __get__(self, row: R | None, owner: type[Any]) -> T | Self:
        if row is None:
            return self
        if self.of is None:
            raise AttributeError(f"the column {self.name} of {owner.__name__} was not given")
        value = self.of(row)
        vars(row)[self.attribute] = value
        return value


AnyColumn = Column[Any, Any]


class Row:
    """A row of a table, made of what is ``given``: its sources, and columns that are not computed from them.

    A column may be given that could be computed; others are then computed from the value that was given.
    """

    def __init__(self, **values: Any) -> None:
        if unknown := values.keys() - type(self).__annotations__.keys() - columns_of(type(self)).keys():
            raise TypeError(f"{type(self).__name__} has no {', '.join(sorted(unknown))}")
        self._given = values
        vars(self).update(values)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, type(self)) and self.values() == other.values()

    def replaced(self, **values: Any) -> Self:
        """Return the row with other values; what is computed from them is computed again."""
        return type(self)(**self._given | values)

    def values(self) -> dict[str, Any]:
        """Return the value of each column by its name."""
        return {name: getattr(self, name) for name in columns_of(type(self))}


def column(name: str, unit: Unit, text: str, dtype: ColumnDtype | None = None) -> AnyColumn:
    """Return a column of a list."""
    return AnyColumn(unit, text, dtype=dtype).named(name)


def nested(kind: type[msgspec.Struct], name: str) -> tuple[AnyColumn, ...]:
    """Return the columns of the fields of a nested object ``name``, which may be missing, so that numbers may be."""
    columns = [each.named(f"{name}.{field}") for field, each in columns_of(kind).items()]
    for each in columns:
        each.dtype = "Int64" if each.dtype == "int64" else each.dtype
    return tuple(columns)


def columns_of(kind: type[Row | msgspec.Struct]) -> dict[str, AnyColumn]:
    """Return the columns that a class declares, by its attributes: those of a row, or on the fields of a struct."""
    return _columns_of(cast(Any, kind))  # mypy takes a class whose objects have no hash for one without


@functools.cache
def _columns_of(kind: type[Any]) -> dict[str, AnyColumn]:
    if issubclass(kind, Row):
        return {name: item for name, item in vars(kind).items() if isinstance(item, Column)}
    hints = get_type_hints(kind, include_extras=True)
    return {
        written: item.named(written)
        for name, written in zip(kind.__struct_fields__, kind.__struct_encode_fields__, strict=True)
        for item in getattr(hints[name], "__metadata__", ())
        if isinstance(item, Column)
    }
