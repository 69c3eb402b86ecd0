"""Reads several runs and compares each with the first, by the settings that they have in common."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from dpsim import codec
from dpsim.errors import ConfigError, FileFormatError
from dpsim.harness.compare import from_bench, from_sweep
from dpsim.harness.compare.pairs import PairOfRuns, Ratio, summary
from dpsim.harness.compare.runs import MeasuredRun
from dpsim.records import bench, reproduce
from dpsim.records.run_comparison import NotCompared, RunComparison, RunPair

_KINDS = "the folder of a sweep or of bench allreduce, or the record in it (results.json, allreduce.json)"
_QUANTITIES = {"sweep": "step", "bench allreduce": "allreduce"}
_MUST_AGREE = ("model", "data set")


def compare_runs(paths: Sequence[Path], labels: Sequence[str] | None = None) -> RunComparison:
    """Compare the runs in ``paths`` with the first of them.

    Raises ``FileFormatError`` for a path without a readable record, and ``ConfigError`` for fewer than two runs, for
    labels that do not name each run once, and for runs that have nothing in common to compare.
    """
    if len(paths) < 2:
        raise ConfigError(
            f"{len(paths)} {'result' if len(paths) == 1 else 'results'} to compare",
            allowed="two or more folders",
            remedy="give one more, or read a single one with dpsim report",
        )
    names = _labels(paths, labels)
    return compare_measured([read_run(path, name) for path, name in zip(paths, names, strict=True)])


def compare_measured(runs: Sequence[MeasuredRun]) -> RunComparison:
    """Compare runs that were read with the first of them. Raises ``ConfigError`` where nothing can be compared."""
    first = runs[0]
    ratios: list[Ratio] = []
    pairs: list[RunPair] = []
    not_compared: list[NotCompared] = []
    for number, other in enumerate(runs[1:], 1):
        _check_same_subject(first, other)
        pair = PairOfRuns.of(first, other, number)
        of_pair, left_out = pair.ratios(), list(pair.not_compared())
        if not of_pair:
            raise _nothing_in_common(first, other, left_out)
        ratios += of_pair
        pairs.append(summary(pair, of_pair))
        not_compared += left_out
    return RunComparison(
        kind=first.kind,
        quantity=_QUANTITIES[first.kind],
        runs=tuple(run.run for run in runs),
        points=tuple(ratio.point for ratio in ratios),
        pairs=tuple(pairs),
        not_compared=tuple(not_compared),
    )


def read_run(path: Path, label: str) -> MeasuredRun:
    """Read a run from its folder, or from the record in it. Raises ``FileFormatError``."""
    if path.is_file():
        return _read_file(path, label)
    if not path.is_dir():
        raise FileFormatError(f"there is no file or folder {path}", allowed=_KINDS)
    if (path / bench.RECORD).is_file():
        return from_bench.read_bench(path, label)
    if (path / from_sweep.RECORD).is_file():
        return from_sweep.read_sweep(path, label)
    if (path / reproduce.RECORD).is_file():
        raise _reproduction(path)
    if (path / from_sweep.PREDICTIONS).is_file():
        raise FileFormatError(
            f"{path} holds predictions but no results: nothing was measured, or the sweep did not end",
            allowed=_KINDS,
            remedy="run the sweep again with the same --output: it goes on with the samples it has",
        )
    raise FileFormatError(f"{path} holds no record that can be compared", allowed=_KINDS)


def _read_file(path: Path, label: str) -> MeasuredRun:
    """Read the run that a record belongs to, by the schema of the record."""
    raw = codec.read_raw(path, "results")
    schema = raw.get("schema") if isinstance(raw, dict) else None
    if schema == bench.SCHEMA:
        return from_bench.bench_run(bench.read(path), label, str(path))
    if isinstance(raw, dict) and raw.get("command") == "train":
        raise FileFormatError(
            f"{path} is a result of dpsim train: it has one median step and no samples, so its noise is not known",
            allowed=_KINDS,
            remedy="measure the setting with dpsim sweep fusion-threshold or dpsim sweep devices",
        )
    if schema == reproduce.SCHEMA:
        raise _reproduction(path)
    if path.name != from_sweep.RECORD:
        raise FileFormatError(f"{path} is no record that can be compared: its schema is {schema!r}", allowed=_KINDS)
    return from_sweep.read_sweep(path.parent, label)


def _reproduction(path: Path) -> FileFormatError:
    return FileFormatError(
        f"{path} is a check of reproducibility: it holds bits, not times",
        allowed=_KINDS,
        remedy="compare bits with dpsim reproduce --against",
    )


def _labels(paths: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return a different name for each run: the given one, or that of its folder, or the whole path."""
    if labels is not None:
        if len(labels) != len(paths) or len(set(labels)) != len(labels) or not all(map(_is_name, labels)):
            raise ConfigError(
                f"--label is {','.join(labels)!r} for {len(paths)} runs",
                allowed="one different name for each run, separated by commas, without control characters",
                remedy=f"write --label {','.join(['before', 'after', *map(str, range(3, len(paths) + 1))])}",
            )
        return list(labels)
    names = [(path.parent if path.is_file() else path).resolve().name for path in paths]
    if len(set(names)) < len(names):
        names = [str(path) for path in paths]
    names = ["".join(letter if letter.isprintable() else "?" for letter in name) for name in names]
    seen: Counter[str] = Counter()
    for number, name in enumerate(names):
        seen[name] += 1
        if seen[name] > 1:
            names[number] = f"{name} ({seen[name]})"
    return names


