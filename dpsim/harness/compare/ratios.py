"""Compares runs with the first of them: the ratios of the settings in common, with bootstrap intervals.

Whole rounds are drawn, the same ones for all settings of a run: what slowed the machine in a round slowed all of it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import compress
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from dpsim.errors import ConfigError
from dpsim.harness.compare.runs import Floats, MeasuredRun, Named, RoundSamples, read_runs
from dpsim.records.run_comparison import Row, RunComparison
from dpsim.study.statistics import RESAMPLES

LEAST_ROUNDS = 3
"""With fewer rounds the spread of a median is not known, and no difference is called one."""
_QUANTITIES = {"sweep": "step", "bench allreduce": "allreduce"}
_KINDS = {"sweep": "sweep", "bench allreduce": "benchmark of the allreduce"}
_EMULATED = {"emulated_network": "network", "emulated_compute": "computation"}
_TIMES = ("time_s", "low_s", "high_s", "samples", "rounds")
Counts = NDArray[np.int64]


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
    return compare_measured(read_runs(paths, _labels(paths, labels)))


def compare_measured(runs: Sequence[MeasuredRun]) -> RunComparison:
    """Compare runs that were read with the first of them. Raises ``ConfigError`` where nothing can be compared."""
    first = runs[0]
    compared = [_compared(first, other, number) for number, other in enumerate(runs[1:], 1)]
    return RunComparison(
        kind=first.kind,
        quantity=_QUANTITIES[first.kind],
        runs=tuple(run.run for run in runs),
        points=[point for points, _, _ in compared for point in points],
        pairs=[pair for _, pair, _ in compared],
        not_compared=[each for _, _, left_out in compared for each in left_out],
    )


def _labels(paths: Sequence[Path], labels: Sequence[str] | None) -> list[str]:
    """Return a different name for each run: the given one, or that of its folder, or the whole path."""
    if labels is not None:
        named = all(label and label.isprintable() for label in labels)
        if len(labels) != len(paths) or len(set(labels)) != len(labels) or not named:
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
    return [f"{name} ({count})" if (count := names[: i + 1].count(name)) > 1 else name for i, name in enumerate(names)]


def _compared(a: MeasuredRun, b: MeasuredRun, number: int) -> tuple[list[Row], Row, list[Row]]:
    """Compare run ``number`` with the first; the rounds of the two are drawn independently."""
    _check_same_subject(a, b)
    names = {"a": a.run.label, "b": b.run.label}
    same_record, reasons = a.run.sha256 == b.run.sha256, _reasons(a, b)
    drawn = draws(max(1, a.rounds), seed=0), draws(max(1, b.rounds), seed=number)
    points, resampled = list[Row](), list[Floats]()
    for setting, of_a in a.rows.items():
        if (of_b := b.rows.get(setting)) is None or setting in reasons:
            continue
        ratio, ratios = (
            of_b["time_s"] / of_a["time_s"],
            (medians(b.samples[setting], drawn[1]) / medians(a.samples[setting], drawn[0])),
        )
        if same_record:
            ratio, ratios = 1.0, np.ones(RESAMPLES)
        points.append(names | {"setting": dict(setting)} | _ratio(of_a, of_b, ratio, ratios))
        resampled.append(ratios)
    if not points:
        raise _nothing_in_common(a, b, next(iter(reasons.values()), "one of them measured nothing"))
    groups = {name: [point["group"] == name for point in points] for name in dict.fromkeys(p["group"] for p in points)}
    pair = names | {
        "same_record": same_record,
        "overall": _mean("all", points, resampled),
        "groups": [
            _mean(name, [*compress(points, inside)], [*compress(resampled, inside)]) for name, inside in groups.items()
        ],
    }
    return points, pair, [names | {"setting": dict(setting), "reason": why} for setting, why in reasons.items()]


def _ratio(of_a: Row, of_b: Row, ratio: float, resampled: Floats) -> Row:
    """Return the times of both runs, their ratio with its interval, and the verdict."""
    low, high = interval(resampled)
    noise = max((of["noise"] for of in (of_a, of_b) if of["noise"] is not None), default=None)
    times = {f"{side}_{name}": of[name] for side, of in (("a", of_a), ("b", of_b)) for name in _TIMES}
    return {
        **{name: of_a[name] for name in ("group", "emulated_network", "emulated_compute")},
        **times,
        "ratio": ratio,
        "ratio_low": low,
        "ratio_high": high,
        "noise": noise,
        "verdict": verdict(ratio, low, high, noise, min(times["a_rounds"], times["b_rounds"])),
    }


def _check_same_subject(a: MeasuredRun, b: MeasuredRun) -> None:
    """Refuse runs of different kinds, and sweeps of different data sets."""
    if a.kind != b.kind:
        raise ConfigError(
            f"{a.run.label} is a {_KINDS[a.kind]} and {b.run.label} is a {_KINDS[b.kind]}",
            allowed="results of one kind",
            remedy="compare a sweep with a sweep, and a benchmark with a benchmark",
        )
    of_a, of_b = a.run.declared.get("data set"), b.run.declared.get("data set")
    if a.kind == "sweep" and of_a != of_b:
        raise ConfigError(
            f"{a.run.label} trains on {of_a}, and {b.run.label} on {of_b}",
            allowed="results of one data set",
            remedy="measure both with the same --dataset",
        )


def _reasons(a: MeasuredRun, b: MeasuredRun) -> dict[Named, str]:
    """Return why settings of either run are not compared: emulated in one run and real in the other, or missing."""
    reasons = {}
    for setting in (setting for setting in a.rows if setting in b.rows):
        for name, noun in _EMULATED.items():
            if a.rows[setting][name] != b.rows[setting][name]:
                emulated, real = (a, b) if a.rows[setting][name] else (b, a)
                reasons[setting] = f"the {noun} is emulated in {emulated.run.label} and real in {real.run.label}"
    for run, other in ((a, b), (b, a)):
        for setting in run.rows:
            if setting not in other.rows:
                only = f"only {run.run.label} measured it{_other_network(setting, run, other)}"
                reasons.setdefault(setting, other.unusable.get(setting, only))
        for setting, reason in run.unusable.items():
            reasons.setdefault(setting, reason)
    return reasons


def _other_network(setting: Named, run: MeasuredRun, other: MeasuredRun) -> str:
    """Say where the other run measured the same with the network emulated here and real there, or the reverse."""

    def rest(setting: Named) -> Named:  # the default algorithm depends on the network
        return tuple((name, value) for name, value in setting if name not in ("network", "algorithm"))

    for theirs, row in other.rows.items():
        if row["emulated_network"] != run.rows[setting]["emulated_network"] and rest(theirs) == rest(setting):
            network = dict(theirs)["network"]
            return f" ({other.run.label} has it on {network}: emulated and real networks are not compared)"
    return ""


def _nothing_in_common(a: MeasuredRun, b: MeasuredRun, reason: str) -> ConfigError:
    """Return the error for two runs without a setting to compare, with the fields that differ."""
    differing = []
    for name in dict.fromkeys(name for run in (a, b) for setting in run.rows for name, _ in setting):
        of_a, of_b = (
            {value for setting in run.rows if (value := dict(setting).get(name)) is not None} for run in (a, b)
        )
        if of_a and of_b and not of_a & of_b:
            differing.append(f"{name} is {_values(of_a)} in {a.run.label} and {_values(of_b)} in {b.run.label}")
    return ConfigError(
        f"{a.run.label} and {b.run.label} have no setting in common that can be compared: "
        f"{'; '.join(differing) or reason}",
        allowed="results in which at least one setting was measured in both",
        remedy="measure both with the same flags",
    )


def _values(values: Iterable[object]) -> str:
    ordered = sorted(map(str, values))
    return ", ".join(ordered[:4]) + ", ..." * (len(ordered) > 4)


def verdict(ratio: float, low: float, high: float, noise: float | None, rounds: int) -> str:
    """Return faster or slower where the interval excludes 1 and longer time / shorter time - 1 exceeds the noise."""
    if rounds < LEAST_ROUNDS or low <= 1 <= high or max(ratio, 1 / ratio) - 1 <= (noise or 0.0):
        return "not_distinguishable"
    return "faster" if ratio < 1 else "slower"


def _mean(name: str, points: Sequence[Row], resampled: Sequence[Floats]) -> Row:
    """Return the geometric mean of the ratios of several settings, its interval, and how many have each verdict."""
    low, high = interval(geometric_mean(np.array(resampled)))
    counts = Counter(point["verdict"] for point in points)
    return {
        "name": name,
        "settings": len(points),
        "ratio": float(geometric_mean(np.array([point["ratio"] for point in points]))),
        "low": low,
        "high": high,
        **{verdict: counts[verdict] for verdict in ("faster", "slower", "not_distinguishable")},
    }


def draws(rounds: int, *, seed: int) -> Counts:
    """Return how often each of ``rounds`` rounds occurs in each resample: shape (resamples, rounds)."""
    return np.random.default_rng(seed).multinomial(rounds, np.full(rounds, 1 / rounds), size=RESAMPLES)


def medians(samples: RoundSamples, drawn: Counts) -> Floats:
    """Return the median of each resample; NaN where none of the drawn rounds has a sample."""
    order = np.argsort(samples.time_s, kind="stable")
    times = samples.time_s[order]
    cumulated = np.cumsum(drawn[:, samples.round[order]], axis=1)
    total = cumulated[:, -1:]
    lower = np.minimum((2 * cumulated < total).sum(axis=1), len(times) - 1)
    upper = np.minimum((2 * cumulated <= total).sum(axis=1), len(times) - 1)
    middle: Floats = (times[lower] + times[upper]) / 2
    return np.where(total[:, 0] > 0, middle, np.nan)


def interval(values: Floats) -> tuple[float, float]:
    """Return the ends of the 95 % percentile interval of resampled values, without those that are NaN."""
    low, high = np.nanpercentile(values, (2.5, 97.5))
    return float(low), float(high)


def geometric_mean(values: Floats) -> Floats:
    """Return the geometric mean over the first axis (settings), without those that are NaN."""
    finite = np.isfinite(values)
    count = finite.sum(axis=0)
    sums = np.log(np.where(finite, values, 1.0)).sum(axis=0)
    averages: Floats = np.exp(np.divide(sums, count, out=np.full(sums.shape, np.nan), where=count > 0))
    return averages
