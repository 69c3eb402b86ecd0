"""``dpsim doctor``: what works on this machine, and which code is the fastest on it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.choices import Choices

EXAMPLES = """\
Examples:
  dpsim doctor
  dpsim doctor --tune
  dpsim doctor --json"""
_MOST_SHOWN = 16


def doctor(
    *,
    tune: Annotated[
        bool, Parameter(negative="", help="Measure again which code computes each operation fastest.")
    ] = False,
    propose: Annotated[
        Path | None,
        Parameter(help="With --tune: write the next version of the table for reproducible training to this file."),
    ] = None,
    json: flags.Json = False,
) -> int:
    """Try what dpsim needs on this machine, by doing it: ranks that add numbers, kernels that compile.

    Plain training computes with what was measured to be the fastest here; --tune measures it again. Exits with 1 when
    something that dpsim needs does not work.
    """
    from dpsim.errors import ConfigError
    from dpsim.harness.doctor import choices_of_ranks, examine
    from dpsim.harness.doctor import tune as measure

    if propose is not None and not tune:
        raise ConfigError("--propose without --tune", allowed="both", remedy="add --tune: a proposal is measured first")
    findings = []
    with show.progress() as tell:
        if tune:
            measure(tell)
        for finding in examine(tell):
            findings.append(finding)
            if not json:
                tell("")
                print(f"{finding.state:<5} {finding.name:<14} {finding.found}")
                if finding.remedy:
                    print(f"{'':<20} to do: {finding.remedy}")
    choices = choices_of_ranks()
    if propose is not None:
        _write_proposal(propose, choices, quiet=json)
    failed = [finding.name for finding in findings if finding.state == "fail"]
    if json:
        from dpsim import codec

        counts = {state: sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")}
        show.as_json("doctor", codec.to_builtins(findings), counts | {"choices": codec.to_builtins(choices)})
        return 1 if failed else 0
    _print_choices(choices, len(choices.kernels) if tune else _MOST_SHOWN)
    if failed:
        print(f"\nnot working: {', '.join(failed)}")
    return 1 if failed else 0


def _print_choices(choices: Choices, most: int) -> None:
    if choices.kernels:
        print("\nthe fastest code for an operation, and the others' time as a multiple of its:")
    for choice in choices.kernels[:most]:
        others = [f"{name} {ratio:.2f}" for name, ratio in choice.time_ratios.items() if name != choice.candidate]
        print(f"  {choice.problem.name:<52} {choice.candidate:<8} {', '.join(others)}")
    if len(choices.kernels) > most:
        print(f"  and {len(choices.kernels) - most} more: dpsim doctor --json has them all")
    for selection in choices.selections:
        steps = [
            f"{name} below {size} bytes"
            for name, size in zip(selection.algorithms, selection.below_bytes, strict=False)
        ]
        print(f"  allreduce on {selection.devices} ranks: {', '.join([*steps, selection.algorithms[-1]])}")


def _write_proposal(path: Path, choices: Choices, *, quiet: bool) -> None:
    from dpsim import codec
    from dpsim.nn.kernel_table import committed, proposal

    proposed = proposal(committed(), choices)
    if proposed is not None:
        codec.write(path, proposed)
    if not quiet:
        print(
            f"\n{path} has version {proposed.version} of the table for reproducible training; nothing uses it yet"
            if proposed is not None
            else "\nnothing to propose: the table for reproducible training is within 10 % of the fastest everywhere"
        )