def _is_name(label: str) -> bool:
    return bool(label) and label.isprintable()


def _check_same_subject(a: MeasuredRun, b: MeasuredRun) -> None:
    """Refuse runs of different kinds, and sweeps of different models or data sets."""
    if a.kind != b.kind:
        raise ConfigError(
            f"{a.run.label} is a {_kind(a)} and {b.run.label} is a {_kind(b)}",
            allowed="results of one kind",
            remedy="compare a sweep with a sweep, and a benchmark with a benchmark",
        )
    for name in _MUST_AGREE:
        of_a, of_b = a.run.declared.get(name), b.run.declared.get(name)
        if a.kind == "sweep" and of_a != of_b:
            raise ConfigError(
                f"{a.run.label} trains the {name} {of_a}, and {b.run.label} the {name} {of_b}",
                allowed="results of one model and one data set",
                remedy="measure both with the same --model and --dataset",
            )


def _kind(run: MeasuredRun) -> str:
    return "sweep" if run.kind == "sweep" else "benchmark of the allreduce"


def _nothing_in_common(a: MeasuredRun, b: MeasuredRun, left_out: Sequence[NotCompared]) -> ConfigError:
    """Return the error for two runs without a setting to compare, with the fields that differ."""
    usable = [[dict(setting) for setting in run.settings] for run in (a, b)]
    differing = []
    for name in dict.fromkeys(name for settings in usable for setting in settings for name in setting):
        of_a, of_b = ({setting[name] for setting in settings if setting.get(name) is not None} for settings in usable)
        if of_a and of_b and not of_a & of_b:
            differing.append(f"{name} is {_values(of_a)} in {a.run.label} and {_values(of_b)} in {b.run.label}")
    reason = "; ".join(differing) or (left_out[0].reason if left_out else "one of them measured nothing")
    return ConfigError(
        f"{a.run.label} and {b.run.label} have no setting in common that can be compared: {reason}",
        allowed="results in which at least one setting was measured in both",
        remedy="measure both with the same flags",
    )


def _values(values: set[str | int | float | bool | None]) -> str:
    ordered = sorted(map(str, values))
    return ", ".join(ordered[:4]) + (", ..." if len(ordered) > 4 else "")
