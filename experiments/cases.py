"""Cases that are measured one after the other, each by ranks of its own, and the record of all their samples."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from dpsim import codec
from dpsim.codec import Noun
from dpsim.dates import stamp
from dpsim.errors import FileFormatError
from dpsim.launch.jobs import on_ranks
from dpsim.progress import Progress, no_progress
from dpsim.records.sweep import Environment
from dpsim.study.environment import environment
from dpsim.study.rows import rounded

SCHEMA = "dpsim.cases/2"
Case = TypeVar("Case", bound=Noun)


class Measured(Noun, Generic[Case], frozen=True):
    """A case, and what was measured of it, by name: times in seconds, those of one round at one index."""

    case: Case
    samples: dict[str, tuple[float, ...]]


class Record(Noun, Generic[Case], frozen=True):
    """All cases of one run."""

    environment: Environment
    measured_from: str
    measured_until: str
    measured: tuple[Measured[Case], ...]
    schema: str = SCHEMA


@dataclass(frozen=True, kw_only=True)
class Study(Generic[Case]):
    """An experiment on ranks: a ``task`` (``module:function``) gets a case, and returns its samples by name.

    A case has ``devices`` and a ``title``. ``record`` is ``Record[...]`` of its cases, and all have ``samples``.
    """

    name: str
    record: Any
    samples: tuple[str, ...]
    task: str
    pin: bool = True

    def measure(self, cases: Iterable[Any], progress: Progress = no_progress) -> Record[Case]:
        """Measure cases, each in a job of its own, whose task gets ``case`` in plain types. Raises ``DpsimError``."""
        begun, measured = stamp(), []
        for case in cases:
            progress(case.title)
            argument = {"case": codec.to_builtins(case)}
            taken = on_ranks(self.task, argument, devices=case.devices, pin=self.pin)
            measured.append(Measured(case=case, samples={name: rounded(values) for name, values in taken.items()}))
        return Record(environment=environment(), measured_from=begun, measured_until=stamp(), measured=tuple(measured))

    def read(self, path: Path) -> Record[Case]:
        """Read a record. Raises ``FileFormatError``."""
        what = f"record of {self.name}"
        record: Record[Case] = codec.read(path, self.record, what, SCHEMA)
        for number, each in enumerate(record.measured):
            if missing := sorted({*self.samples} - each.samples.keys()):
                raise FileFormatError(
                    f"{path}: case {number} of the {what} has no samples {', '.join(missing)}",
                    allowed=f"samples of {', '.join(self.samples)}",
                    remedy="measure it again",
                )
        return record
