"""``python -m dpsim.experiments.bug_or_rounding`` lets scripts train on 1 and 2 devices, and asks what differs.

Twenty-three have a planted mistake, which should be found and named; five differ by design, which is to be named and is
no mistake; twenty-seven are clean. Thirteen shard by FSDP, the others train with DDP. ``--only WORDS`` runs those whose
names have these words; ``--devices 1,2,4`` others.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from dpsim.errors import DpsimError
from dpsim.experiments import command
from dpsim.experiments.bug_or_rounding.scripts import BY_DESIGN, CLEAN, MISTAKES, Case
from dpsim.harness.reproduce.script import ScriptComparison, Verdict, compare


def main() -> int:
    """Run the cases and print a line for each, and the counts."""
    options = command.parser("bug_or_rounding", __doc__)
    options.add_argument("--only", default="", help="run the cases whose names contain this")
    options.add_argument("--devices", default="1,2", help="numbers of devices (1,2)")
    given = options.parse_args()
    devices = tuple(map(int, given.devices.split(",")))
    found = [_judged(case, devices) for case in MISTAKES if given.only in case.name]
    designs = [_judged(case, devices) for case in BY_DESIGN if given.only in case.name]
    clean = [_judged(case, devices) for case in CLEAN if given.only in case.name]
    print(f"planted mistakes: {len(found)}, found {sum(_alarm(each) for each, _ in found)}, named {_right(found)}")
    print(f"by design: {len(designs)}, named {_right(designs)}, alarms {sum(_alarm(each) for each, _ in designs)}")
    print(f"clean scripts: {len(clean)}, alarms {len(clean) - _right(clean)}")
    return 0


def _judged(case: Case, devices: tuple[int, ...]) -> tuple[Verdict | None, bool]:
    """Compare the runs of a case, and print what they came to; returns whether it is what it should be."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "train.py"
        path.write_text(case.script, encoding="utf-8")
        try:
            verdict = compare(ScriptComparison(script=str(path), devices=devices), lambda _: None)
        except DpsimError as error:
            print(f"FAILED  {case.name}: {error}", flush=True)
            return None, False
    kind = verdict.finding.kind if verdict.finding else ""
    right = kind == case.kind and any(case.design in each for each in (*verdict.designs, ""))
    if case.design:
        right = kind == case.kind and any(case.design in each for each in verdict.designs)
    largest = max(each.largest or 0.0 for each in verdict.compared)
    print(f"{'right' if right else 'WRONG'}  {case.name}: {verdict.sentence} [{largest:.2g}]", flush=True)
    return verdict, right


def _alarm(verdict: Verdict | None) -> bool:
    return verdict is not None and verdict.finding is not None and verdict.finding.is_mistake


def _right(judged: Sequence[tuple[Verdict | None, bool]]) -> int:
    return sum(right for _, right in judged)


if __name__ == "__main__":
    sys.exit(main())
