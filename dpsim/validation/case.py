"""Cases: what of a published set is known, what is predicted from it, and how, declared in a TOML file."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import ConfigError, FileFormatError, unknown
from dpsim.grouping import grouped
from dpsim.plan import Plan
from dpsim.validation.published import FOLDER, PublishedRow, PublishedSet

SCHEMA = "dpsim.case/1"
COMPUTE = "compute"
FREE_FIELDS = {
    "workload": ("update_s", "overhead_s", "overhead_per_sample_s", "input_s_per_sample"),
    "link": (
        "latency_s",
        "bandwidth_bytes_per_s",
        "reduce_s_per_byte",
        "message_overhead_s",
        "bucket_overhead_s",
    ),
}
"""The fields that may be free, of a workload and of a link, beside the factor ``compute`` on all computing times."""
Quantity = Literal["collective", "step"]
Role = Literal["development", "held out"]


class ModelInputs(Noun, frozen=True):
    """A workload: the file of a ``profile``, fitted to what is published of the model.

    ``tensors`` multiplies the sizes of all gradient tensors. ``forward_s`` and ``backward_s`` are what all layers
    together take, where they are published; without them the profile's times stand, and may be free (``compute``).
    ``fields`` are other fields of a workload.
    """

    profile: str
    tensors: float = 1.0
    forward_s: float | None = None
    backward_s: float | None = None
    fields: dict[str, Any] = msgspec.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("tensors", "forward_s", "backward_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise ConfigError(f"{name} of a model is {value}", allowed="a finite number >= 0")


class MachineInputs(Noun, frozen=True):
    """A machine: the tables of the known rows, or of ``tables_of`` (another set), or a ``file`` by its name, or none.

    ``fields`` are fields of a machine in place of those, and ``source`` says where they come from.
    """

    source: str = ""
    file: str = ""
    tables_of: str = ""
    fields: dict[str, Any] = msgspec.field(default_factory=dict)


class Case(Noun, frozen=True):
    """One question about a set, asked of each of its systems and once for each part that is held out.

    - ``where`` keeps the rows that have one of the values listed for a column.
    - Rows that differ in a column of ``apart`` are of different systems: nothing known of one is known of another.
    - ``known`` rows of a system are inputs in each part and never judged. The others fall into parts by the columns of
      ``hold_out`` (none: one part). What is judged is one part; the rest is known too, unless ``only_known``.
    - A collective is predicted from the tables of the known rows. A step is predicted from the model of the row's
      ``model``, the machine of its ``system``, or of ``""`` where there is no such entry.
    - ``plan`` are fields of ``dpsim.Plan`` that all rows share. Columns with the names of such fields are each row's.
    - ``free`` are numbers that are fitted to the known rows, from these values on: ``compute`` (a factor on all
      computing times), a field of the workload (``workload.update_s``) or of a link (``link.latency_s``).
    - ``nulls`` are the names of those that it is scored against (``dpsim.validation.contestants``; none: all).
    """

    name: str
    dataset: str
    quantity: Quantity
    question: str
    apart: tuple[str, ...] = ()
    where: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    known: dict[str, tuple[Any, ...]] = msgspec.field(default_factory=dict)
    only_known: bool = False
    hold_out: tuple[str, ...] = ()
    plan: dict[str, Any] = msgspec.field(default_factory=dict)
    models: dict[str, ModelInputs] = msgspec.field(default_factory=dict)
    machines: dict[str, MachineInputs] = msgspec.field(default_factory=dict)
    free: dict[str, float] = msgspec.field(default_factory=dict)
    nulls: tuple[str, ...] = ()
    assumptions: tuple[str, ...] = ()
    role: Role = "development"
    schema: str = SCHEMA

    def __post_init__(self) -> None:
        if self.quantity == "step" and not (self.models and self.machines):
            raise ConfigError(f"case {self.name!r} predicts steps without models or machines", allowed="both")
        if not self.known and not self.hold_out:
            raise ConfigError(f"case {self.name!r} knows nothing of its set", allowed="known or hold_out, or both")
        for name, value in self.free.items():
            kind, _, field = name.partition(".")
            if name != COMPUTE and field not in FREE_FIELDS.get(kind, ()):
                raise unknown(
                    "free number", name, (COMPUTE, *(f"{k}.{f}" for k, of in FREE_FIELDS.items() for f in of))
                )
            if not 0 < value < math.inf:
                raise ConfigError(f"the free number {name} begins at {value}", allowed="a finite number above 0")
        if self.quantity == "collective" and self.free:
            raise ConfigError(
                f"case {self.name!r} of collectives has free numbers: {', '.join(self.free)}",
                allowed="free numbers in cases of steps",
                remedy="leave them out: a collective is predicted from the tables of the known rows",
            )


@dataclass(frozen=True, kw_only=True)
class Part:
    """What one prediction knows, and the rows that it is judged on."""

    case: Case
    dataset: str
    name: str
    known: tuple[PublishedRow, ...]
    judged: tuple[PublishedRow, ...]


def read_cases(sets: Mapping[str, PublishedSet], folder: Path = FOLDER) -> tuple[Case, ...]:
    """Read the cases of ``folder/cases``. Raises ``FileFormatError`` for one whose set or columns do not exist."""
    cases = list[Case]()
    for path in sorted((folder / "cases").glob("*.toml")):
        case = codec.read(path, Case, "case", SCHEMA)
        try:
            _check(case, sets)
            if case.name in (other.name for other in cases):
                raise ConfigError(f"a second case {case.name!r}", allowed="a name for each case")
        except ConfigError as error:
            raise FileFormatError(f"{path}: {error.given}", allowed=error.allowed, remedy=error.remedy) from error
        cases.append(case)
    if not cases:
        raise FileFormatError(
            f"{folder} has no cases", allowed="one or more files cases/NAME.toml", remedy="see docs/validate.md"
        )
    return tuple(cases)


def _check(case: Case, sets: Mapping[str, PublishedSet]) -> None:
    """Raise ``ConfigError`` where a case names a set, a column, a value or a field that does not exist."""
    chosen = (*case.where.items(), *case.known.items())
    _require("dataset", [case.dataset], sets)
    columns, rows = sets[case.dataset].provenance.columns, sets[case.dataset].rows
    _require("column", (*case.apart, *case.hold_out, *(name for name, _ in chosen)), columns)
    _require("field of a plan", case.plan, Plan.__struct_fields__)
    needed = {"devices", "size_bytes"} if case.quantity == "collective" else {"devices"}
    if missing := sorted(needed - columns.keys()):
        raise ConfigError(
            f"the set {case.dataset} has no column {', '.join(missing)}",
            allowed=f"a set of {case.quantity}s, with the columns {', '.join(sorted(needed))}",
        )
    for name, values in chosen:
        there = dict.fromkeys(row.values[name] for row in rows if name in row.values)
        if missing := [value for value in values if value not in there]:
            raise ConfigError(
                f"no row of {case.dataset} has {missing[0]!r} in the column {name}",
                allowed=", ".join(map(repr, there)),
            )


def _require(what: str, names: Iterable[str], allowed: Collection[str]) -> None:
    for name in names:
        if name not in allowed:
            raise unknown(what, name, allowed)


def parts(case: Case, published: PublishedSet, *, undivided: bool = False) -> Iterator[Part]:
    """Yield the parts of a case. A part's name tells the values of its columns. Raises ``ConfigError`` for none.

    With ``undivided`` a system is one part that knows what it is judged on, unless ``only_known``: good for estimating
    what other sets are predicted with, never for a score.
    """
    rows = [row for row in published.rows if _one_of(row, case.where)]
    any_part = False
    for system, of_system in _grouped(rows, case.apart).items():
        always_known = [row for row in of_system if case.known and _one_of(row, case.known)]
        others = [row for row in of_system if row not in always_known]
        columns = () if undivided else case.hold_out
        for held_out, judged in _grouped(others, columns).items():
            rest = [] if case.only_known else [row for row in others if undivided or row not in judged]
            known_rows = (*always_known, *rest)
            if not known_rows:
                continue
            any_part = True
            words = [f"{column} {value}" for column, value in zip(columns, held_out, strict=True)]
            name = "/".join((case.name, *(str(value) for value in system), *words))
            yield Part(case=case, dataset=published.name, name=name, known=known_rows, judged=tuple(judged))
    if not any_part:
        raise ConfigError(f"case {case.name!r} has no rows to judge", allowed="rows beside those that are known")


def _one_of(row: PublishedRow, values: Mapping[str, Sequence[Any]]) -> bool:
    return all(row.values.get(name, "") in allowed for name, allowed in values.items())


def _grouped(rows: Sequence[PublishedRow], columns: Sequence[str]) -> dict[tuple[Any, ...], list[PublishedRow]]:
    return grouped(rows, lambda row: tuple(row.values.get(column, "") for column in columns))
