"""Reasons to doubt a comparison of runs, each with what to do about it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from dpsim.records.run_comparison import ComparedRun, RunComparison, RunPair
from dpsim.report.compare.tables import differing
from dpsim.report.content import ReportWarning
from dpsim.report.sweep.warnings import instant
from dpsim.report.words import counted, listed, percent

FEW_ROUNDS = 5
LEAST_SPEED_CHANGE = 0.03
_BY_CHOICE = ("optimizer", "wire dtype", "batch norm", "leaves")
_REFERENCES = {"sweep": "the reference computation", "bench allreduce": "scaling an array in memory"}


def warnings(comparison: RunComparison) -> tuple[ReportWarning, ...]:
    """Return every reason to doubt a comparison."""
    return (
        *(warning for pair in comparison.pairs for warning in _of_pair(comparison, pair)),
        *_of_declarations(comparison),
        *_of_points(comparison),
        *_of_settings(comparison),
    )


def _of_pair(comparison: RunComparison, pair: RunPair) -> Iterator[ReportWarning]:
    if pair.same_record:
        yield ReportWarning(
            kind="same-record",
            text=f"{pair.a} and {pair.b} are the same record, so every ratio is exactly 1",
            remedy="give the folders of two different runs",
        )
        return
    a, b = (next(run for run in comparison.runs if run.label == label) for label in (pair.a, pair.b))
    if _overlapping(a, b):
        yield ReportWarning(
            kind="measured-together",
            text=f"{pair.a} and {pair.b} were measured at the same time: if it was on one machine, they slowed each "
            "other",
            remedy="measure one after the other",
        )
    if one_processor(comparison, pair):
        yield ReportWarning(
            kind="not-interleaved",
            text=f"{pair.a} and {pair.b} were not measured in turns: what changed on the machine between them, such as "
            "other users of its cores, is in the ratios and not in their intervals",
            remedy="measure both again, in the order A B A B, and compare the two runs of A with each other: their "
            "difference is the noise between runs",
        )
        change = (pair.reference_ratio or 1.0) - 1
        if abs(change) > LEAST_SPEED_CHANGE:
            yield ReportWarning(
                kind="other-speed",
                text=f"the machine itself was {percent(abs(change))} {'slower' if change > 0 else 'faster'} in "
                f"{pair.b} than in {pair.a}, by the time of {_REFERENCES[comparison.kind]}",
                remedy="read the mean at equal speed as well, or measure again on a machine whose cores are not shared",
            )


def one_processor(comparison: RunComparison, pair: RunPair) -> bool:
    """Return whether both runs of a pair name the same model of processor, so that they may be of one machine."""
    names = {run.environment.processor for run in comparison.runs if run.label in (pair.a, pair.b)}
    return len(names) == 1


def _overlapping(a: ComparedRun, b: ComparedRun) -> bool:
    times = [instant(text) for run in (a, b) for text in (run.measured_from, run.measured_until)]
    from_a, until_a, from_b, until_b = times
    if from_a is None or until_a is None or from_b is None or until_b is None:
        return False
    return from_a < until_b and from_b < until_a


def _of_declarations(comparison: RunComparison) -> Iterator[ReportWarning]:
    names = [name for name in differing(comparison.runs) if name in _BY_CHOICE]
    if names and comparison.kind == "sweep":
        yield ReportWarning(
            kind="other-declaration",
            text=f"the runs differ in {listed(names)}, which changes the work of a step",
            remedy="read the table of environments: compare them only if this difference is what you want to measure",
        )


def _of_points(comparison: RunComparison) -> Iterator[ReportWarning]:
    few = [point for point in comparison.points if min(point.a_rounds, point.b_rounds) < FEW_ROUNDS]
    if few:
        yield ReportWarning(
            kind="few-rounds",
            text=f"{counted(len(few), 'ratio')} with fewer than {FEW_ROUNDS} rounds in a run: the interval is a guess",
            remedy="raise the budget of the runs",
        )
    without = [point for point in comparison.points if point.noise is None and point.setting.get("devices") != 1]
    if without:
        yield ReportWarning(
            kind="no-noise",
            text=f"neither run has an A/A pair for {counted(len(without), 'ratio')}: their noise is unknown, and the "
            "verdict rests on the interval alone",
            remedy="measure again with the A/A pairs that dpsim chooses",
        )
    emulated = [point for point in comparison.points if point.emulated_network or point.emulated_compute]
    if emulated:
        yield ReportWarning(
            kind="emulated",
            text=f"{counted(len(emulated), 'ratio')} of emulated networks or computation: they say how the programs "
            "compare there, not how fast the hardware is",
            remedy="measure on the network itself",
        )


def _of_settings(comparison: RunComparison) -> Iterator[ReportWarning]:
    if comparison.not_compared:
        reasons = Counter(f"{each.reason}" for each in comparison.not_compared)
        parts = [f"{number}: {reason}" for reason, number in reasons.most_common()]
        yield ReportWarning(
            kind="not-compared",
            text=f"{counted(len(comparison.not_compared), 'setting')} not compared ({listed(parts)})",
            remedy="measure them in all runs with the same flags; --output and --json list them",
        )
