"""``load``: what dpsim wrote, as data. ``KINDS`` declares every kind of result."""

from __future__ import annotations

from pathlib import Path

from dpsim import codec
from dpsim.errors import ConfigError
from dpsim.harness.bench.result import result as bench_result
from dpsim.harness.quality.study import read_results as read_study_results
from dpsim.harness.sweep.packed import PACKED
from dpsim.harness.sweep.sweep import read_swept
from dpsim.records import bench, quality, reproduce, train
from dpsim.records.comparison import SweepData
from dpsim.records.quality import QualityResults
from dpsim.records.sweep import PREDICTIONS_SCHEMA, RESULTS_SCHEMA
from dpsim.report import bench as bench_report
from dpsim.report import quality as quality_report
from dpsim.report import reproduce as reproduce_report
from dpsim.report import training
from dpsim.report.saved import ResultKind, SavedResult
from dpsim.report.sweep import saved as sweep_report

_PREDICTIONS, _RESULTS = "predictions.json", "results.json"
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
    if not path.exists():
        raise ConfigError(f"there is no file or folder {path}", allowed=_ALLOWED)
    if path.is_dir():
        kind, path = _kind_of_folder(path)
    else:
        kind = _kind_of_file(path)
    return SavedResult(kind, kind.read(path))


def _kind_of_folder(folder: Path) -> tuple[ResultKind, Path]:
    """Return the kind of result in a folder, and the file that tells it."""
    for kind in KINDS.values():
        for name in kind.files:
            if (folder / name).is_file():
                return kind, folder / name
    names = sorted(path.name for path in folder.iterdir())
    inside = f"it has {', '.join(names[:4])}{' ...' if len(names) > 4 else ''}" if names else "it is empty"
    raise ConfigError(f"the folder {folder} holds no result of dpsim: {inside}", allowed=_ALLOWED)


def _kind_of_file(path: Path) -> ResultKind:
    raw = codec.read_raw(path, "result")
    schema = raw.get("schema") if isinstance(raw, dict) else None
    form = str(schema).partition("/")[0]
    for kind in KINDS.values():
        # of sweeps every version is taken, so that their reader can say which version reads it
        if schema in kind.schemas or (kind is KINDS["sweep"] and form in [s.partition("/")[0] for s in kind.schemas]):
            if kind.name != "train" or ("points" not in raw and raw.get("command") == "train"):
                return kind
            raise ConfigError(
                f"{path} is what dpsim {raw.get('command')} prints with --json, or writes with --output",
                allowed=_ALLOWED,
                remedy="it is one JSON object, with its rows in 'points' and what holds for all in 'summary': read it "
                "with json.load",
            )
    raise ConfigError(f"{path} is not a result of dpsim: its schema is {schema!r}", allowed=_ALLOWED)


def _read_sweep(path: Path) -> SweepData:
    folder = path.parent
    if not any((folder / name).exists() for name in (_RESULTS, PACKED)):
        raise ConfigError(
            f"the sweep in {folder} is unfinished: it has no {_RESULTS} yet",
            allowed="a sweep that has measured",
            remedy=f"give the command of the sweep again with --output {folder}; it goes on where it was",
        )
    return read_swept(folder)


def _read_quality(path: Path) -> QualityResults:
    results = read_study_results(path.parent)
    if results is None:
        raise ConfigError(f"{path.parent} has no {quality.RECORD}", allowed=_ALLOWED)
    return results


_DECLARED = (
    ResultKind(
        name="bench",
        files=(bench.RECORD,),
        schemas=(bench.SCHEMA,),
        read=lambda path: bench_result(bench.read(path)),
        report=bench_report,
    ),
    ResultKind(
        name="reproduce",
        files=(reproduce.RECORD,),
        schemas=(reproduce.SCHEMA,),
        read=reproduce.read,
        report=reproduce_report,
    ),
    ResultKind(
        name="sweep",
        files=(_PREDICTIONS, _RESULTS, PACKED),
        schemas=(PREDICTIONS_SCHEMA, RESULTS_SCHEMA),
        read=_read_sweep,
        report=sweep_report,
    ),
    ResultKind(
        name="quality", files=(quality.RECORD,), schemas=(quality.SCHEMA,), read=_read_quality, report=quality_report
    ),
    ResultKind(name="train", schemas=(train.SCHEMA,), read=train.read, report=training),
)
KINDS = {kind.name: kind for kind in _DECLARED}
"""The kinds of results by name. A folder is of the first of which it has a file."""
