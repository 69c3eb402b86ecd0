"""Cases that are measured one after the other, each by ranks of its own, and the record of all their samples."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import FileFormatError
from dpsim.records.sweep import Environment
from dpsim.study.environment import environment, stamp
from dpsim.study.statistics import Interval, median_ratio

Case = TypeVar("Case", bound=Noun)
Samples = Mapping[str, Sequence[float]]


class Measured(Noun, Generic[Case], frozen=True):
    """A case, and what was measured of it, by name: times in seconds, those of one round at one index."""

    case: Case
    samples: dict[str, tuple[float, ...]]

    def ratio(self, name: str, base: str) -> Interval:
        """Return the ratio of the medians of two kinds of samples, with its 95 % interval over paired rounds."""
        return median_ratio(self.samples[name], self.samples[base])


class Record(Noun, Generic[Case], frozen=True):
    """All cases of one run."""

    environment: Environment
    measured_from: str
    measured_until: str
    measured: tuple[Measured[Case], ...]
    schema: str


def measure(
    schema: str,
    cases: Iterable[Case],
    of_case: Callable[[Case], Samples],
    done: Callable[[Measured[Case]], object] = lambda measured: None,
) -> Record[Case]:
    """Return the record of all cases. ``of_case`` measures one; ``done`` gets each as soon as it is measured."""
    begun, measured = stamp(), []
    for case in cases:
        samples = {name: tuple(values) for name, values in of_case(case).items()}
        measured.append(Measured(case=case, samples=samples))
        done(measured[-1])
    return Record(
        environment=environment(),
        measured_from=begun,
        measured_until=stamp(),
        measured=tuple(measured),
        schema=schema,
    )


def read(path: Path, kind: Any, what: str, schema: str, names: Collection[str]) -> Any:
    """Read a record, ``kind`` being ``Record[...]``; every case must have samples of these names.

    Raises ``FileFormatError``.
    """
    record = codec.read(path, kind, what, schema)
    for number, each in enumerate(record.measured):
        if missing := sorted({*names} - each.samples.keys()):
            raise FileFormatError(
                f"{path}: case {number} of the {what} has no samples {', '.join(missing)}",
                allowed=f"samples of {', '.join(names)}",
                remedy="measure it again",
            )
    return record
