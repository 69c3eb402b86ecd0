"""The records of ``make accuracy``, and the table, the page and the picture that are derived from them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from dpsim import codec
from dpsim.errors import ConfigError, DpsimError
from dpsim.experiments import emulation, waiting
from dpsim.experiments.accuracy.lines import emulation_line, lines, quality_lines, waiting_line
from dpsim.experiments.accuracy.page import FIGURE, markdown, note, summary, write_page
from dpsim.harness.quality.study import read_results
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.coverage import residuals
from dpsim.harness.sweep.experiment import predict_from
from dpsim.harness.sweep.packed import SUFFIX, Swept, keep, read
from dpsim.harness.sweep.sweep import Study
from dpsim.model.residuals import Residuals
from dpsim.progress import Progress
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment
from dpsim.report.content import Content
from dpsim.study.environment import environment
from dpsim.study.inputs import SCHEMA, Inputs


def run_sweeps(experiments: Sequence[Experiment], folder: Path, progress: Progress) -> None:
    """Run the experiments that the folder does not have yet. What is interrupted goes on where it stopped.

    One that fails, such as a machine too busy to emulate computation, is named and left out; it is tried again by the
    next run.
    """
    for number, experiment in enumerate(experiments, 1):
        path = folder / f"{experiment.name}{SUFFIX}"
        if path.exists():
            continue
        progress(f"{number} of {len(experiments)}: {experiment.name}")
        working = folder / f"{experiment.name}.running"
        try:
            swept = Study.of(experiment).run(working, progress, times_alone=True)
            inputs = codec.read(working / "inputs.json", Inputs, "inputs", SCHEMA)
        except DpsimError as error:
            progress(f"{experiment.name} is left out: {error}")
            continue
        keep(path, Swept(predictions=swept.predictions, results=swept.results, blind=swept.blind, inputs=inputs))
        shutil.rmtree(working)


def finished(experiments: Sequence[Experiment], folder: Path) -> Iterator[tuple[str, Comparison]]:
    """Yield name and comparison of every finished experiment. Raises ``FileFormatError`` for a damaged record."""
    for experiment in experiments:
        path = folder / f"{experiment.name}{SUFFIX}"
        if path.exists():
            swept = read(path)
            yield experiment.name, compare(swept.predictions, swept.results, blind=swept.blind)


def predicted_again(swept: Swept) -> Comparison:
    """Compare a finished sweep with what the present model predicts from its profiles and calibrations.

    The predictions in the record may be of an earlier version of the model.
    """
    assert swept.inputs is not None
    again = predict_from(swept.predictions, swept.inputs, same_minutes=False)
    beforehand = msgspec.structs.replace(again, predicted_at=swept.predictions.predicted_at)
    results = msgspec.structs.replace(swept.results, predictions_sha256=codec.digest(beforehand))
    return compare(beforehand, results, blind=predict_from(swept.predictions, swept.inputs, same_minutes=True))


def write_residuals(path: Path, experiments: Sequence[Experiment], folder: Path) -> None:
    """Write how far off the present model is in every finished sweep: the residuals that come with dpsim.

    Raises ``ConfigError`` where no sweep has finished, ``FileFormatError`` for a damaged record.
    """
    paths = [record for each in experiments if (record := folder / f"{each.name}{SUFFIX}").exists()]
    records = [(record.name.removesuffix(SUFFIX), read(record)) for record in paths]
    if not records:
        raise ConfigError(f"{folder} has no finished sweep", allowed="a folder in which sweeps have finished")
    found = [
        msgspec.structs.replace(residual, study=name, measured_until="")
        for name, swept in records
        for residual in residuals(predicted_again(swept))
    ]
    processors = dict.fromkeys(swept.results.environment.processor for _, swept in records)
    codec.write_record(path, Residuals(measured_on=" and ".join(processors), residuals=tuple(found)))


class Derived(NamedTuple):
    """What was derived: the table and its short form as Markdown.

    Where sweeps have finished also what the page says, and the files written for it.
    """

    table: str
    summary: str
    content: Content | None = None
    written: Sequence[Path] = ()


def derive(folder: Path, experiments: Sequence[Experiment]) -> Derived | None:
    """Write ``report.md``, and where sweeps have finished the page and its picture; returns None without any record.

    Raises ``ConfigError`` and ``FileFormatError``.
    """
    comparisons = dict(finished(experiments, folder / "sweeps"))
    measured = [*lines(comparisons)]
    if (path := folder / "emulation.json").exists():
        measured.append(emulation_line(emulation.STUDY.read(path)))
    if (path := folder / "waiting.json").exists():
        measured.append(waiting_line(waiting.STUDY.read(path)))
    if (quality := read_results(folder / "quality")) is not None:
        measured += quality_lines(quality)
    if not measured:
        return None
    calibrated = {point.calibrated_on.split(",")[0] for each in comparisons.values() for point in each.points}
    processor = " and ".join(sorted(calibrated - {""})) or environment().processor
    text = note(measured, processor, f"; {len(comparisons)} of {len(experiments)} sweeps have finished")
    table, short = markdown(measured, text), summary(measured)
    picture = f"![Predicted against measured step time]({FIGURE}.svg)\n\n" if comparisons else ""
    codec.write_text(folder / "report.md", f"# How right the predictions are\n\n{picture}{short}\n\n{table}\n")
    page = write_page(folder, comparisons, measured, processor, text) if comparisons else ()
    return Derived(table, short, *page)
