"""``dpsim reproduce --explain-bits``: which settings have the same bits, as a table or as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpsim.cli import show

if TYPE_CHECKING:
    from dpsim.harness.reproduce.lettered import Comparison, LetteredRuns
    from dpsim.harness.reproduce.script import ScriptComparison
    from dpsim.records.reproduce import Reproduction

_MOST_PAIRS = 12
"""The most pairs of letters that are printed."""


def explain(reproduction: Reproduction, *, json: bool) -> None:
    """Say which plans of a reproduction have the same bits. Starts no rank."""
    from dpsim.harness.reproduce.explain_bits import ExplainedBits

    with show.progress() as progress:
        explained = ExplainedBits(reproduction, progress)
    _show(explained, json=json)


def explain_script(comparison: ScriptComparison, *, json: bool) -> None:
    """Say which bucket caps of a script's DDP give the same bits. The script runs as one rank alone."""
    from dpsim.harness.reproduce.explain_script_bits import ExplainedScriptBits

    with show.progress() as progress:
        explained = ExplainedScriptBits(comparison, progress)
    _show(explained, json=json)


def _show(explained: LetteredRuns, *, json: bool) -> None:
    if json:
        _print_json(explained)
        return
    _print_table(explained)
    for sentence in _sentences(explained):
        print(sentence)


def _print_json(explained: LetteredRuns) -> None:
    from dpsim.harness.reproduce.lettered import pairs

    points = []
    for number, run in enumerate(explained.runs):
        reference = explained.reference(number)
        letters = {"bits": run.letter, "reference": explained.runs[reference].letter}
        points.append(dict(run.settings) | letters | _values(explained.compare(number, reference)))
    compared = [
        {"bits": explained.runs[number].letter, "other": explained.runs[other].letter}
        | _values(explained.compare(number, other))
        for number, other in pairs(explained)
    ]
    show.print_json("reproduce", points, {"pairs": compared})


def _values(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison by the names of ``--json``."""
    return {
        "same_bits": comparison.same,
        "first_step": comparison.step,
        "first_tensor": comparison.tensor or None,
        "why": comparison.why,
    }


def _print_table(explained: LetteredRuns) -> None:
    from dpsim.report.table import Column

    runs = explained.runs
    for section in dict.fromkeys(run.section for run in runs):
        show.table(
            (
                Column(head="run", cell=lambda number: runs[number].name, left=True),
                Column(head="bits", cell=lambda number: runs[number].letter, left=True),
                Column(head=explained.against, cell=lambda number: _against_reference(explained, number), left=True),
            ),
            [number for number, run in enumerate(runs) if run.section == section],
            title=", ".join(part for part in (explained.title, section) if part),
        )


def _against_reference(explained: LetteredRuns, number: int) -> str:
    reference = explained.reference(number)
    return "" if number == reference else explained.compare(number, reference).verdict


def _sentences(explained: LetteredRuns) -> Iterator[str]:
    """Yield why runs with equal letters have the same bits, and why two letters differ.

    In them, here is what is named first, and there the other.
    """
    from dpsim.harness.reproduce.lettered import alike, pairs

    for number, other in alike(explained):
        yield f"{explained.runs[number].letter}: the same bits, because {explained.compare(number, other).why}."
    every = pairs(explained)
    for number, other in every[:_MOST_PAIRS]:
        comparison = explained.compare(number, other)
        letters = f"{explained.runs[number].letter} and {explained.runs[other].letter}"
        yield f"{letters}: {comparison.verdict}, because {comparison.why}."
    if len(every) > _MOST_PAIRS:
        yield f"{len(every) - _MOST_PAIRS} more pairs of letters: --json has them."
