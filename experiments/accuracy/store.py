"""Runs the sweeps of ``make accuracy`` one by one, and keeps each finished one with all its raw samples."""

from __future__ import annotations

import lzma
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from dpsim import codec
from dpsim.codec import Noun
from dpsim.errors import DpsimError, FileFormatError
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.sweep import measure
from dpsim.progress import Progress
from dpsim.records.comparison import Comparison
from dpsim.records.sweep import Experiment, Predictions, Results

SUFFIX = ".json.xz"


class Swept(Noun, frozen=True):
    """A finished sweep: its predictions, and the results with the hash of these predictions."""

    predictions: Predictions
    results: Results
    schema: str = "dpsim.swept/1"


def run(experiments: Sequence[Experiment], folder: Path, progress: Progress) -> None:
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
            predictions, results = measure(experiment, working, progress)
        except DpsimError as error:
            progress(f"{experiment.name} is left out: {error}")
            continue
        keep(path, predictions, results)
        shutil.rmtree(working)


def keep(path: Path, predictions: Predictions, results: Results) -> None:
    """Write the record of a finished sweep."""
    text = codec.to_json(Swept(predictions=predictions, results=results), indent=None)
    codec.write_output(path, lzma.compress(text.encode()))


def finished(experiments: Sequence[Experiment], folder: Path) -> Iterator[tuple[str, Comparison]]:
    """The name and the comparison of every finished experiment. Raises ``FileFormatError`` for a damaged record."""
    for experiment in experiments:
        path = folder / f"{experiment.name}{SUFFIX}"
        if path.exists():
            swept = read(path)
            yield experiment.name, compare(swept.predictions, swept.results)


def read(path: Path) -> Swept:
    """Read the record of a finished sweep. Raises ``FileFormatError``."""
    try:
        raw = codec.parse_json(lzma.decompress(path.read_bytes()).decode())
    except (OSError, ValueError, EOFError, lzma.LZMAError) as error:
        raise FileFormatError(
            f"the record {path} cannot be read: {error}",
            allowed="a record as `make accuracy` writes it",
            remedy="delete it: the sweep is then run again",
        ) from error
    return codec.decode(raw, Swept, "record of a sweep")
