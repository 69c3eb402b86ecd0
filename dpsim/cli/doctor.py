"""``dpsim doctor``: what works on this machine, and which code is the fastest."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from dpsim.cli import flags, show

if TYPE_CHECKING:
    from dpsim.choices import Choices
    from dpsim.harness.doctor_gpu import Finding
    from dpsim.progress import Progress

EXAMPLES = """\
Examples:
  dpsim doctor
  dpsim doctor --tune
  dpsim doctor --json"""


def doctor(
    *,
    tune: Annotated[
        bool, Parameter(negative="", help="Measure again which code computes each operation fastest.")
    ] = False,
    propose: Annotated[
        Path | None,
        Parameter(help="With --tune: file for a new version of the table that reproducible training uses."),
    ] = None,
    json: flags.Json = False,
) -> int:
    """Try out what dpsim needs on this machine: ranks that add, kernels that compile.

    Plain training computes with the code that was measured to be the fastest on
    this machine; --tune measures it again. Exits with 1 if something that dpsim
    needs does not work.
    """
    from dpsim.errors import ConfigError
    from dpsim.harness.doctor import choices_of_ranks
    from dpsim.harness.doctor import tune as measure

    if propose is not None and not tune:
        raise ConfigError(
            "--propose without --tune", allowed="both", remedy="add --tune: a new table needs measurements"
        )
    flags.writable(propose, "kernel-table", flag="--propose")
    with show.progress() as progress:
        if tune:
            measure(progress)
        findings = _examined(progress, quiet=json)
    choices = choices_of_ranks()
    if propose is not None:
        _write_proposal(propose, choices, quiet=json)
    return _show(findings, choices, json=json, listed=tune)


def _show(findings: list[Finding], choices: Choices, *, json: bool, listed: bool) -> int:
    """Print which code is the fastest and what does not work, or everything as JSON; 1 if something does not work."""
    failed = [finding.name for finding in findings if finding.state == "fail"]
    if json:
        from dpsim import codec

        counts = {state: sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")}
        points = [finding._asdict() for finding in findings]
        show.print_json("doctor", points, counts | {"choices": codec.to_builtins(choices)})
        return 1 if failed else 0
    if listed:
        _print_choices(choices)
    else:
        count = len(choices.kernels)
        print(f"\n{count} operations have their fastest code chosen: dpsim doctor --json lists them")
    if failed:
        print(f"\nnot working: {', '.join(failed)}")
    return 1 if failed else 0


def _examined(progress: Progress, *, quiet: bool) -> list[Finding]:
    """Return what is found, and print each finding as soon as it is there, unless ``quiet``."""
    from dpsim.harness.doctor import examine

    findings = []
    for finding in examine(progress):
        findings.append(finding)
        if not quiet:
            progress("")
            print(f"{finding.state:<5} {finding.name:<14} {finding.found}")
            if finding.remedy:
                print(f"{'':<20} to do: {finding.remedy}")
    return findings


def _print_choices(choices: Choices) -> None:
    if choices.kernels:
        print("\nthe fastest code for an operation, and the time of the others as a multiple of its time:")
    for choice in choices.kernels:
        others = [f"{name} {ratio:.2f}" for name, ratio in choice.time_ratios.items() if name != choice.candidate]
        print(f"  {choice.problem.name:<52} {choice.candidate:<8} {', '.join(others)}")
    for selection in choices.selections:
        steps = [
            f"{name} below {size} bytes"
            for name, size in zip(selection.algorithms, selection.below_bytes, strict=False)
        ]
        print(f"  allreduce on {selection.devices} ranks: {', '.join([*steps, selection.algorithms[-1]])}")


def _write_proposal(path: Path, choices: Choices, *, quiet: bool) -> None:
    from dpsim import codec
    from dpsim.nn.implementations import committed, proposal

    proposed = proposal(committed(), choices)
    if proposed is not None:
        codec.write(path, proposed)
    if not quiet:
        print(
            f"\n{path} is version {proposed.version} of the table for reproducible training; nothing uses it yet"
            if proposed is not None
            else "\nnothing to propose: the table for reproducible training is within 10 % of the fastest everywhere"
        )
