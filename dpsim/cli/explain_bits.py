"""``dpsim reproduce --explain-bits``: which settings have the same bits, as a table or as data."""

from __future__ import annotations

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

    def against_reference(number: int) -> Comparison | None:
        reference = explained.reference(number)
        return None if number == reference else explained.compare(number, reference)

    rows = [(number, against_reference(number)) for number in range(len(explained.plans))]
    modes = list(dict.fromkeys(plan.batch_norm for plan in explained.plans))
    for mode in modes:
        show.table(
            (
                Column(head="run", cell=lambda row: plan_name(explained.plans[row[0]]), left=True),
                Column(head="bits", cell=lambda row: explained.letters[row[0]], left=True),
                Column(head="against 1 device", cell=lambda row: row[1].verdict if row[1] else "", left=True),
                Column(head="because", cell=lambda row: row[1].why if row[1] else "", left=True),
            ),
            [row for row in rows if explained.plans[row[0]].batch_norm == mode],
            title=f"bits in {explained.steps} steps" + (f", batch norm {mode}" if len(modes) > 1 else ""),
        )
    pairs = explained.pairs()
    for number, other in pairs[:_MOST_PAIRS]:
        comparison = explained.compare(number, other)
        names = f"{explained.letters[number]} and {explained.letters[other]}"
        print(f"{names}: {comparison.verdict}, because {comparison.why}.")
    if len(pairs) > _MOST_PAIRS:
        print(f"{len(pairs) - _MOST_PAIRS} more pairs: --json has them.")
    print("Equal letters have equal bits; here is the row or the first letter, there what it is compared with.")
