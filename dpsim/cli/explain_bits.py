"""``dpsim reproduce --explain-bits``: which settings have the same bits, as a table or as data."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from dpsim.cli import show

if TYPE_CHECKING:
    from dpsim.harness.reproduce.explain_bits import Comparison, ExplainedBits
    from dpsim.records.reproduce import Reproduction

_MOST_PAIRS = 12
"""The most pairs of letters that are printed."""


def explain(reproduction: Reproduction, *, json: bool) -> None:
    """Say which plans of a reproduction have the same bits. Starts no rank."""
    from dpsim.harness.reproduce.explain_bits import ExplainedBits

    with show.progress() as progress:
        explained = ExplainedBits(reproduction, progress)
    if json:
        _print_json(explained)
    else:
        _print(explained)


def _print_json(explained: ExplainedBits) -> None:
    from dpsim.report.reproduce import configuration

    points = [
        configuration(plan)
        | {"bits": letter, "reference": explained.letters[reference := explained.reference(number)]}
        | _values(explained.compare(number, reference))
        for number, (plan, letter) in enumerate(zip(explained.plans, explained.letters, strict=True))
    ]
    pairs = [
        {"bits": explained.letters[number], "other": explained.letters[other]}
        | _values(explained.compare(number, other))
        for number, other in explained.pairs()
    ]
    show.print_json("reproduce", points, {"steps": explained.steps, "pairs": pairs})


def _values(comparison: Comparison) -> dict[str, Any]:
    """Return a comparison by the names of ``--json``."""
    return {
        "same_bits": comparison.same,
        "first_step": comparison.step,
        "first_tensor": comparison.tensor or None,
        "why": comparison.why,
    }


def _print(explained: ExplainedBits) -> None:
    from dpsim.records.reproduce import plan_name
    from dpsim.report.table import Column

    modes = list(dict.fromkeys(plan.batch_norm for plan in explained.plans))
    for mode in modes:
        show.table(
            (
                Column(head="run", cell=lambda number: plan_name(explained.plans[number]), left=True),
                Column(head="bits", cell=lambda number: explained.letters[number], left=True),
                Column(head="against 1 device", cell=lambda number: _against_reference(explained, number), left=True),
            ),
            [number for number, plan in enumerate(explained.plans) if plan.batch_norm == mode],
            title=f"bits in {explained.steps} steps" + (f", batch norm {mode}" if len(modes) > 1 else ""),
        )
    for sentence in _sentences(explained):
        print(sentence)


def _against_reference(explained: ExplainedBits, number: int) -> str:
    reference = explained.reference(number)
    return "" if number == reference else explained.compare(number, reference).verdict


def _sentences(explained: ExplainedBits) -> Iterator[str]:
    """Yield why plans with equal letters have the same bits, and why two letters differ, each with its reference first.

    In them, here is what is named first, and there the other.
    """
    for letter in dict.fromkeys(explained.letters):
        for number, other in explained.alike(letter):
            yield f"{letter}: the same bits, because {explained.compare(number, other).why}."
    pairs = explained.pairs()
    for number, other in pairs[:_MOST_PAIRS]:
        comparison = explained.compare(number, other)
        names = f"{explained.letters[number]} and {explained.letters[other]}"
        yield f"{names}: {comparison.verdict}, because {comparison.why}."
    if len(pairs) > _MOST_PAIRS:
        yield f"{len(pairs) - _MOST_PAIRS} more pairs of letters: --json has them."
