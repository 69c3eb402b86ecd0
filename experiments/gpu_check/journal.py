"""The record of a run while the run goes on: it is written as each part ends and whenever one makes progress.

Parts leave their samples in files of their own (``keep``), so that a part that is killed loses what it measures at that
moment, and no more.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from dpsim import codec
from dpsim.experiments.command import tell
from dpsim.experiments.gpu_check.record import (
    GpuCheck,
    Gpus,
    Probe,
    Samples,
    Summary,
    Tests,
    Training,
    derived,
    file_name,
)
from dpsim.records.sweep import Environment

TRAININGS = "*.trainings"
"""The files of parts that leave trainings; the others leave samples."""

NOT_RUN = Tests(passed=False, line="not run")
Kept = TypeVar("Kept", Samples, Training)


def keep(path: Path, samples: Iterable[Samples | Training]) -> None:
    """Append samples to the file of a part, one in a line."""
    with path.open("a", encoding="utf-8") as file:
        file.write("".join(codec.to_json(each, indent=None) + "\n" for each in samples))


def kept_in(path: Path, kind: type[Kept]) -> tuple[Kept, ...]:
    """Read the samples of a kind in the file of a part. A last line that was cut off is not counted."""
    if not path.exists():
        return ()
    lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
    whole = [line for line in lines if line.endswith("\n")]
    return tuple(codec.decode(codec.parse_json(line), kind, "samples") for line in whole)


@dataclass(kw_only=True)
class Journal:
    """A run. Its record goes into ``folder``, its parts leave samples in ``parts``; ``begin_s``: ``time.monotonic``.

    ``share``: of the time that each part takes where nobody is in a hurry.
    """

    folder: Path
    parts: Path
    taken_at: str
    begin_s: float
    environment: Environment
    gpus: Gpus
    share: float = 1.0
    probes: list[Probe] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    wrong_versions: list[str] = field(default_factory=list)
    """Versions of the allreduce that failed on logical devices: nothing else runs them."""
    tests: Tests = NOT_RUN
    running: str = ""

    @property
    def elapsed_s(self) -> float:
        """Seconds since the run began."""
        return time.monotonic() - self.begin_s

    @property
    def path(self) -> Path:
        """The file of the record."""
        return self.folder / file_name(self.record())

    def fails(self, name: str) -> bool:
        """Return whether a library was probed and does not work."""
        return any(probe.name == name and not probe.works for probe in self.probes)

    def record(self) -> GpuCheck:
        """Return the record of what there is by now."""
        summary = Summary(
            seconds=self.elapsed_s, left_out=tuple(self.left_out), failed=tuple(self.failed), running=self.running
        )
        record = GpuCheck(
            taken_at=self.taken_at,
            environment=self.environment,
            gpus=self.gpus,
            tests=self.tests,
            samples=self._kept("*.jsonl", Samples),
            summary=summary,
            probes=tuple(self.probes),
            trainings=self._kept(TRAININGS, Training),
        )
        return derived(record)

    def _kept(self, files: str, kind: type[Kept]) -> tuple[Kept, ...]:
        return tuple(each for path in sorted(self.parts.glob(files)) for each in kept_in(path, kind))

    def write(self) -> GpuCheck:
        """Write the record; what was written."""
        record = self.record()
        codec.write(self.folder / file_name(record), record)
        return record

    def progress(self, text: str) -> None:
        """Tell the user what is measured next, and write what has been measured."""
        tell(text)
        self.write()

    def probed(self, probe: Probe) -> None:
        """Keep what was found out about a library, tell the user, and write it."""
        self.probes.append(probe)
        self.progress(probe.line)

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Name a part of the run in the record until it has ended."""
        self.running = name
        self.write()
        yield
        self.running = ""
        self.write()
