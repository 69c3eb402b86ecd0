"""``load``: what dpsim wrote, as data."""

from __future__ import annotations

from pathlib import Path

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.bench.result import result
from dpsim.harness.quality.study import read_results as read_study_results
from dpsim.harness.sweep.compare import compare
from dpsim.harness.sweep.drift import read_drift
from dpsim.harness.sweep.quality import read_quality
from dpsim.harness.sweep.sweep import read_swept
from dpsim.records import bench, quality, reproduce, train
from dpsim.records.sweep import PREDICTIONS_SCHEMA, RESULTS_SCHEMA
from dpsim.report.saved import (
    SavedBench,
    SavedQuality,
    SavedReproduction,
    SavedResult,
    SavedSweep,
    SavedTraining,
)

_PREDICTIONS, _RESULTS = "predictions.json", "results.json"
_OF_SWEEPS = {schema.partition("/")[0] for schema in (PREDICTIONS_SCHEMA, RESULTS_SCHEMA)}
_ALLOWED = (
    "the folder of a sweep, of bench allreduce, of reproduce or of a study of quality, the record in it, or a file of "
    "train --output"
)


def load(path: Path | str) -> SavedResult:
    """Read a result of dpsim: tables with ``.frame()``, ``.samples()`` and ``.timeline()``, a figure with ``.plot()``.

    ``path`` is the folder of a sweep, of ``bench allreduce``, of ``reproduce`` or of a study of training quality, the
    record in it, or the file of ``train --output``.
    Raises ``ConfigError`` where it is something else, ``FileFormatError`` where it is damaged.
    """
    path = Path(path)
    if path.is_dir():
        return _folder(path)
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}", allowed=_ALLOWED)
    raw = codec.read_raw(path, "result")
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if isinstance(schema, str) and schema.partition("/")[0] in _OF_SWEEPS:
        return load_sweep(path.parent)
    if schema == bench.SCHEMA:
        return _bench(path)
    if schema == reproduce.SCHEMA:
        return SavedReproduction(record=reproduce.read(path))
    if schema == quality.SCHEMA:
        return _quality(path.parent)
    if schema == train.SCHEMA and "points" not in raw and raw.get("command") == "train":
        return SavedTraining(record=train.read(path))
    if schema == train.SCHEMA:
        raise ConfigError(
            f"{path} is what dpsim {raw.get('command')} prints with --json, or writes with --output",
            allowed=_ALLOWED,
            remedy="it is one JSON object, with its rows in 'points' and what holds for all in 'summary': read it with"
            " json.load",
        )
    raise ConfigError(f"{path} is not a result of dpsim: its schema is {schema!r}", allowed=_ALLOWED)


def _folder(folder: Path) -> SavedResult:
    if (folder / bench.RECORD).is_file():
        return _bench(folder / bench.RECORD)
    if (folder / reproduce.RECORD).is_file():
        return SavedReproduction(record=reproduce.read(folder))
    if (folder / _PREDICTIONS).is_file() or (folder / _RESULTS).is_file():
        return load_sweep(folder)
    if (folder / quality.RECORD).is_file():
        return _quality(folder)
    names = sorted(path.name for path in folder.iterdir())
    inside = f"it has {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else "it is empty"
    raise ConfigError(f"the folder {folder} holds no result of dpsim: {inside}", allowed=_ALLOWED)


def _bench(path: Path) -> SavedBench:
    record = bench.read(path)
    return SavedBench(record=record, result=result(record))


def _quality(folder: Path) -> SavedQuality:
    results = read_study_results(folder)
    if results is None:
        raise ConfigError(f"{folder} has no {quality.RECORD}", allowed=_ALLOWED)
    return SavedQuality(results=results)


def load_sweep(folder: Path) -> SavedSweep:
    """Read the records in the folder of a sweep, and compare them. Raises ``ConfigError`` and ``FileFormatError``."""
    if not (folder / _RESULTS).exists():
        raise ConfigError(
            f"the sweep in {folder} is unfinished: it has no {_RESULTS} yet",
            allowed="a sweep that has measured",
            remedy=f"give the command of the sweep again with --output {folder}; it goes on where it was",
        )
    swept = read_swept(folder)
    predictions, results = swept.predictions, swept.results
    drift = read_drift(predictions, folder)
    comparison = compare(predictions, results, drift, read_quality(predictions.experiment, folder), swept.blind)
    return SavedSweep(predictions=predictions, results=results, comparison=comparison, drift=drift)
