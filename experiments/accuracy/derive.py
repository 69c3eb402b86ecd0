"""The table, the page and the picture of accuracy, derived from the records in its folder. Nothing is measured."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dpsim import codec
from dpsim.experiments import emulation, waiting
from dpsim.experiments.accuracy import store
from dpsim.experiments.accuracy.lines import Line, emulation_lines, lines, waiting_lines
from dpsim.experiments.accuracy.page import FIGURE, content, write_page
from dpsim.experiments.accuracy.quality import quality_lines
from dpsim.experiments.accuracy.table import markdown, note, summary
from dpsim.harness.measurement.environment import environment
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment
from dpsim.report.content import Content

EMULATION, WAITING = "emulation.json", "waiting.json"


@dataclass(frozen=True, kw_only=True)
class Derived:
    """What was derived: the table and its short form as Markdown.

    Where sweeps have finished also what the page says, and the files written for it.
    """

    table: str
    summary: str
    content: Content | None
    written: tuple[Path, ...]


def derive(folder: Path, experiments: Sequence[Experiment]) -> Derived | None:
    """Write ``report.md``, and where sweeps have finished the page and its picture; returns None without any record.

    Raises ``ConfigError`` and ``FileFormatError``.
    """
    comparisons = dict(store.finished(experiments, folder / "sweeps"))
    measured = (
        *lines(comparisons),
        *_emulation(folder / EMULATION),
        *_waiting(folder / WAITING),
        *quality_lines(folder / "quality"),
    )
    if not measured:
        return None
    finished = f"; {len(comparisons)} of {len(experiments)} sweeps have finished"
    processor = _processor(comparisons)
    table = markdown(measured, processor, finished)
    picture = f"![Predicted against measured step time]({FIGURE}.svg)\n\n" if comparisons else ""
    short = summary(measured)
    codec.write_text(folder / "report.md", f"# How right the predictions are\n\n{picture}{short}\n\n{table}\n")
    if not comparisons:
        return Derived(table=table, summary=short, content=None, written=())
    of_page = comparisons, measured, processor, note(measured, processor, finished)
    return Derived(table=table, summary=short, content=content(*of_page), written=tuple(write_page(folder, *of_page)))


def _emulation(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from emulation_lines(codec.read(path, emulation.EmulationRecord, "record of emulation", emulation.SCHEMA))


def _waiting(path: Path) -> Iterator[Line]:
    if path.exists():
        yield from waiting_lines(codec.read(path, waiting.WaitingRecord, "record of waiting", waiting.SCHEMA))


def _processor(comparisons: dict[str, Comparison]) -> str:
    """The processors on which the sweeps ran."""
    calibrated = {point.calibrated_on.split(",")[0] for each in comparisons.values() for point in each.points}
    return " and ".join(sorted(calibrated - {""})) or environment().processor
