"""``dpsim doctor``: what works on this machine."""

from __future__ import annotations

from dpsim.cli import flags, show

EXAMPLES = """\
Examples:
  dpsim doctor
  dpsim doctor --json"""


def doctor(*, json: flags.Json = False) -> int:
    """Try what dpsim needs on this machine, by doing it: ranks that add numbers, kernels that compile.

    Exits with 1 when something that dpsim needs does not work.
    """
    from dpsim.harness.doctor import examine

    findings = []
    with show.progress() as tell:
        for finding in examine(tell):
            findings.append(finding)
            if not json:
                tell("")
                print(f"{finding.state:<5} {finding.name:<14} {finding.found}")
                if finding.remedy:
                    print(f"{'':<20} to do: {finding.remedy}")
    failed = [finding.name for finding in findings if finding.state == "fail"]
    if json:
        from dpsim import codec

        counts = {state: sum(f.state == state for f in findings) for state in ("ok", "warn", "fail")}
        show.as_json("doctor", codec.to_builtins(findings), counts)
    elif failed:
        print(f"\nnot working: {', '.join(failed)}")
    return 1 if failed else 0
